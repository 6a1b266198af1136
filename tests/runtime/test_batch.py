"""Several sequences at once: each has the tokens that it has alone, and what they share is read once."""

import threading

import numpy as np
import pytest

from coldpress.runtime.decoder import decoder as decoder_module
from coldpress.runtime.generate.admission import Admission, AtOnce
from coldpress.runtime.generate.batch import BatchRoom, Prompt, generate_batch, generate_each
from coldpress.runtime.generate.prefixes import Prefixes
from coldpress.runtime.generate.sampling import Sampling
from coldpress.runtime.generate.session import Session
from coldpress.runtime.simulate import simulate
from coldpress.runtime.trace import FETCH, Recorder
from coldpress.schemas.errors import ColdpressError, DoesNotFitError
from tests.runtime.test_decode_many import ALL_IN_DRAM, FORMATS, recipe_of
from tests.support.artifacts import build_artifact

PROMPTS = [[3, 14], [15, 92, 65, 35], [89], [79, 32, 38]]
NUM_NEW = 9


def open_session(folder, method="topk", quantization="int4_group32", **changes):
    recipe = recipe_of(method, quantization, **{"context_length": 64, **changes})
    return Session(build_artifact(folder / "a", recipe).path)


def alone(session, sampling=None, **settings):
    """What each prompt gives in a run of its own."""
    each = sampling or [None] * len(PROMPTS)
    return [
        session.generate(prompt, NUM_NEW, sampling=its, **settings).token_ids
        for prompt, its in zip(PROMPTS, each, strict=True)
    ]


def ids_of(batch):
    return [tuple(token.id for token in tokens) for tokens in batch.sequences]


@pytest.mark.parametrize(
    ("method", "quantization"),
    [
        *(("topk", quantization) for quantization in FORMATS),
        ("dense", "int4_group32"),
        ("predictor", "int4_group32"),
    ],
)
def test_sequences_decoded_together_have_the_logits_that_each_has_alone(method, quantization, tmp_path):
    """To the bit, with everything in memory; of prompts and contexts of different lengths."""
    session = open_session(tmp_path, method, quantization, **ALL_IN_DRAM)
    decoder, follow = session.decoder, np.array([[7, 11, 13], [17, 19, 23], [29, 31, 37], [41, 43, 47]])
    expected = []
    for prompt, tokens in zip(PROMPTS, follow, strict=True):
        decoder.begin(12)
        decoder.prefill(np.array(prompt))
        expected.append([decoder.decode(token) for token in tokens.tolist()])
    decoder.begin_batch([12, 8, 5, 9])
    for number, prompt in enumerate(PROMPTS):
        decoder.prefill_last(np.array(prompt), number)
    for step, among in enumerate([[0, 1, 2, 3], [3, 1], [0, 2]]):
        place = {0: [0] * 4, 1: [0, 1, 0, 1], 2: [1, 2, 1, 2]}[step]
        found = decoder.decode_each([follow[number, place[number], None] for number in among], among)
        for row, number in zip(found, among, strict=True):
            assert (row == expected[number][place[number]]).all()
    assert session.store.counters.misses == 0


def test_a_batch_gives_each_sequence_its_own_tokens_and_what_passes_took(tmp_path):
    session = open_session(tmp_path, **ALL_IN_DRAM)
    expected = alone(session, ignore_eos=True)
    seen = []
    done = generate_batch(session, PROMPTS, NUM_NEW, ignore_eos=True, on_token=lambda *each: seen.append(each))
    assert ids_of(done) == expected
    assert [[token for number, token in seen if number == at] for at in range(4)] == [list(s) for s in done.sequences]
    assert done.metrics.num_tokens == len(done.decoded) == 4 * (NUM_NEW - 1)
    assert [token.pass_number for token in done.decoded] == [number for number in range(1, NUM_NEW) for _ in range(4)]
    assert [token.leads for token in done.decoded] == [True, False, False, False] * (NUM_NEW - 1)
    prefilled = [tokens[0] for tokens in done.sequences]
    assert [token.leads for token in prefilled] == [True, False, False, False]  # they had one pass
    assert sum(token.read_bytes for token in prefilled) == done.metrics.prefill_read_bytes
    assert {token.pass_number for token in prefilled} == {0}
    assert not any(token.accepted for token in done.decoded)
    assert sum(token.hits for token in done.decoded) == done.metrics.hits
    assert session.generate(PROMPTS[0], NUM_NEW, ignore_eos=True).token_ids == expected[0]


