"""Preloading: units, tokens and hits are those without it, a simulation repeats it, and nothing is left over."""

import itertools
from collections import defaultdict, deque

import numpy as np
import pytest

from coldpress.runtime.artifact import errors
from coldpress.runtime.artifact.errors import DeviceError
from coldpress.runtime.artifact.integrity import verify_artifact
from coldpress.runtime.artifact.reader import open_artifact
from coldpress.runtime.drafts import lookup
from coldpress.runtime.dram.budget import choose_plan, fixed_bytes, refit, used_bytes, whole_bytes
from coldpress.runtime.flash import direct, simulated
from coldpress.runtime.generate.session import Session
from coldpress.runtime.simulate import on_device, simulate
from coldpress.runtime.store.clock import FlashQueue
from coldpress.runtime.store.computing import NOTHING, Arrival, Work
from coldpress.runtime.store.preload_room import most_bytes
from coldpress.runtime.store.store import Store
from coldpress.runtime.trace import END, FETCH, NO_IDS, PRELOAD, Event, Recorder, load_trace
from coldpress.schemas.errors import ColdpressError, CorruptPageError
from tests.support.artifacts import Recipe, build_artifact, change_manifest, refuse, small_spec
from tests.support.devices import with_compute
from tests.support.similar import similar_weights
from tests.support.stores import check_fetch

SPEC = small_spec(num_hidden_layers=11, hidden_act="silu")
PROMPT = [5, 17, 3, 60]
CASES = {"topk": ("topk", 1), "topk of 2": ("topk", 2), "topk of 4": ("topk", 4), "predictor": ("predictor", 1)}
NUM_TOKENS = 12


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """11 layers alike, a method and a group size each; the last group of 2 or 4 has fewer layers."""
    folder, weights = tmp_path_factory.mktemp("preload"), similar_weights(SPEC, 0.9)
    return {
        case: build_artifact(
            folder / case.replace(" ", "-"),
            Recipe(spec=SPEC, method=method, format="int8_group32", layers_per_group=size, slots_share=0.25),
            weights,
        )
        for case, (method, size) in CASES.items()
    }


def plan_of(artifact, share=1.0, **changes):
    """The artifact's plan with what a guess needs beside its budget, or a share of that."""
    plan, flash = artifact.manifest.plans[0], artifact.manifest.flash
    needed = most_bytes(flash.sections, plan.parts, flash.page_bytes, 1 << 30)
    ahead = int(share * needed) // flash.page_bytes * flash.page_bytes
    budget = plan.dram_budget_bytes + ahead
    return plan.model_copy(update={"preload_buffer_bytes": ahead, "dram_budget_bytes": budget} | changes)


def store_of(built, flash=None, **changes):
    artifact = open_artifact(built.path)
    return Store(artifact, plan_of(artifact, **changes), flash or direct.Plugin(artifact, 8))


def draw(random, num_units, share):
    return np.sort(random.choice(num_units, round(share * num_units), replace=False)).astype(np.int32)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("changes", [{}, {"share": 0.3}, {"collapse_gap_bytes": 0}, {"cache": "static"}], ids=str)
