"""Drafts in batches: the same tokens as without, drafts shared among sequences, and what ends them."""

from contextlib import contextmanager

import pytest

from coldpress.runtime.drafts import Draft
from coldpress.runtime.dram.budget import whole_bytes
from coldpress.runtime.generate.batch import BatchRoom, Prompt, generate_batch, generate_each
from coldpress.runtime.generate.sampling import Sampling
from coldpress.runtime.generate.session import Session
from coldpress.runtime.plugins import load
from tests.runtime.test_draft_model import OFF, dense, opened, small
from tests.support.artifacts import add_draft_model, change_manifest

PROMPTS = [[3, 14, 15, 9, 26, 5], [2, 7], [31, 41, 59, 26], [1], [8, 28, 18, 28, 4]]
DRAWN = [Sampling(), Sampling(temperature=1.2, seed=4), Sampling(repetition_penalty=1.3), Sampling(), Sampling(top_k=3)]


class Right:
    """Proposes how each of known texts goes on; every `wrong`-th token is another one."""

    def __init__(self, texts, wrong=0):
        self.texts, self.wrong, self.open = texts, wrong, 0

    @contextmanager
    def drafting(self, context_length):
        self.open += 1
        try:
            yield self.propose
        finally:
            self.open -= 1

    def propose(self, ids, count, /):
        (text,) = (text for text in self.texts if text[: len(ids)] == ids)
        following = [(t + (self.wrong > 0 and n % self.wrong == 0)) % 96 for n, t in enumerate(text)]
        return following[len(ids) : len(ids) + count]


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory):
    """Artifacts of eleven layers whose draft model is their own copy, or another model."""
    folder, found = tmp_path_factory.mktemp("drafts"), {}
    for name, draft in (("own", dense(folder / "same", 11)), ("other", small(folder / "small"))):
        found[name] = dense(folder / name, 11)
        add_draft_model(found[name], draft)
    return found


def num_drafted(done):
    return sum(token.drafted for token in done.decoded)


def ids_of(sequences):
    return [[token.id for token in tokens] for tokens in sequences]


@pytest.mark.parametrize("name", ["own", "other"])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_tokens_of_a_batch_are_those_without_drafts(artifacts, name, count):
    prompts, sampling = PROMPTS[:count], DRAWN[:count]
    with opened(artifacts[name]) as session:
        expected = [
            list(session.generate(prompt, 6, ignore_eos=True, draft=OFF, sampling=drawn).token_ids)
            for prompt, drawn in zip(prompts, sampling, strict=True)
        ]
        found = generate_batch(session, prompts, 6, sampling=sampling, ignore_eos=True)
        assert session._draft_model is not None
        assert session._draft_model._free == {*range(32)}
    assert ids_of(found.sequences) == expected
    # the plan drafts 4: five tokens in a pass; five sequences have one each
    assert (num_drafted(found) > 0) == (count < 5)


def test_sequences_share_the_drafts_that_one_would_have(artifacts):
    with opened(artifacts["own"]) as session:
        texts = [prompt + ids_of([session.generate(prompt, 13, ignore_eos=True).tokens])[0] for prompt in PROMPTS[:3]]
        for count, most in ((1, 7), (2, 3), (3, 1)):
            draft = Right(texts)
            done = generate_batch(session, PROMPTS[:count], 13, ignore_eos=True, draft=draft, draft_tokens=7)
            assert [prompt + ids for prompt, ids in zip(PROMPTS, ids_of(done.sequences), strict=False)] == texts[:count]
            for tokens in done.sequences:
                assert next(token.drafted for token in tokens[1:] if token.drafted) == most
                assert sum(token.accepted for token in tokens) == sum(token.drafted for token in tokens)
            leading = [token for token in done.decoded if token.leads]
            assert len(leading) == max(token.pass_number for token in done.decoded)
            assert done.metrics.num_tokens == count * 12
            assert draft.open == 0


def test_wrong_drafts_of_one_sequence_leave_the_others_alone(artifacts):
    with opened(artifacts["own"]) as session:
        texts = [prompt + ids_of([session.generate(prompt, 9, ignore_eos=True).tokens])[0] for prompt in PROMPTS[:2]]
        wrong = [texts[0], [*PROMPTS[1], *([95] * 9)]]
        done = generate_batch(session, PROMPTS[:2], 9, ignore_eos=True, draft=Told(texts, wrong), draft_tokens=5)
    assert [prompt + ids for prompt, ids in zip(PROMPTS, ids_of(done.sequences), strict=False)] == texts
    assert sum(token.accepted for token in done.sequences[0]) > 0
    assert sum(token.accepted for token in done.sequences[1]) == 0


class Told(Right):
    """Proposes from other texts than those that the sequences follow."""

    def __init__(self, texts, told):
        super().__init__(texts)
        self.told = told

    def propose(self, ids, count, /):
        (number,) = (number for number, text in enumerate(self.texts) if text[: len(ids)] == ids)
        return self.told[number][len(ids) : len(ids) + count]