def test_draws_are_those_of_each_sequence_alone(tmp_path):
    session = open_session(tmp_path, **ALL_IN_DRAM)
    sampling = [Sampling(temperature=3.0, seed=5), Sampling(), Sampling(temperature=3.0, seed=6), Sampling(top_k=2)]
    sampling[3] = sampling[0].model_copy(update={"repetition_penalty": 2.0})
    expected = alone(session, sampling, ignore_eos=True)
    assert ids_of(generate_batch(session, PROMPTS, NUM_NEW, sampling=sampling, ignore_eos=True)) == expected
    assert expected != alone(session, ignore_eos=True)


def test_a_sequence_that_ends_leaves_the_others_as_they_are(tmp_path):
    """At an end-of-sequence token, or where the caller says so; its KV cache is given back."""
    session = open_session(tmp_path, **ALL_IN_DRAM)
    expected = alone(session, ignore_eos=True)
    stop = next(token for token in expected[1] if token not in expected[0][:3])
    session.decoder.spec = session.decoder.spec.model_copy(update={"eos_token_ids": (stop,)})
    until = {number: ids[: ids.index(stop) + 1] if stop in ids else ids for number, ids in enumerate(expected)}
    lengths = []

    def end(number, token):
        lengths.append([cache.context_length for cache in session.decoder._caches])
        return number == 0 and token.id == expected[0][2]

    done = generate_batch(session, PROMPTS, NUM_NEW, on_token=end)
    assert ids_of(done) == [expected[0][: expected[0].index(expected[0][2]) + 1], until[1], until[2], until[3]]
    assert min(map(len, ids_of(done))) < max(map(len, ids_of(done)))
    assert lengths[0] == [len(prompt) + NUM_NEW for prompt in PROMPTS]
    assert lengths[-1].count(0) >= 2
    assert {cache.context_length for cache in session.decoder._caches} == {0}


def test_what_sequences_use_is_asked_for_once_and_a_trace_of_them_replays(tmp_path):
    built = build_artifact(tmp_path / "a", recipe_of("relu", "fp16", context_length=64))
    recorder, separate = Recorder(), Recorder()
    session = Session(built.path, recorder=recorder)
    expected = alone(Session(built.path, recorder=separate), ignore_eos=True)
    done = generate_batch(session, PROMPTS, NUM_NEW, ignore_eos=True)
    assert ids_of(done) == expected  # a ReLU has no edge at which rounding would decide
    one_by_one, at_once = ([event for event in each.events if event.kind == FETCH] for each in (separate, recorder))
    assert len(one_by_one) == 4 * len(at_once)
    per_sequence = np.array_split(np.arange(len(one_by_one)), 4)
    for place, event in enumerate(at_once):
        wanted = [one_by_one[its[place]].ids for its in per_sequence]
        assert event.ids.tolist() == np.unique(np.concatenate(wanted)).tolist()
    replayed = simulate(session.artifact, session.plan, recorder.events)
    for name in ("num_tokens", "hits", "misses", "evictions", "reads", "read_bytes", "extents_sha256"):
        assert getattr(replayed, name) == getattr(done.metrics, name)


