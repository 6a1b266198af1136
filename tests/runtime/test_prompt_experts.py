"""The prefill of a mixture reads the experts that a prompt uses, and computes each for its own tokens."""

from collections import deque
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from coldpress.runtime.decoder.matrix import Matrix
from coldpress.runtime.extents import span_bytes
from coldpress.runtime.generate.session import Session
from coldpress.runtime.kernels import FEW_TOKENS
from coldpress.runtime.simulate import simulate, simulate_opening
from coldpress.runtime.store.dense import DensePlan
from coldpress.runtime.store.planner import Strided
from coldpress.runtime.trace import FETCH, STREAM, Recorder, load_trace
from coldpress.schemas.families import num_units, unit_keys
from tests.support.artifacts import Recipe, build_artifact
from tests.support.shapes import small_device, small_spec

EXPERTS, CHOSEN, WIDTH, LAYERS = 10, 2, 96, 11
FAMILIES = [("neuron",), ("block",), ("mlp_in", "mlp_mid"), ("up_down",), ("gate_down",), ("mlp_mid",)]
PAGE = 4096


def spec_of(**changes):
    mixture = {"num_experts": EXPERTS, "num_experts_per_tok": CHOSEN, "intermediate_size": WIDTH}
    layers = {"num_hidden_layers": LAYERS, "hidden_act": "silu", "max_position_embeddings": 256}
    return small_spec(**(layers | mixture | changes))


def whole_experts(spec, families, seed=0):
    """Orders in which the units of an expert stay together, experts shuffled."""
    random, found = np.random.default_rng(seed), {}
    for layer, family in unit_keys(families, spec):
        each = num_units(family, spec) // spec.num_experts
        found[layer, family] = (random.permutation(spec.num_experts)[:, None] * each + np.arange(each)).ravel()
    return {key: ids.astype(np.int32) for key, ids in found.items()}


def recipe_of(families, **changes):
    spec = changes.pop("spec", spec_of())
    values = {"method": "dense", "context_length": 200, "families": families, "read_buffer_bytes": 96 * PAGE}
    return Recipe(spec=spec, order=whole_experts(spec, families), **(values | changes))


@pytest.fixture(scope="module", params=FAMILIES, ids="+".join)
def mixture(request, tmp_path_factory):
    return build_artifact(tmp_path_factory.mktemp("mixture") / "a.coldpress", recipe_of(request.param))


@pytest.fixture(scope="module")
def neurons(tmp_path_factory):
    return build_artifact(tmp_path_factory.mktemp("mixture") / "a.coldpress", recipe_of(("neuron",)))


def tokens_of(count, seed=0):
    return np.random.default_rng(seed).integers(0, 96, count)


def decoded_experts(built, tokens):
    """By layer and family the units that any of the tokens asks for, one after the other."""
    recorder, found = Recorder(), {}
    decoder = Session(built.path, recorder=recorder).decoder
    decoder.begin(len(tokens))
    for token in tokens.tolist():
        decoder.decode(token)
    for event in (event for event in recorder.events if event.kind == FETCH):
        found.setdefault((event.layer, event.family), set()).update(event.ids.tolist())
    return found


def prefilled(session, tokens):
    session.decoder.begin(len(tokens))
    return session.decoder.prefill(tokens)


@pytest.mark.parametrize("count", [1, 3, 12])
def test_a_prompt_reads_the_experts_that_its_tokens_use(mixture, count):
    """Those that decoding asks for; each once, and pages of no other."""
    tokens, recorder = tokens_of(count), Recorder()
    session = Session(mixture.path, recorder=recorder)
    prefilled(session, tokens)
    expected, sizes = decoded_experts(mixture, tokens), {}
    streamed = [event for event in recorder.events if event.kind == STREAM]
    assert [(event.layer, event.family) for event in streamed] == list(expected)
    needed = most = 0
    for event in streamed:
        units = expected[event.layer, event.family]
        sizes[event.family] = codes = mixture.units[event.layer, event.family]
        assert (event.ids.tolist() or list(range(len(codes)))) == sorted(units)
        needed += len(units) * codes.shape[1]
        most += len(units) * codes.shape[1] + 2 * PAGE * len(units) * EXPERTS // len(codes)
    assert needed <= session.store.counters.prefill_read_bytes <= most