def test_a_fetch_brings_its_units_whatever_was_preloaded(built, case, changes):
    """Guesses that are good, bad and empty, each for a whole section; what was used of them is counted by hand."""
    artifact, random, store = built[case], np.random.default_rng(0), store_of(built[case], **changes)
    used_bytes, sections = 0, artifact.manifest.flash.sections
    for _, section in itertools.product(range(4), sections):
        guess, before = draw(random, section.num_units, random.random()), store.counters.preloaded_bytes
        absent = sum(
            np.count_nonzero(~store.residency((layer, section.family)).present[guess]) for layer in section.layers
        )
        store.preload((section.first_layer, section.family), guess)
        read = (store.counters.preloaded_bytes - before) // section.unit_bytes
        assert read == absent or "share" in changes or section.family == "mlp_mid"
        for layer in section.layers:
            ids = draw(random, section.num_units, 0.3)
            missed = ids[~store.residency((layer, section.family)).present[ids]]
            used_bytes += np.isin(missed, guess).sum() * section.unit_bytes if read == absent else 0
            check_fetch(store, artifact, layer, section.family, ids)
        if section.last_layer == SPEC.num_hidden_layers - 1 and section.family == sections[-1].family:
            store.end_tokens()
    counted = store.counters
    assert 0 < counted.preload_used_bytes < counted.preloaded_bytes <= counted.preload_read_bytes < counted.read_bytes
    assert used_bytes <= counted.preload_used_bytes
    assert used_bytes == counted.preload_used_bytes or "share" in changes
    store.close()


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_tokens_logits_and_hits_are_those_without_it(built, case):
    found = {}
    for ahead in (False, True):
        artifact = open_artifact(built[case].path)
        plan = plan_of(artifact) if ahead else artifact.manifest.plans[0]
        with Session(built[case].path, plan=plan, activations="fp32") as session:
            logits = []
            tokens = np.array([PROMPT * 4])
            quality = session.perplexity(tokens, sparse=True, on_logits=lambda some, to=logits: to.append(some.copy()))
            text = session.generate(PROMPT, NUM_TOKENS, ignore_eos=True)
            found[ahead] = np.concatenate(logits), text.token_ids, quality.metrics, text.metrics
    np.testing.assert_allclose(found[True][0], found[False][0], rtol=1e-4, atol=1e-4)  # sums in another order
    assert found[True][1] == found[False][1]
    for without, ahead in zip(found[False][2:], found[True][2:], strict=True):
        assert (ahead.hits, ahead.misses, ahead.used_bytes) == (without.hits, without.misses, without.used_bytes)
        assert without.preload_reads == 0 < ahead.preload_reads < ahead.reads
        assert ahead.preload_used_bytes > 0.1 * ahead.used_bytes


@pytest.mark.parametrize("case", CASES)
def test_a_simulation_repeats_its_reads(built, case, tmp_path):
    recorder, artifact = Recorder(), open_artifact(built[case].path)
    with Session(built[case].path, plan=plan_of(artifact, queue_depth=4), recorder=recorder, modelled=True) as session:
        real = session.generate(PROMPT, NUM_TOKENS, ignore_eos=True).metrics
        recorder.save(tmp_path / "trace")
        modelled = simulate(session.artifact, session.plan, load_trace(tmp_path / "trace"))
    names = "hits misses evictions reads read_bytes used_bytes preload_reads preload_read_bytes preloaded_bytes"
    for name in (*names.split(), "preload_used_bytes", "extents_sha256", "modelled_s", "modelled_flash_s"):
        assert getattr(modelled, name) == getattr(real, name), name
    assert real.preload_reads > 0


@pytest.mark.parametrize("case", ["topk", "topk of 2"])
def test_units_that_are_being_read_ahead_are_not_read_again(built, case):
    """Two guesses for a section, the second one with units of the first: it reads the others alone."""
    store, size = store_of(built[case], cache="static"), built[case].manifest.flash.sections[0].unit_bytes
    first, ids = 2, np.arange(64, dtype=np.int32)
    layers = 1 if case == "topk" else 2
    absent = [~store.residency((first + index, "mlp_in")).present for index in range(layers)]
    store.preload((first, "mlp_in"), ids[:8])
    before = store.counters.preloaded_bytes
    assert before == sum(part[:8].sum() for part in absent) * size
    store.preload((first, "mlp_in"), ids[4:12])
    assert store.counters.preloaded_bytes - before == sum(part[8:12].sum() for part in absent) * size
    check_fetch(store, built[case], first, "mlp_in", ids)
    store.close()


def test_a_simulation_refuses_to_read_ahead_what_there_is_not(built):
    recorder, artifact = Recorder(), open_artifact(built["topk"].path)
    recorder.preload(3, "mlp_in", np.array([64], np.int32))
    with pytest.raises(ColdpressError, match="unit 64 of layer 3, family mlp_in, where the artifact has 64 units"):
        simulate(artifact, plan_of(artifact), recorder.events)