def test_units_give_way_to_kv_caches_while_a_batch_lasts(tmp_path):
    session = open_session(tmp_path, "relu", "fp16", context_length=16, slots_share=0.5)
    expected = alone(session, ignore_eos=True)
    before, during = session.plan, []

    def note(number, token):
        during.append((session.plan, session.store.dram_used_bytes))

    assert ids_of(generate_batch(session, PROMPTS, NUM_NEW, ignore_eos=True, on_token=note)) == expected
    plan, used = during[0]
    num_tokens = sum(map(len, PROMPTS)) + 4 * NUM_NEW
    assert plan.kv_cache_bytes * 16 == before.kv_cache_bytes * num_tokens  # as many bytes as tokens need
    assert used <= plan.dram_budget_bytes == before.dram_budget_bytes
    assert sum(part.cache_slots for part in plan.parts) < sum(part.cache_slots for part in before.parts)
    assert session.plan == before
    assert session.generate(PROMPTS[0], NUM_NEW, ignore_eos=True).token_ids == expected[0]


def test_a_budget_that_changes_meanwhile_holds_the_kv_caches(tmp_path):
    session = open_session(tmp_path, "relu", "fp16", context_length=16, slots_share=0.5)
    expected, opened, plans = alone(session, ignore_eos=True), session.plan, []

    def more(number, token):
        if number == 3 and token.pass_number == 2:
            session.resize(opened.dram_budget_bytes + 100_000)
        plans.append(session.plan)

    assert ids_of(generate_batch(session, PROMPTS, NUM_NEW, ignore_eos=True, on_token=more)) == expected
    assert plans[-1].kv_cache_bytes == plans[0].kv_cache_bytes > opened.kv_cache_bytes
    assert session.plan.dram_budget_bytes == plans[-1].dram_budget_bytes == opened.dram_budget_bytes + 100_000
    assert session.plan.kv_cache_bytes == opened.kv_cache_bytes


def test_prompts_may_change_the_budget_as_they_are_taken(tmp_path):
    """The session's lock is free while the caller makes the next prompt."""
    session = open_session(tmp_path, "relu", "fp16", context_length=16, slots_share=0.5)
    expected, opened, found = alone(session, ignore_eos=True), session.plan, []

    def prompts():
        for number, ids in enumerate(PROMPTS):
            session.resize(opened.dram_budget_bytes + number * 10_000)
            yield Prompt(ids)

    def work():
        found.extend(generate_each(session, prompts(), NUM_NEW, BatchRoom(2, 16, 32), ignore_eos=True))

    worker = threading.Thread(target=work, daemon=True)  # a deadlock ends with the tests
    worker.start()
    worker.join(30)
    assert not worker.is_alive()
    assert [tuple(token.id for token in tokens) for tokens in found] == expected
    assert session.plan.dram_budget_bytes == opened.dram_budget_bytes + 30_000


def test_what_no_budget_or_context_holds_is_refused(tmp_path):
    session = open_session(tmp_path, context_length=16)
    before = session.plan
    with pytest.raises(DoesNotFitError, match=r"the KV cache takes \d+ bytes, .* leaves \d+ of .* fewer sequences or"):
        generate_batch(session, [[1] * 6] * 32, 10)
    with pytest.raises(DoesNotFitError, match=r"make 18 tokens, the plan .* has a KV cache for 16"):
        generate_batch(session, [[1], [2] * 8], 10)
    assert session.plan == before
    with pytest.raises(DoesNotFitError, match="the KV caches of 2 sequences take"):
        session.decoder.begin_batch([9, 9])
    for count in (0, 33):
        with pytest.raises(ColdpressError, match=f"{count} prompts are to be continued at once, expected 1 to 32"):
            generate_batch(session, [[1]] * count, 1)
    with pytest.raises(ColdpressError, match="1 settings of sampling came with 2 prompts"):
        generate_batch(session, [[1], [2]], 1, sampling=[Sampling()])
    with pytest.raises(ColdpressError, match="the number of new tokens is 0"):
        generate_batch(session, [[1], [2]], 0)
    with pytest.raises(ColdpressError, match="the prompt has no tokens"):
        generate_batch(session, [[1], []], 2)
    with pytest.raises(ColdpressError, match="token id 96 is outside the vocabulary"):
        generate_batch(session, [[1], [96]], 2)
    assert len(generate_batch(session, [[1], [2]], 2, ignore_eos=True).decoded) == 2