def test_every_unit_of_these_experts_arrives_once(mixture):
    random, store = np.random.default_rng(1), Session(mixture.path).store
    for (layer, family), codes in mixture.units.items():
        each = len(codes) // EXPERTS
        experts = np.sort(random.choice(EXPERTS, 1 + layer % EXPERTS, replace=False))
        ids = (experts[:, None] * each + np.arange(each)).ravel().astype(np.int32)
        seen = []
        for found, rows in store.stream((layer, family), ids):
            assert (rows == codes[found]).all()
            assert np.unique(found // each).size == 1, "an expert's units are a block of their own"
            seen += found.tolist()
        assert sorted(seen) == ids.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize(
    ("method", "families"), [("dense", ("block",)), ("dense", ("mlp_in", "mlp_mid")), ("topk", ("mlp_in", "mlp_mid"))]
)
def test_bits_depend_on_nothing_but_the_prompt(tmp_path, method, families, scattered):
    """Not on prompts that share the pass, on the budget, nor on what is in DRAM."""
    options = {"method": method, "pinned_share": 0, "slots_share": 0.1}
    recipe = recipe_of(families, **options)
    recipe = replace(recipe, order=None) if scattered else recipe
    built = build_artifact(tmp_path / "a", recipe)
    prompts = [tokens_of(count, seed=count) for count in (1, FEW_TOKENS + 9, 7, 90)]
    reading, holding = Session(built.path), Session(built.path, dram_budget_bytes=200_000_000)
    expected = []
    for prompt in prompts:
        reading.decoder.begin(len(prompt))
        expected.append(reading.decoder.prefill_last(prompt))
    for session in (reading, holding):
        session.decoder.begin_batch([len(prompt) for prompt in prompts])
        found = session.decoder.prefill_each(prompts, range(len(prompts)))
        np.testing.assert_array_equal(found, np.stack(expected))
    assert holding.store.counters.prefill_read_bytes == 0 < reading.store.counters.prefill_read_bytes


@pytest.mark.slow
def test_many_tokens_have_the_logits_of_one_after_the_other(mixture):
    tokens = tokens_of(FEW_TOKENS + 20)
    decoder = Session(mixture.path).decoder
    decoder.begin(len(tokens))
    expected = np.stack([decoder.decode(token) for token in tokens.tolist()])
    atol = 2e-3 * np.abs(expected).max()
    np.testing.assert_allclose(prefilled(Session(mixture.path), tokens), expected, rtol=0, atol=atol)
    decoder.begin(len(tokens))
    np.testing.assert_allclose(decoder.decode_many(tokens), expected, rtol=0, atol=atol)


def test_a_simulation_reads_the_experts_that_were_recorded(neurons, tmp_path):
    recorder, path = Recorder(), tmp_path / "trace.safetensors"
    session = Session(neurons.path, recorder=recorder)
    session.generate(tokens_of(5).tolist(), 4, ignore_eos=True)
    recorder.save(path)
    found = simulate(session.artifact, session.plan, load_trace(path))
    counters = session.store.counters
    assert (found.prefill_reads, found.prefill_read_bytes) == (counters.prefill_reads, counters.prefill_read_bytes)
    assert found.extents_sha256 == session.store.counters.extents_sha256()
    whole = simulate_opening(session.artifact, session.plan).passes.values()
    assert found.prefill_s < 0.9 * sum(reads.flash_s for reads in whole)


@pytest.mark.parametrize("num_read", [1, 3, 7])
def test_an_opening_reads_so_many_experts(neurons, num_read):
    """As long as a run waits that reads as many, evenly spread."""
    with Session(neurons.path, flash="simulated") as session:
        found = simulate_opening(session.artifact, session.plan, num_read)
        experts = [number * EXPERTS // num_read for number in range(num_read)]
        ids = np.concatenate([np.arange(WIDTH) + WIDTH * expert for expert in experts]).astype(np.int32)
        for layer in range(LAYERS):
            before = session.store.counters.prefill_flash_s
            deque(session.store.stream((layer, "neuron"), ids), maxlen=0)
            waited_s = session.store.counters.prefill_flash_s - before
            assert found.passes[layer, "neuron"].flash_s == pytest.approx(waited_s)


@pytest.mark.parametrize("kind", [None, "int8_group32"])
def test_a_range_of_few_or_many_tokens_is_multiplied_as_it_is_without_the_others(kind):
    """Which tokens of other ranges use the matrix changes no bit, nor do tokens that do not."""
    random = np.random.default_rng(0)
    codes = random.normal(size=(40, 64)).astype(np.float32)
    if kind is not None:
        from coldpress.runtime.quantization.int8_group32 import Plugin

        codes = Plugin().encode(codes)
    matrix, x = Matrix(codes, 64, kind, None, "int8"), random.normal(size=(110, 64)).astype(np.float32)
    parts = [slice(0, 20), slice(20, 80), slice(80, 110)]
    own = np.sort(random.choice(110, 50, replace=False))
    found = matrix.apply(x, parts, own)
    for part in parts:
        inside = (own >= part.start) & (own < part.stop)
        alone = matrix.apply(x[part], [slice(0, part.stop - part.start)], own[inside] - part.start)
        np.testing.assert_array_equal(found[inside], alone)
        np.testing.assert_allclose(alone, matrix.apply(x[part])[own[inside] - part.start], rtol=1e-4, atol=1e-4)


cases = st.fixed_dictionaries(
    {
        "unit_bytes": st.integers(1, 3000),
        "tail": st.sampled_from([0, 0, 1, 700, 9000]),
        "offset_bytes": st.integers(0, 5000),
        "each": st.integers(1, 40),
        "experts": st.integers(2, 8),
        "extra_pages": st.integers(0, 30),
        "gap_bytes": st.sampled_from([0, 512, 4096, 50_000]),
        "wanted": st.integers(1, 255),
        "scattered": st.booleans(),
    }
)


def plan_of(case):
    page, units = 512, Strided(case["offset_bytes"], case["unit_bytes"], case["unit_bytes"] + case["tail"])
    room = span_bytes(units.unit_bytes, page) + case["extra_pages"] * page
    count = case["each"] * case["experts"]
    return DensePlan(units, count, case["each"], room, page, case["gap_bytes"], small_device(page).flash)


def positions_of(case, wanted):
    of = np.arange(case["each"] * case["experts"])
    experts = of % case["experts"] if case["scattered"] else of // case["each"]
    return np.flatnonzero((wanted >> experts) & 1)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(cases)
def test_a_pass_over_experts_reads_each_unit_once_and_cuts_blocks_as_a_pass_over_all(case):
    plan = plan_of(case)
    positions = positions_of(case, case["wanted"])
    assume(positions.size)
    edges = np.cumsum([0, *(block.stop - block.start for batch in plan.batches() for block in batch.blocks())])
    seen = []
    for batch in plan.batches(positions):
        reads, starts = batch.extents, plan.units.starts(batch.positions)
        assert reads.num_bytes <= plan.room
        assert batch.first_unit == len(seen)
        places = np.concatenate(
            [np.arange(at, at + size) for at, size in zip(reads.offsets, reads.lengths, strict=True)]
        )
        assert np.unique(places).size == places.size, "no page is read twice in a batch"
        for start, offset in zip(starts, batch.buffer_offset, strict=True):
            size = plan.units.unit_bytes
            assert (places[offset : offset + size] == np.arange(start, start + size)).all()
        assert [block.stop for block in batch.blocks()][-1] == batch.positions.size
        for block in batch.blocks():
            first, last = batch.positions[block][[0, -1]]
            number = np.searchsorted(edges, first, side="right") - 1
            assert edges[number] <= first <= last < edges[number + 1]
            if case["gap_bytes"] == 0 and not case["scattered"] and not case["tail"]:
                assert first == edges[number]
                assert last == edges[number + 1] - 1
        seen += batch.positions.tolist()
    assert seen == positions.tolist()
    assert set(range(0, plan.num_units, case["each"])) <= set(edges.tolist())


@settings(max_examples=200, deadline=None)
@given(cases)
def test_experts_that_nobody_wants_are_not_read(case):
    plan = plan_of(case | {"scattered": False, "tail": 0})
    positions = positions_of(case | {"scattered": False}, case["wanted"])
    assume(positions.size)
    read_bytes = sum(batch.extents.num_bytes for batch in plan.batches(positions))
    runs = 1 + int((np.diff(positions) > 1).sum())
    batches = len(list(plan.batches(positions)))
    assert read_bytes <= positions.size * plan.units.unit_bytes + 2 * 512 * (runs + batches)


def test_experts_share_a_batch():
    """Small experts are read side by side, as many as half of the buffer holds."""
    plan = DensePlan(Strided(0, 1000, 1000), 640, 10, 100 * 4096, 4096, 0, small_device(4096).flash)
    batches = list(plan.batches(np.arange(640).reshape(64, 10)[::2].ravel()))
    assert len(batches) == 2
    assert sum(len(list(batch.blocks())) for batch in batches) == 32
