"""What a run keeps beside weights, caches and buffers, held against what it really has in memory."""

import gc
import tracemalloc

import numpy as np
import pytest

from coldpress.runtime import plugins
from coldpress.runtime.cache import CacheFacts, make
from coldpress.runtime.dram import bookkeeping as counted
from coldpress.runtime.dram.budget import refit, used_bytes
from coldpress.runtime.generate.sampling import Sampling
from coldpress.runtime.generate.session import Session
from coldpress.schemas.layout import Section
from tests.support.artifacts import Recipe, build_artifact, small_spec

UNITS = 1000
POLICIES = [
    *((name, {}) for name in plugins.names("coldpress.runtime.cache") if name not in ("belady", "linked")),
    ("window", {"window_tokens": 200}),
    *(("linked", {"linked_over": base}) for base in ("lfu", "lru", "s3fifo", "window")),
]


def arrays_in(found):
    """The bytes of all arrays that an object holds, in lists, queues and objects of its own, each once."""
    seen, waiting, total = set(), [found], 0
    while waiting:
        thing = waiting.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, np.ndarray):
            total += thing.nbytes
        elif isinstance(thing, dict):
            waiting += thing.values()
        elif isinstance(thing, list | tuple) or type(thing).__name__ == "deque":
            waiting += thing
        elif type(thing).__module__.startswith("coldpress.runtime."):
            waiting += vars(thing).values()
    return total