def test_a_selector_that_sees_what_is_in_memory_decodes_one_sequence_at_a_time(tmp_path):
    session = open_session(tmp_path, "dip_ca")
    with pytest.raises(ColdpressError, match="the selector 'dip_ca' uses what is in DRAM"):
        generate_batch(session, PROMPTS, 3)
    expected = open_session(tmp_path / "again", "dip_ca").generate(PROMPTS[0], 3, ignore_eos=True).token_ids
    assert ids_of(generate_batch(session, PROMPTS[:1], 3, ignore_eos=True)) == [expected]


@pytest.mark.slow
def test_any_number_of_prompts_goes_on_at_once_as_far_as_there_is_room(tmp_path):
    """Of six places and fewer tokens than six sequences may take; each has the tokens that it has alone."""
    session = open_session(tmp_path, **ALL_IN_DRAM)
    random, under_way, most = np.random.default_rng(7), set(), [0, 0]
    prompts = [random.integers(2, 96, size).tolist() for size in random.integers(1, 12, 20)]
    last = random.integers(0, NUM_NEW, 20)  # where the caller ends each
    count = [0] * 20

    def end(number, token):
        under_way.add(number)
        caches = session.decoder._caches
        most[0], most[1] = max(most[0], len(under_way)), max(most[1], sum(cache.context_length for cache in caches))
        count[number] += 1
        if over := count[number] > last[number]:
            under_way.remove(number)
        return over

    each = (Prompt(prompt, Sampling(temperature=2.0, seed=seed)) for seed, prompt in enumerate(prompts))
    steps = generate_each(session, each, NUM_NEW, BatchRoom(6, 20, 75), ignore_eos=True, on_token=end)
    found = [next(steps) for _ in range(20)]
    with pytest.raises(StopIteration) as done:
        next(steps)
    alone = [
        session.generate(prompt, NUM_NEW, sampling=Sampling(temperature=2.0, seed=seed), ignore_eos=True).token_ids
        for seed, prompt in enumerate(prompts)
    ]
    assert [tuple(token.id for token in tokens) for tokens in found] == [
        ids[: at + 1] for ids, at in zip(alone, last.tolist(), strict=True)
    ]
    assert 4 <= most[0] <= 6
    assert most[1] <= 75
    metrics = done.value.value
    decoded = [token for tokens in found for token in tokens[1:]]
    assert metrics.num_tokens == len(decoded)
    assert metrics.hits == sum(token.hits for token in decoded) > 0
    assert metrics.prefill_read_bytes == sum(tokens[0].read_bytes for tokens in found)
    assert {tokens[0].pass_number for tokens in found} == {0}
    assert sum(tokens[0].leads for tokens in found) <= 14  # passes over flash, some for several prompts