def test_a_plan_without_room_for_it_preloads_nothing(built):
    recorder = Recorder()
    with Session(built["topk"].path, recorder=recorder) as session:
        metrics = session.generate(PROMPT, NUM_TOKENS).metrics
        session.store.preload((3, "mlp_in"), np.arange(8, dtype=np.int32))
    assert metrics.preload_reads == metrics.preloaded_bytes == session.store.counters.preload_reads == 0
    assert [event.kind for event in recorder.events].count(PRELOAD) == 1  # the one asked for by hand


@pytest.mark.parametrize("case", ["topk", "topk of 2", "topk of 4"])
def test_what_is_guessed_is_the_choice_of_layers_that_are_alike(built, case):
    """Every section after the first is preloaded once, by the shares of the layers before it; at a cosine of 0.9 most
    of the guess is right, and less so over four layers than over one."""
    recorder, artifact = Recorder(), open_artifact(built[case].path)
    with Session(built[case].path, plan=plan_of(artifact), recorder=recorder) as session:
        session.generate(PROMPT, NUM_TOKENS, ignore_eos=True)
    sections = [section for section in artifact.manifest.flash.sections if section.family == "mlp_in"]
    asked, guessed = {}, defaultdict(list)
    for event in recorder.events:
        assert event.kind != PRELOAD or event.family == "mlp_in"
        if event.kind == PRELOAD:
            guessed[event.token, event.layer].append(event.ids)
        elif event.kind == FETCH and event.family == "mlp_in":
            asked[event.token, event.layer] = event.ids
    tokens = range(1, NUM_TOKENS)
    assert set(guessed) == set(itertools.product(tokens, [section.first_layer for section in sections[1:]]))
    right = []
    for before, section in itertools.pairwise(sections):
        for token in tokens:
            pieces = guessed[token, section.first_layer]
            ids = np.concatenate(pieces)
            assert len(pieces) == len(before.layers)
            assert ids.size == np.unique(ids).size
            right += [np.isin(ids, asked[token, layer]).mean() for layer in section.layers]
    chance, least = 0.25, {"topk": 0.7, "topk of 2": 0.6, "topk of 4": 0.4}[case]
    assert np.mean(right) > least > chance


def damaged(built, tmp_path, layer, family, unit):
    """A copy of the artifact whose page with that unit is damaged."""
    artifact = build_artifact(tmp_path / "damaged", built.recipe, built.weights)
    (section,) = (s for s in artifact.manifest.flash.sections if s.family == family and layer in s.layers)
    position = int(np.flatnonzero(artifact.order[section.first_layer, family] == unit)[0])
    with (artifact.path / "flash.img").open("r+b") as file:
        file.seek(section.part_offset_bytes(layer) + position * section.stride_bytes + 5)
        file.write(b"\xff\x00\xff\x00")
    with pytest.raises(CorruptPageError):
        verify_artifact(open_artifact(artifact.path))
    return artifact