def test_a_sequence_ends_inside_a_pass_and_the_next_one_takes_its_place(artifacts):
    with opened(artifacts["own"]) as session:
        texts = [prompt + ids_of([session.generate(prompt, 13, ignore_eos=True).tokens])[0] for prompt in PROMPTS[:4]]
        seen, lengths = {number: [] for number in range(4)}, [13, 2, 2, 2]

        def end(number, token):
            seen[number].append(token.id)
            assert draft.open <= 2
            return len(seen[number]) == lengths[number]

        draft = Right(texts)
        steps = generate_each(
            session,
            map(Prompt, PROMPTS[:4]),
            13,
            BatchRoom(2, 19, 38),
            ignore_eos=True,
            draft=draft,
            draft_tokens=7,
            on_token=end,
            at_once=True,
        )
        found = ids_of(steps)
    assert [prompt + ids for prompt, ids in zip(PROMPTS, found, strict=False)] == [
        text[: len(prompt) + length] for prompt, text, length in zip(PROMPTS, texts, lengths, strict=False)
    ]
    assert list(seen.values()) == found
    assert draft.open == 0


def test_a_batch_that_is_left_ends_its_drafts(artifacts):
    with opened(artifacts["own"]) as session:
        draft = Right([[*prompt, *([1] * 20)] for prompt in PROMPTS])
        steps = generate_each(session, map(Prompt, [PROMPTS[0], *PROMPTS]), 1, BatchRoom(1, 16, 16), draft=draft)
        next(steps)
        steps.close()
        assert draft.open == 0
        session.generate(PROMPTS[0], 4)


@pytest.mark.slow
def test_a_sequence_that_the_draft_model_has_no_room_for_runs_without(tmp_path):
    path = dense(tmp_path / "a", 11)
    short = dense(tmp_path / "small", 2, seed=1, intermediate_size=96)  # a KV cache for 64 tokens
    add_draft_model(path, short)
    with Session(path) as session:
        expected = [session.generate(prompt, 30, ignore_eos=True, draft=OFF).tokens for prompt in PROMPTS[:2]]
        done = generate_batch(session, PROMPTS[:2], 30, ignore_eos=True)
        assert ids_of(done.sequences) == ids_of(expected)
        assert sum(token.drafted for token in done.sequences[0]) > 0
        assert sum(token.drafted for token in done.sequences[1]) == 0


def test_another_budget_during_a_batch_frees_the_draft_model(artifacts):
    with Session(artifacts["other"]) as session:
        whole = whole_bytes(session.artifact.manifest, session.plan)
        expected = ids_of([session.generate(prompt, 12, ignore_eos=True).tokens for prompt in PROMPTS[:3]])

        def prompts():
            yield Prompt(PROMPTS[0])
            yield Prompt(PROMPTS[1])
            session.resize(whole)
            yield Prompt(PROMPTS[2])

        found = list(generate_each(session, prompts(), 12, BatchRoom(1, 18, 18), ignore_eos=True))
        assert session._draft_model is None
    assert ids_of(found) == expected
    assert sum(token.drafted for token in found[0]) > 0
    assert sum(token.drafted for token in found[2]) == 0


def test_logits_are_told_with_the_tokens_that_were_chosen_from_them(artifacts):
    with opened(artifacts["own"]) as session:
        texts = [prompt + ids_of([session.generate(prompt, 9, ignore_eos=True).tokens])[0] for prompt in PROMPTS[:2]]
        told = [list[object](), list[object]()]

        def prompt(number):
            def on_logits(position, logits):
                assert logits.shape == (1, 96)
                told[number].append((position, int(logits[0].argmax())))

            return Prompt(PROMPTS[number], on_logits=on_logits)

        steps = generate_each(
            session,
            map(prompt, range(2)),
            9,
            BatchRoom(2, 16, 32),
            ignore_eos=True,
            draft=Right(texts, wrong=3),
            draft_tokens=7,
            on_token=lambda number, token: told[number].append(token.id) and None,
        )
        accepted = [sum(token.accepted for token in tokens) for tokens in steps]
    assert min(accepted) > 0
    for text, prompt_ids, calls in zip(texts, PROMPTS, told, strict=False):
        expected = [(len(prompt_ids) - 1 + place, token) for place, token in enumerate(text[len(prompt_ids) :])]
        assert calls == [each for pair in expected for each in (pair, pair[1])]


@pytest.mark.slow
def test_a_plan_that_drafts_repeats_does_so_in_a_batch(tmp_path):
    path = dense(tmp_path / "a", 11)
    change_manifest(path, lambda manifest: manifest["plans"][0].update(draft="lookup", draft_tokens=4))
    prompts = [[5, 6, 7, 8] * 4, [9, 8, 7] * 4]
    with Session(path) as session:
        expected = ids_of([session.generate(prompt, 12, ignore_eos=True, draft=OFF).tokens for prompt in prompts])
        done = generate_batch(session, prompts, 12, ignore_eos=True)
        off = generate_batch(
            session, prompts, 12, ignore_eos=True, draft=load("coldpress.runtime.drafts", Draft, "off")
        )
    assert ids_of(done.sequences) == ids_of(off.sequences) == expected
    assert num_drafted(done) > 0
    assert num_drafted(off) == 0