@pytest.mark.parametrize("pays", [True, False])
def test_prompts_begin_when_it_pays_or_when_all_before_them_have_ended(tmp_path, monkeypatch, pays):
    """What passes took is told to who says so."""
    session, told, asked, under_way, seen = open_session(tmp_path, **ALL_IN_DRAM), [], [], set(), []
    monkeypatch.setattr(Admission, "prefilled", lambda _, *found: told.append(("prefilled", *found)))
    monkeypatch.setattr(Admission, "decoded", lambda _, *found, idle: told.append(("decoded", *found, idle)))
    monkeypatch.setattr(Admission, "pays", lambda _, num_tokens: asked.append(num_tokens) or pays)
    monkeypatch.setattr(decoder_module, "PREFILL_CHUNK_TOKENS", 32)
    lengths, count = [1, 5, 3, 2, 4, 2], [0] * 6
    prompts = [[5] * size for size in (3, 4, 40, 2, 1, 2)]

    def end(number, token):
        under_way.add(number)
        count[number] += 1
        if over := count[number] == lengths[number]:
            under_way.remove(number)
        seen.append((number, token.pass_number, len(under_way)))
        return over

    found = list(generate_each(session, map(Prompt, prompts), 9, BatchRoom(3, 49, 80), ignore_eos=True, on_token=end))
    first = [tokens[0] for tokens in found]
    assert list(map(len, found)) == lengths
    assert [found[3][0].seconds > 0, found[4][0].seconds > 0] == ([True, True] if pays else [True, False])
    assert [what for what in told if what[0] == "prefilled"] == [
        ("prefilled", passes, token.seconds)
        for passes, token in zip([3, 1, 1, 1] if pays else [3, 1], filter(lambda t: t.leads, first), strict=True)
    ]
    decoded = sorted((token for tokens in found for token in tokens[1:] if token.leads), key=lambda t: t.pass_number)
    sizes = [len([number for number, at, _ in seen if at == token.pass_number]) for token in decoded]
    assert [what for what in told if what[0] == "decoded"] == [
        ("decoded", size, token.seconds, size < 3) for size, token in zip(sizes, decoded, strict=True)
    ]
    assert set(asked) <= {len(prompts[number]) * free for number in (3, 4, 5) for free in (1, 2)}
    assert max(sizes) == 3


def test_a_stream_of_sequences_that_is_given_up_leaves_the_session_as_it_was(tmp_path):
    session = open_session(tmp_path, "relu", "fp16", context_length=16, slots_share=0.5)
    before, each = session.plan, map(Prompt, PROMPTS * 3)
    steps = generate_each(session, each, NUM_NEW, BatchRoom(3, 13, 39), ignore_eos=True)
    first = next(steps)
    assert session.plan.kv_cache_bytes > before.kv_cache_bytes
    steps.close()
    assert session.plan == before
    assert tuple(token.id for token in first) == session.generate(PROMPTS[0], NUM_NEW, ignore_eos=True).token_ids
    with pytest.raises(DoesNotFitError, match="make 17 tokens, the plan"):  # more than was said
        list(generate_each(session, map(Prompt, [[1], [2] * 9]), 8, BatchRoom(2, 9, 18), ignore_eos=True))
    assert session.plan == before


@pytest.mark.slow
@pytest.mark.parametrize(("method", "quantization"), [("relu", "fp16"), ("topk", "int4_group32"), ("dip", "fp16")])
def test_prompts_share_a_pass_over_flash_up_to_its_chunk(tmp_path, monkeypatch, method, quantization):
    """Each has the logits that it has alone, to the bit, also rounded activations and where it takes two passes."""
    recipe = recipe_of(method, quantization, context_length=64)
    session = Session(build_artifact(tmp_path / "a", recipe).path, activations="int16")
    prompts = [np.arange(3, 3 + size) for size in (5, 40, 1, 30, 9)]

    def logits(*numbers):
        session.decoder.begin_batch([40, 40, 40][: len(numbers)])
        before = session.store.counters.prefill_read_bytes
        found = session.decoder.prefill_each([prompts[number] for number in numbers], range(len(numbers)))
        return found, session.store.counters.prefill_read_bytes - before

    def begin(decoder, context_lengths):
        decoder._caches[:] = [decoder._new_cache(length) for length in context_lengths]

    monkeypatch.setattr(type(session.decoder), "begin_batch", begin)  # with more room than the plan has
    whole = logits(0)[1]
    for chunk, passes in ((256, 1), (50, 2), (36, 3), (32, 4)):
        monkeypatch.setattr(decoder_module, "PREFILL_CHUNK_TOKENS", chunk)
        expected = np.concatenate([logits(number)[0] for number in (0, 1, 3)])
        found, read = logits(0, 1, 3)
        assert (found == expected).all()
        assert read == passes * whole
    with pytest.raises(ColdpressError, match="the prompt has no tokens"):
        session.decoder.prefill_each([prompts[0], prompts[0][:0]], [0, 1])