@pytest.mark.parametrize("case", ["topk", "topk of 4"])
def test_damage_matters_to_those_who_ask_for_it_alone(built, case, tmp_path):
    """A damaged page preloaded is no error; a unit of it that is asked for is, and is not kept."""
    artifact = damaged(built[case], tmp_path, 6, "mlp_in", 40)
    store, first = store_of(artifact, cache="static"), 6 if case == "topk" else 4
    there = set(artifact.pinned[6, "mlp_in"].tolist())
    per_page = 4096 // artifact.manifest.flash.sections[0].stride_bytes
    place = {int(unit): at // max(1, per_page) for at, unit in enumerate(artifact.order[first, "mlp_in"])}
    far = [unit for unit in range(64) if abs(place[unit] - place[40]) > 1 and unit not in there]
    ids = np.array(sorted({*far[:8], 40}), np.int32)
    store.preload((first, "mlp_in"), ids)
    check_fetch(store, artifact, 6, "mlp_in", np.setdiff1d(ids, [40]).astype(np.int32))
    store.end_tokens()
    store.preload((first, "mlp_in"), ids)
    with pytest.raises(CorruptPageError, match="family mlp_in"):
        deque(store.submit((6, "mlp_in"), ids), maxlen=0)
    store.close()


class Flaky:
    """Reads of which those that are told so fail when they are waited for, and that says which are under way."""

    moves_data = direct = True

    def __init__(self, artifact):
        self.inner, self.failing, self.open = direct.Plugin(artifact, 4), False, set()

    def submit(self, extents, into, landing=None):
        ticket = FlakyTicket(self, self.inner.submit(extents, into, landing), self.failing)
        self.open.add(ticket)
        return ticket

    def close(self):
        assert not self.open
        self.inner.close()


class FlakyTicket:
    def __init__(self, flash, inner, failing):
        self.flash, self.inner, self.failing = flash, inner, failing

    def wait(self, count):
        if self.failing:
            raise DeviceError("flash.img", "a read", "failing", "data", "check the storage device")
        self.inner.wait(count)

    def finish(self):
        self.wait(0)
        self.flash.open.discard(self)
        return self.inner.finish()

    def abandon(self):
        self.flash.open.discard(self)
        return self.inner.abandon()


@pytest.fixture
def flaky(built):
    artifact = open_artifact(built["topk of 2"].path)
    flash = Flaky(artifact)
    return built["topk of 2"], flash, Store(artifact, plan_of(artifact), flash)


def test_preloads_that_fail_are_made_again_when_asked_for(flaky):
    built, flash, store = flaky
    ids = np.arange(0, 64, 2, dtype=np.int32)
    flash.failing = True
    store.preload((4, "mlp_in"), ids)
    flash.failing = False
    for layer in (4, 5, 4):
        check_fetch(store, built, layer, "mlp_in", ids)
    store.close()


def test_a_fetch_that_is_given_up_keeps_nothing_that_it_did_not_give(flaky, monkeypatch):
    built, _, store = flaky
    monkeypatch.setattr("coldpress.runtime.store.planner.ARRIVAL_BYTES", 4096)
    ids = np.arange(64, dtype=np.int32)
    for batches in (1, 2, 3):
        store.preload((6, "mlp_in"), ids[::2])
        fetching = store.submit((7, "mlp_in"), ids)
        batches_of = iter(fetching)
        for _ in range(batches):
            next(batches_of)
        fetching.close()
        kept = np.flatnonzero(store.residency((7, "mlp_in")).present).astype(np.int32)
        check_fetch(store, built, 7, "mlp_in", kept)
        store.end_tokens()
    store.close()


@pytest.mark.parametrize("end", ["reset", "end_tokens", "close", "resize", "next"])
def test_nothing_is_under_way_into_memory_that_is_used_again(flaky, end):
    built, flash, store = flaky
    ids, artifact = np.arange(0, 64, 3, dtype=np.int32), open_artifact(built.path)
    store.preload((2, "mlp_in"), ids)
    store.preload((4, "mlp_in"), ids)  # the other region
    assert len(flash.open) == 2
    if end == "next":
        store.preload((6, "mlp_in"), ids)
        assert len(flash.open) == 2
    elif end == "resize":
        store.resize(artifact, refit(artifact.manifest, store.plan, store.plan.dram_budget_bytes + 50_000))
        assert not flash.open
    else:
        getattr(store, end)()
        assert not flash.open
    if end != "close":
        for layer in range(2, 8):
            check_fetch(store, built, layer, "mlp_in", ids)


@pytest.mark.slow
def test_drafts_and_changes_of_budget_leave_the_text(built):
    """What a pass of several tokens preloads is for all of them; tokens that are taken back change nothing."""
    artifact = open_artifact(built["topk"].path)
    plain = Session(built["topk"].path).generate(PROMPT, 20, ignore_eos=True).token_ids
    with Session(built["topk"].path, plan=plan_of(artifact)) as session:
        drafted = session.generate(PROMPT, 20, ignore_eos=True, draft=lookup.Plugin(), draft_tokens=3)
        assert drafted.token_ids == plain
        assert drafted.metrics.preload_used_bytes > 0
        found = []
        for token in session.stream(PROMPT, 20, ignore_eos=True):
            found.append(token.id)
            if len(found) == 8:
                session.resize(fixed_bytes(session.artifact.manifest, session.plan))
        assert tuple(found) == plain


def test_the_buffer_is_part_of_the_budget(built):
    artifact = open_artifact(built["topk"].path)
    plan, before = plan_of(artifact), artifact.manifest.plans[0]
    assert used_bytes(artifact.manifest, plan) == used_bytes(artifact.manifest, before) + plan.preload_buffer_bytes
    with Session(built["topk"].path, plan=plan) as session:
        memory = sum(region.memory.size for region in session.store.preloader._regions)
        assert memory <= plan.preload_buffer_bytes
        session.generate(PROMPT, 4)
        assert session.store.dram_used_bytes <= plan.dram_budget_bytes


def test_a_change_of_budget_takes_the_buffer_along(built):
    """With room for all units there is none; in a budget that reads again, guesses are those of a fresh session."""
    path, artifact = built["topk"].path, open_artifact(built["topk"].path)
    plan = plan_of(artifact)
    whole = whole_bytes(artifact.manifest, plan)

    def held(session):
        return sum(region.memory.size for region in session.store.preloader._regions)

    with Session(path, plan=plan) as fresh:
        expected, size = fresh.generate(PROMPT, 12, ignore_eos=True).metrics, held(fresh)
        fresh.resize(whole)
        assert held(fresh) == 0 < size
    with Session(path, plan=refit(artifact.manifest, plan, whole)) as session:
        session.generate(PROMPT, 3, ignore_eos=True)
        session.resize(plan.dram_budget_bytes)
        assert held(session) == size
        found = session.generate(PROMPT, 12, ignore_eos=True).metrics
    assert found.preload_reads > 0.8 * expected.preload_reads > 0  # other units are cached


def test_a_users_word_stands_over_the_plans(built):
    with Session(built["topk"].path, preload="on") as session:
        on = session.plan
        assert session.generate(PROMPT, 4).metrics.preload_reads > 0
    before = built["topk"].manifest.plans[0]
    assert 0 < on.preload_buffer_bytes < before.dram_budget_bytes - fixed_bytes(built["topk"].manifest, before)
    assert used_bytes(built["topk"].manifest, on) <= on.dram_budget_bytes == before.dram_budget_bytes
    with Session(built["topk"].path, preload="off") as session:
        assert session.plan == before


def test_where_nothing_can_be_guessed_it_is_refused(relu_artifact):
    with pytest.raises(ColdpressError, match="up_down in 12 sections leave nothing to preload: expected neuron"):
        Session(relu_artifact.path, preload="on")
    assert choose_plan(relu_artifact.manifest).preload_buffer_bytes == 0


def test_a_plan_says_whole_pages(tmp_path):
    artifact = build_artifact(tmp_path / "a", Recipe(spec=SPEC, method="topk"))
    change_manifest(artifact.path, lambda m: m["plans"][0].update(preload_buffer_bytes=5000))
    refuse(artifact.path, errors.PlanError, "preload_buffer_bytes is 5000", "whole pages of 4096")


def test_a_modelled_device_preloads_while_it_computes():
    """By hand: 3 ms of reads begin, 2 ms of computing hide as much of them."""
    nothing, one_ms = Work(0.0, 0.0, 0.0), Work(0.0, 0.001, 0.0)

    def reads(seconds: float) -> Arrival:
        return Arrival(seconds, 1, True)

    queue = FlashQueue()
    assert queue.fetch_s(reads(0.005), one_ms, needs_queue=False) == pytest.approx(0.005)
    queue.begin(0.003)
    queue.compute(0.002)
    assert queue.fetch_s(NOTHING, nothing, needs_queue=True) == pytest.approx(0.001)
    queue.begin(0.003)
    assert queue.fetch_s(reads(0.002), nothing, needs_queue=True) == pytest.approx(0.005)  # behind the guess
    queue.begin(0.003)
    assert queue.fetch_s(NOTHING, one_ms, needs_queue=False) == pytest.approx(0.001)  # nobody waits for it yet
    assert queue.fetch_s(NOTHING, one_ms, needs_queue=True) == pytest.approx(0.002)
    queue.begin(0.003)
    assert queue.fetch_s(reads(0.004), Work(0.002, 0.001, 0.0), needs_queue=False) == pytest.approx(
        0.007
    )  # 2 of 3 ms hidden
    queue.begin(0.003)
    queue.compute(1e6)
    assert queue.fetch_s(NOTHING, nothing, needs_queue=True) == 0


def test_modelled_seconds_count_what_preloading_hides(built):
    """A guess that is right reads the same, and a token takes less by what is computed with between two layers."""
    artifact = open_artifact(built["predictor"].path)
    room = {"read_buffer_bytes": 1 << 20, "dram_budget_bytes": 1 << 24}
    plain, ahead = artifact.manifest.plans[0].model_copy(update=room), plan_of(artifact, **room)
    recorder = Recorder()
    store = Store(artifact, ahead, simulated.Plugin(artifact, 8), recorder)
    ids = np.arange(0, 512, 4, dtype=np.int32)
    for layer in range(SPEC.num_hidden_layers):
        deque(store.submit((layer, "neuron"), ids), maxlen=0)
        if layer + 1 < SPEC.num_hidden_layers:
            store.preload((layer + 1, "neuron"), ids)
    store.end_tokens()
    with_it, without = (simulate(artifact, plan, recorder.events) for plan in (ahead, plain))
    assert with_it.preload_used_bytes == with_it.preloaded_bytes > 0
    assert without.preloaded_bytes == 0
    assert with_it.modelled_flash_s == pytest.approx(without.modelled_flash_s)
    resident = {tensor.role: np.prod(tensor.shape) for tensor in artifact.manifest.resident}
    attention = sum(resident[f"layers.1.{name}_proj.weight"] for name in "qkvo") * 36 // 32  # int8 in groups of 32
    between = attention + (plain.kv_cache_bytes // 2 + plain.predictor_bytes) // SPEC.num_hidden_layers
    hidden_s = (SPEC.num_hidden_layers - 1) * between / artifact.manifest.device.dram_bytes_per_s.value
    assert without.modelled_s - with_it.modelled_s == pytest.approx(hidden_s, rel=0.1)


def test_a_guess_costs_what_a_request_does_and_what_it_brings_a_portion(built):
    """Round costs beside which nothing else counts: 1 s to decide, 10 s more to read, 100 s a portion."""
    artifact, ids = open_artifact(built["predictor"].path), np.arange(0, 512, 4, dtype=np.int32)
    costs = {"request_s": 1.0, "reading_s": 10.0, "portion_s": 100.0}
    device = with_compute(artifact.manifest.device, [("fp16", 1.0, 1e10)], **costs)
    artifact = on_device(artifact, device)
    fetches = [Event(FETCH, 1, layer, "neuron", ids) for layer in range(2)]
    right, again = (Event(PRELOAD, 1, layer, "neuron", ids) for layer in (1, 0))
    end = Event(END, 1, 0, "neuron", NO_IDS)

    plan = plan_of(artifact, read_buffer_bytes=1 << 20, dram_budget_bytes=1 << 24)

    def modelled_s(*trace):
        return simulate(artifact, plan, trace).modelled_s

    plain_s = modelled_s(*fetches, end)
    assert plain_s == pytest.approx(2 * 111, abs=0.5)
    assert modelled_s(fetches[0], right, fetches[1], end) == pytest.approx(plain_s + 11, abs=0.5)
    assert modelled_s(fetches[0], fetches[0], end) == pytest.approx(112, abs=0.5)  # the second finds all of them
    assert modelled_s(*fetches, again, end) == pytest.approx(plain_s + 1, abs=0.5)  # nothing is left to read