@pytest.mark.parametrize(("name", "options"), POLICIES)
@pytest.mark.parametrize("used", [0.02, 0.4, 1.0])
@pytest.mark.parametrize("capacity", [0, 300, UNITS])
def test_a_policy_keeps_no_more_of_a_unit_than_is_counted(name, options, used, capacity):
    position = np.arange(UNITS, dtype=np.int32)
    cache = make(name, options, CacheFacts(UNITS, capacity, np.empty(0, np.int32), position))
    random, most = np.random.default_rng(0), 0
    for _ in range(300):
        cache.serve(np.flatnonzero(random.random(UNITS) < used).astype(np.int32))
        most = max(most, arrays_in(cache) - position.nbytes * (name == "linked"))
    wanted = np.ceil(used * UNITS) * 4 * 1.5  # the last request's ids, which are the selector's
    kept = type(cache).kept_bytes(UNITS)
    assert most - wanted * (name == "linked") <= kept
    if name in ("lru", "lfu", "static"):
        assert most == kept
    cache.resize(capacity // 2, np.arange(10))
    assert arrays_in(cache) - (position.nbytes + wanted) * (name == "linked") <= kept


@pytest.fixture(scope="module", params=["wina", "relu"])
def session(request, tmp_path_factory):
    """All units in slots, so that no room for the numbers of free ones is left unused; groups of layers."""
    recipe = Recipe(
        spec=small_spec(num_hidden_layers=5, intermediate_size=512),
        method=request.param,
        cache="lfu",
        slots_share=15 / 16,
        layers_per_group=2,
    )
    built = build_artifact(tmp_path_factory.mktemp("kept") / "a", recipe)
    with Session(built.path) as session:
        yield session


def test_tables_and_slots_are_counted_to_the_byte(session):
    """By the arrays of an open artifact: checksums, orders, ranks, what selectors keep, places, slots, the cache."""
    manifest, parts = session.artifact.manifest, session.store._parts.values()
    placed = {id(part.position): part.position for part in parts}
    held = sum(table.nbytes for table in session.artifact.tables.values())
    held += sum(position.nbytes for position in placed.values())
    held += sum(part.slot.nbytes + arrays_in(part.cache) for part in parts)
    spec = manifest.model
    objects = counted.RUN_BYTES + spec.num_hidden_layers * counted.LAYER_BYTES + len(parts) * counted.PART_BYTES
    largest = max(part.slot.size for part in parts)
    token = largest * 64 + spec.hidden_size * 32 + spec.vocab_size * 48
    assert counted.bookkeeping_bytes(manifest) - objects - token == held


@pytest.mark.slow
@pytest.mark.parametrize("num_layers", [1, 6, 24])
@pytest.mark.parametrize("method", ["relu", "dip", "predictor"])
def test_python_s_own_count_of_a_run_is_below_its_budget(tmp_path, method, num_layers):
    """All that Python and numpy allocate; slots and buffers lie in mappings of their own, which they do not count."""
    recipe = Recipe(spec=small_spec(num_hidden_layers=num_layers, intermediate_size=256), method=method)
    path = build_artifact(tmp_path / "a", recipe).path
    with Session(path) as session:  # what is imported and compiled once
        session.generate([3, 4, 5], 3, ignore_eos=True)
    del session
    gc.collect()
    tracemalloc.start()
    try:
        with Session(path) as session:
            gc.collect()
            plan, before = session.plan, tracemalloc.get_traced_memory()[0]
            kept = counted.bookkeeping_bytes(session.artifact.manifest)
            assert before <= plan.resident_bytes + plan.predictor_bytes + kept
            tokens = session.stream([3, 4, 5], 16, ignore_eos=True)
            next(tokens)
            tracemalloc.reset_peak()
            list(tokens)
            peak = tracemalloc.get_traced_memory()[1]
            assert peak <= plan.resident_bytes + plan.predictor_bytes + plan.kv_cache_bytes + kept
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("method", ["dense", "relu", "predictor", "dip", "dip_ca", "gate"])
def test_a_token_works_with_no_more_than_is_counted(tmp_path, method):
    """Of many units, and of a vocabulary that is drawn from."""
    spec = small_spec(num_hidden_layers=1, intermediate_size=8192, vocab_size=4096)
    recipe = Recipe(spec=spec, method=method, slots_share=0.3, read_buffer_bytes=1 << 20)
    sampling = Sampling(temperature=0.8, top_p=0.9, seed=1)
    with Session(build_artifact(tmp_path / "a", recipe).path) as session:
        session.generate([3, 4, 5], 3, ignore_eos=True, sampling=sampling)
        tracemalloc.start()
        try:
            tokens = session.stream([3, 4, 5], 8, ignore_eos=True, sampling=sampling)
            next(tokens)
            for _ in tokens:
                now, peak = tracemalloc.get_traced_memory()
                tracemalloc.reset_peak()
                assert peak - now <= 8192 * 64 + 64 * 32 + 4096 * 48 + (32 << 10)
        finally:
            tracemalloc.stop()


def test_another_budget_changes_slots_and_nothing_else(session):
    plan, manifest = session.plan, session.artifact.manifest
    small = refit(manifest, plan, plan.dram_budget_bytes - 40_000)
    slots = plan.dram_budget_bytes - used_bytes(manifest, small)
    assert 40_000 <= slots < 40_000 + len(plan.parts) * manifest.families[0].unit_bytes


def section_of(layer, num_units):
    """Neurons of three slices of 4096 values in int4."""
    offset = layer * num_units * 6912
    where = {"first_layer": layer, "last_layer": layer, "family": "neuron", "offset_bytes": offset}
    return Section(**where, num_units=num_units, unit_bytes=6912, stride_bytes=6912)


def test_a_7b_model_keeps_12_megabytes():
    """14,336 neurons in each of 32 layers, three slices of 4096 values in int4: by hand."""
    length = 14_336 * 6912
    sections = [section_of(layer, 14_336) for layer in range(32)]
    spec = small_spec(num_hidden_layers=32, hidden_size=4096, intermediate_size=14_336, vocab_size=32_000)
    tables = 4 * 774_144 + 458_752 * 12
    objects, token = (128 + 32 * 20) * 1024, 14_336 * 64 + 4096 * 32 + 32_000 * 48
    assert length % 65536 == 0
    found = counted.counted_bytes(spec, sections, (), 32 * length, 4096, [], {"lfu"})
    assert found == tables + objects + token == 11_972_608


@pytest.mark.parametrize(("cache", "most"), [("static", 10), ("lru", 10), ("lfu", 12), ("window", 12)])
def test_the_neuron_tables_of_opt_175b(cache, most):
    """96 layers of 49,152 neurons: PowerInfer 5.2 has 9 MB for them, two bytes each; ours can also change the budget,
    evict and read in any order."""
    neurons, powerinfer_bytes = 96 * 49_152, 9e6
    section = section_of(0, 49_152)
    found = 96 * counted.unit_bytes(section, {cache})
    assert found == most * neurons
    assert found < 6.5 * powerinfer_bytes


@pytest.mark.parametrize(
    ("units", "cache", "a_unit"), [(30_000, "s3fifo", 15), (114_688, "lfu", 22), (4096, "linked", 15)]
)
def test_what_takes_more_than_12_bytes_a_unit(units, cache, a_unit):
    """S3-FIFO has two queues and a memory of what left them; a large mixture's ids do not fit 16 bits."""
    assert counted.unit_bytes(section_of(0, units), {cache}) == a_unit * units