def test_prompts_come_while_others_run_and_each_has_its_number_of_tokens(tmp_path):
    """A source that says None for nothing at present is asked again before the next pass."""
    session = open_session(tmp_path, **ALL_IN_DRAM)
    expected = [
        session.generate(ids, most, ignore_eos=True).token_ids for ids, most in zip(PROMPTS, (9, 3, 4, 2), strict=True)
    ]
    passes, given = [], []

    def source():
        for number, (ids, most) in enumerate(zip(PROMPTS, (9, 3, 4, 2), strict=True)):
            while given and max(passes, default=0) < 2 * number:
                yield None
            given.append(number)
            yield Prompt(ids, max_new_tokens=most)
        while True:
            yield None

    def note(number, token):
        passes.append(token.pass_number)

    steps = generate_each(session, source(), 1, BatchRoom(4, 16, 64), ignore_eos=True, on_token=note, at_once=True)
    assert [tuple(token.id for token in tokens) for tokens in steps] == expected
    assert given == [0, 1, 2, 3]


def test_at_once_begins_after_the_next_pass():
    admission = AtOnce()
    assert not admission.pays(1)
    admission.decoded(1, 0.5, idle=True)
    assert admission.pays(1)
    admission.prefilled(1, 0.5)
    assert not admission.pays(1)


def test_logits_of_prompts_and_tokens_are_told_in_order(tmp_path, monkeypatch):
    """Those that a prefill and decoding one by one give; of a prompt longer than a chunk, too."""
    monkeypatch.setattr(decoder_module, "PREFILL_CHUNK_TOKENS", 35)
    session = open_session(tmp_path, **ALL_IN_DRAM)
    prompts = [[3, 14, 15], list(range(1, 45))]
    told = [{}, {}]

    def watch(number):
        def see(position, logits):
            for place, row in enumerate(logits):
                assert position + place not in told[number]
                told[number][position + place] = row.copy()

        return see

    each = [Prompt(ids, on_logits=watch(n), scores_prompt=n == 1) for n, ids in enumerate(prompts)]
    found = list(generate_each(session, each, 4, BatchRoom(2, 50, 60), ignore_eos=True))
    for ids, rows, tokens, first in zip(prompts, told, found, (2, 0), strict=True):
        assert list(rows) == list(range(first, len(ids) + 3))
        session.decoder.begin(len(ids) + 4)
        logits = session.decoder.prefill(np.array(ids))
        decoded = [session.decoder.decode(token.id) for token in tokens[:-1]]
        expected = np.concatenate([logits, np.array(decoded)])
        assert np.array(list(rows.values())) == pytest.approx(expected[first:], abs=1e-4)


def test_a_sequence_that_fails_by_itself_leaves_the_others_and_is_not_kept(tmp_path, monkeypatch):
    session = open_session(tmp_path, **ALL_IN_DRAM)
    errors, kept = list[ColdpressError](), Prefixes(tmp_path / "kept", session.artifact.sha256, 10**9, 4)

    prefill = session.decoder.prefill_each

    def poisoned(prompts, *settings):
        logits = prefill(prompts, *settings)
        logits[0] = np.inf
        return logits

    def run(prompt):
        steps = generate_each(
            session, [prompt, Prompt(PROMPTS[2])], NUM_NEW, BatchRoom(2, 32, 64), prefixes=kept,
            on_token=lambda number, token: number == 0 and bool(errors),
        )  # fmt: skip
        return [tuple(token.id for token in tokens) for tokens in steps]

    ids = PROMPTS[1] * 2
    with monkeypatch.context() as patch:
        patch.setattr(session.decoder, "prefill_each", poisoned)
        with pytest.raises(ColdpressError, match="not finite"):
            run(Prompt(ids))
        bad, good = run(Prompt(ids, on_error=errors.append))
    assert (len(bad), good, len(errors)) == (1, alone(session)[2], 1)
    errors.clear()
    first = run(Prompt(ids, on_error=errors.append))
    assert kept.totals.restored_tokens == 0
    assert run(Prompt(ids, on_error=errors.append)) == first
    assert kept.totals.restored_tokens > 0
