"""The store against the units themselves: right rows under every policy and budget, and what a fetch promises."""

import dataclasses
import itertools

import numpy as np
import pytest

from coldpress.runtime.artifact.reader import open_artifact
from coldpress.runtime.dram.bookkeeping import bookkeeping_bytes
from coldpress.runtime.dram.budget import choose_plan, fixed_bytes
from coldpress.runtime.flash import direct, simulated
from coldpress.runtime.simulate import simulate_opening
from coldpress.runtime.store import memory as memory_module
from coldpress.runtime.store import planner
from coldpress.runtime.store.planner import MAX_READ_BYTES
from coldpress.runtime.store.store import Store
from coldpress.schemas.device import flash_seconds
from coldpress.schemas.errors import CorruptPageError, DoesNotFitError
from tests.support.artifacts import Recipe, build_artifact, small_spec
from tests.support.stores import check_fetch, open_store, requests


@pytest.mark.parametrize("name", ["relu_artifact", "topk_artifact", "predictor_artifact"])
@pytest.mark.parametrize("cache", ["lru", "lfu", "static"])
def test_every_batch_holds_its_units(request, name, cache):
    built = request.getfixturevalue(name)
    store = open_store(built, cache=cache)
    for layer, family, ids in requests(built):
        check_fetch(store, built, layer, family, ids)
    assert store.counters.hits > 0 or (cache, name) == ("static", "topk_artifact")  # which pins nothing
    assert store.counters.misses > 0


@pytest.mark.parametrize(
    "changes",
    [
        {"read_buffer_bytes": 256 << 10},
        {"read_buffer_bytes": 8192},
        {"collapse_gap_bytes": 0},
        {"collapse_gap_bytes": 1 << 20},
        {"pinned_share": 0.0, "slots_share": 0.0},
        {"pinned_share": 0.5, "slots_share": 0.5},
        {"page_bytes": 512, "read_buffer_bytes": 2048},
        {"page_bytes": 65536, "read_buffer_bytes": 131072},
    ],
)
def test_every_size_of_buffer_and_cache_works(tmp_path, changes):
    recipe = dataclasses.replace(Recipe(spec=small_spec(num_hidden_layers=3)), **changes)
    built = build_artifact(tmp_path / "a", recipe)
    store = open_store(built)
    for layer, family, ids in requests(built):
        check_fetch(store, built, layer, family, ids)
        for ids, rows in store.stream((layer, family)):
            assert (rows == built.units[layer, family][ids]).all()


def test_hits_come_first_and_outlast_the_fetch(relu_artifact):
    """Units that were read are used where they landed; those that the cache admitted are in their slots afterwards."""
    store, codes = open_store(relu_artifact), relu_artifact.units[0, "up_down"]
    list(store.submit((0, "up_down"), np.arange(40, dtype=np.int32)))
    cached = np.flatnonzero(store.residency((0, "up_down")).present)
    wanted = np.arange(20, 300, dtype=np.int32)
    batches = list(store.submit((0, "up_down"), wanted))
    assert set(batches[0].ids.tolist()) == set(cached.tolist()) & set(wanted.tolist())
    assert (batches[0].rows[batches[0].slots] == codes[batches[0].ids]).all()
    assert all(np.shares_memory(batch.rows, store._memory.buffer) for batch in batches[1:])
    stored = np.flatnonzero(store.residency((0, "up_down")).present).astype(np.int32)
    assert np.setdiff1d(stored, cached).size, "the cache admitted units"
    (hits,) = store.submit((0, "up_down"), stored)
    assert hits.rows is batches[0].rows
    assert (hits.rows[hits.slots] == codes[stored]).all()


def test_units_that_are_not_kept_are_used_where_they_were_read_to(relu_artifact):
    """No memory but the read buffer's holds them, and no more of them come at once than it does."""
    store = open_store(relu_artifact, cache="static", read_buffer_bytes=8192)
    wanted = np.arange(512, dtype=np.int32)
    present = store.residency((3, "up_down")).present
    sizes = []
    for batch in store.submit((3, "up_down"), wanted):
        read = ~present[batch.ids]
        assert read.all() or not read.any()
        assert np.shares_memory(batch.rows, store._memory.buffer) == read.all()
        sizes.append(batch.ids.size * read.any())
    assert sum(sizes) == 512 - present.sum()
    assert 0 < max(sizes) <= 8192 // 256


def test_a_fetch_may_be_given_up_before_its_first_read_is_used(relu_artifact):
    """Its units were admitted already: they are not there, and their slots are free again."""
    store = open_store(relu_artifact)
    list(store.submit((0, "up_down"), np.arange(40, dtype=np.int32)))
    present = store.residency((0, "up_down")).present.copy()
    for _ in range(3):
        fetching = store.submit((0, "up_down"), np.arange(20, 60, dtype=np.int32))
        next(iter(fetching))
        fetching.close()
        left = store.residency((0, "up_down")).present
        assert not left[~present].any()
    for layer, family, ids in requests(relu_artifact):
        check_fetch(store, relu_artifact, layer, family, ids)


def test_a_request_is_decided_when_it_is_submitted(relu_artifact):
    """Whether or not anybody iterates over it: the cache, the counters and the device know of it."""
    store, ids = open_store(relu_artifact), np.arange(20, 27, dtype=np.int32)
    request = store.submit((0, "up_down"), ids)
    counted = dataclasses.replace(store.counters)
    assert counted.hits + counted.misses == 7
    assert counted.reads > 0
    digest = store.counters.extents_sha256()
    seen = [batch.ids.copy() for batch in request]
    assert (np.sort(np.concatenate(seen)) == ids).all()
    assert (store.counters.reads, store.counters.misses) == (counted.reads, counted.misses)
    assert store.counters.extents_sha256() == digest
    reads = store.counters.prefill_reads
    store.stream((1, "up_down"))
    assert store.counters.extents_sha256() != digest
    assert store.counters.prefill_reads == reads  # which count when they have ended


def test_a_request_that_nobody_iterates_over_ends_with_the_next(relu_artifact):
    """Its units are not in the cache, its slots are free, and its reads fill nobody's buffer."""
    store = open_store(relu_artifact)
    before = store.residency((0, "up_down")).present.copy()
    for start in (20, 60, 100):
        store.submit((0, "up_down"), np.arange(start, start + 40, dtype=np.int32))
    assert (store.residency((0, "up_down")).present == before).all()
    store.submit((0, "up_down"), np.arange(200, 240, dtype=np.int32))
    for layer, family, ids in requests(relu_artifact):
        check_fetch(store, relu_artifact, layer, family, ids)
        store.submit((0, "up_down"), np.arange(100, 140, dtype=np.int32))


def test_pinned_units_are_there_from_the_start(relu_artifact):
    store = open_store(relu_artifact)
    for (layer, family), pinned in relu_artifact.pinned.items():
        assert (np.sort(pinned) == np.flatnonzero(store.residency((layer, family)).present)).all()
        check_fetch(store, relu_artifact, layer, family, np.sort(pinned))
    counted = store.counters
    assert (counted.misses, counted.reads, counted.read_bytes) == (0, 0, 0)
    assert counted.hits == 12 * 32
    assert counted.load_reads > 0


def test_a_second_fetch_of_cached_units_reads_nothing(relu_artifact):
    store, ids = open_store(relu_artifact), np.arange(100, 150, dtype=np.int32)
    check_fetch(store, relu_artifact, 2, "up_down", ids)
    before = dataclasses.replace(store.counters)
    check_fetch(store, relu_artifact, 2, "up_down", ids)
    assert store.counters.reads == before.reads
    assert store.counters.hits == before.hits + 50


def test_counters_add_up(relu_artifact):
    store = open_store(relu_artifact, cache="static", collapse_gap_bytes=0)
    pinned = set(relu_artifact.pinned[5, "up_down"].tolist())
    ids = np.arange(0, 512, 3, dtype=np.int32)
    check_fetch(store, relu_artifact, 5, "up_down", ids)
    hits = len(pinned & set(ids.tolist()))
    counted = store.counters
    assert (counted.hits, counted.misses) == (hits, ids.size - hits)
    assert counted.used_bytes == (ids.size - hits) * 256
    order = relu_artifact.order[5, "up_down"]
    missing = [position for position in range(512) if order[position] % 3 == 0 and int(order[position]) not in pinned]
    pages = {position * 256 // 4096 for position in missing}  # 16 units to the page, none across two
    assert counted.read_bytes == len(pages) * 4096
    assert counted.reads >= sum(page - 1 not in pages for page in pages)
    assert counted.evictions == 0


def test_evictions_are_counted_and_slots_stay_distinct(relu_artifact):
    store = open_store(relu_artifact)
    check_fetch(store, relu_artifact, 0, "up_down", np.arange(0, 100, dtype=np.int32))
    check_fetch(store, relu_artifact, 0, "up_down", np.arange(200, 300, dtype=np.int32))
    assert store.counters.evictions > 0
    cached = np.flatnonzero(store.residency((0, "up_down")).present).astype(np.int32)
    assert cached.size == 32 + 64
    (batch,) = store.submit((0, "up_down"), cached)
    assert len(set(batch.slots.tolist())) == cached.size


def test_a_fetch_that_is_given_up_leaves_a_usable_store(relu_artifact):
    store = open_store(relu_artifact, read_buffer_bytes=8192)
    for _ in range(3):
        fetching = store.submit((0, "up_down"), np.arange(0, 512, 2, dtype=np.int32))
        batches = iter(fetching)
        next(batches)
        next(batches)
        fetching.close()
    cached = store.residency((0, "up_down")).present
    assert cached.sum() <= 32 + 64
    for layer, family, ids in requests(relu_artifact):
        check_fetch(store, relu_artifact, layer, family, ids)


def test_a_failed_read_leaves_the_cache_without_the_unread(relu_artifact):
    class Corrupt:
        def wait(self, count):
            raise CorruptPageError("page 1")

        def abandon(self):
            pass

    class Failing:
        direct = moves_data = True

        def __init__(self, inner):
            self.inner, self.left = inner, 10**9

        def submit(self, extents, into, landing=None):
            self.left -= 1
            return self.inner.submit(extents, into, landing) if self.left >= 0 else Corrupt()

    artifact = open_artifact(relu_artifact.path)
    plan = choose_plan(artifact.manifest).model_copy(update={"read_buffer_bytes": 8192})
    flash = Failing(direct.Plugin(artifact, 8))
    store = Store(artifact, plan, flash)
    flash.left = 2
    with pytest.raises(CorruptPageError):
        list(store.submit((4, "up_down"), np.arange(0, 512, 2, dtype=np.int32)))
    flash.left = 10**9
    present = np.flatnonzero(store.residency((4, "up_down")).present).astype(np.int32)
    check_fetch(store, relu_artifact, 4, "up_down", present)  # what is said to be cached is what it should be
    for layer, family, ids in requests(relu_artifact):
        check_fetch(store, relu_artifact, layer, family, ids)


def test_stream_gives_everything_once_in_flash_order(relu_artifact):
    store = open_store(relu_artifact)
    ids = [part.copy() for part, _ in store.stream((9, "up_down"))]
    assert (np.concatenate(ids) == relu_artifact.order[9, "up_down"]).all()
    assert len(ids) > 1  # bounded by the read buffer
    assert store.counters.prefill_read_bytes >= 512 * 256
    assert store.counters.reads == 0


def test_no_read_is_longer_than_it_may_be(tmp_path, monkeypatch):
    """Longer ones leave fewer to run side by side: in the dense pass, in a fetch, and while pinned units are loaded."""
    built = build_artifact(tmp_path / "a", Recipe(spec=small_spec(intermediate_size=4096, num_hidden_layers=1)))
    lengths = []
    submit = direct.Plugin.submit

    def watched(flash, extents, buffer, landing=None):
        lengths.extend(extents.lengths.tolist())
        return submit(flash, extents, buffer, landing)

    monkeypatch.setattr(direct.Plugin, "submit", watched)
    store = open_store(built, read_buffer_bytes=2 << 20, dram_budget_bytes=64 << 20)
    list(store.stream((0, "up_down")))
    list(store.submit((0, "up_down"), np.arange(4096, dtype=np.int32)))
    assert max(lengths) == 512 << 10
    assert MAX_READ_BYTES == 512 << 10


@pytest.mark.parametrize("extra", [0, 50_000, 400_000, 10_000_000])
def test_memory_is_what_the_budget_says(relu_artifact, extra):
    manifest = relu_artifact.manifest
    budget = fixed_bytes(manifest, manifest.plans[0]) + extra
    store = open_store(relu_artifact, dram_budget_bytes=budget)
    plan = store.plan
    buffers = plan.read_buffer_bytes if extra < 10_000_000 else 0  # with everything in DRAM nothing is read
    allocated = sum(memory.slots.rows.nbytes for memory in store._memory.pools.values()) + buffers
    besides = bookkeeping_bytes(manifest)  # tests/runtime/test_bookkeeping.py
    assert store.dram_used_bytes == plan.resident_bytes + plan.kv_cache_bytes + allocated + besides
    assert store.dram_used_bytes <= budget
    for layer, family, ids in requests(relu_artifact, num_tokens=2):
        check_fetch(store, relu_artifact, layer, family, ids)
    if extra == 10_000_000:  # everything fits: a second pass reads nothing
        everything = np.arange(512, dtype=np.int32)
        check_fetch(store, relu_artifact, 0, "up_down", everything)
        reads = store.counters.reads
        check_fetch(store, relu_artifact, 0, "up_down", everything)
        assert store.counters.reads == reads


def test_a_plan_beyond_its_budget_is_refused(relu_artifact):
    artifact = open_artifact(relu_artifact.path)
    plan = choose_plan(artifact.manifest).model_copy(update={"dram_budget_bytes": 1000})
    with pytest.raises(DoesNotFitError, match=r"needs \d+ bytes of DRAM, its budget is 1000"):
        Store(artifact, plan, direct.Plugin(artifact, 8))


def test_a_plan_beyond_this_machines_memory_is_refused_before_allocating(relu_artifact, monkeypatch):
    monkeypatch.setattr(memory_module, "physical_bytes", lambda: 1_000_000)
    with pytest.raises(DoesNotFitError, match=r"needs [\d,]+ bytes of DRAM, this machine has 1,000,000 "):
        open_store(relu_artifact)
    artifact = open_artifact(relu_artifact.path)  # a simulation touches no memory, so it may be of a larger machine
    Store(artifact, choose_plan(artifact.manifest), simulated.Plugin(artifact, 8))


def test_buffers_beyond_all_units_are_not_made(relu_artifact):
    """A plan may name any figures within its budget, and a budget is any figure: 10^15 bytes here."""
    huge = {"read_buffer_bytes": 4096 * 10**9, "dram_budget_bytes": 10**15}
    artifact = open_artifact(relu_artifact.path)
    plan = choose_plan(artifact.manifest)
    store = Store(artifact, plan.model_copy(update=huge), simulated.Plugin(artifact, 8))
    assert store._memory.buffer.size == 2 * artifact.manifest.flash.size_bytes


def test_a_whole_model_is_loaded_in_long_reads_however_small_its_plans_buffer(relu_artifact):
    artifact = open_artifact(relu_artifact.path)
    plan = choose_plan(artifact.manifest, 10**9).model_copy(update={"read_buffer_bytes": 8192})
    opening = simulate_opening(artifact, plan)
    flash = artifact.manifest.device.flash.issuing(plan.queue_depth)
    sections = artifact.manifest.flash.sections
    long = flash_seconds(flash, 2 * len(sections), sum(one.length_bytes for one in sections), 2)
    assert opening.load_s < 2 * float(long)


def test_metrics_are_the_counters(relu_artifact):
    store = open_store(relu_artifact)
    check_fetch(store, relu_artifact, 1, "up_down", np.arange(50, dtype=np.int32))
    metrics = store.metrics(num_tokens=1, decode_s=0.5, prefill_s=0.25, first_token_s=0.3)
    assert (metrics.hits, metrics.misses) == (store.counters.hits, store.counters.misses)
    assert metrics.hit_rate == store.counters.hits / 50
    assert metrics.dram_budget_bytes == store.plan.dram_budget_bytes
    assert metrics.peak_rss_bytes > 10_000_000
    assert metrics.direct_io is not None


def test_lfu_counts_start_anew_with_a_context(topk_artifact):
    """Without the reset, units of the last prompt would keep their places for many tokens."""
    store = open_store(topk_artifact)
    old, new = np.arange(8, dtype=np.int32), np.arange(20, 28, dtype=np.int32)
    for _ in range(5):
        list(store.submit((0, "mlp_in"), old))
    list(store.submit((0, "mlp_in"), new))
    assert store.residency((0, "mlp_in")).present[old].all()
    store.reset()
    list(store.submit((0, "mlp_in"), new))
    assert store.residency((0, "mlp_in")).present[new].all()


def everything_in_reach(built, layer, family, missing, here, gap_bytes):
    """What is in DRAM, and what lies whole inside the reads for `missing`: by the definition, page by page."""
    sections = built.manifest.flash.sections
    (section,) = (entry for entry in sections if layer in entry.layers and entry.family == family)
    order, page = built.order[layer, family], built.manifest.flash.page_bytes
    starts = section.offset_bytes + np.arange(order.size) * section.unit_bytes
    spans = [set(range(start // page, -(-(start + section.unit_bytes) // page))) for start in starts.tolist()]
    read = set().union(*(span for span, unit in zip(spans, order, strict=True) if unit in set(missing.tolist())))
    for one, another in itertools.pairwise(sorted(read)):
        read |= set(range(one, another)) if (another - one - 1) * page <= gap_bytes else set()
    along = {int(unit) for span, unit in zip(spans, order, strict=True) if span <= read}
    return np.array(sorted(along | set(np.flatnonzero(here).tolist())))


@pytest.fixture(scope="module")
def wide_artifact(tmp_path_factory):
    """Its reads are as long as they can be useful."""
    recipe = Recipe(method="topk", pinned_share=0, read_buffer_bytes=1 << 18)
    return build_artifact(tmp_path_factory.mktemp("wide") / "a.coldpress", recipe)


@pytest.mark.parametrize("cache", ["lru", "static"])
@pytest.mark.parametrize("gap_bytes", [0, 8192])
def test_what_costs_no_read_is_used(wide_artifact, cache, gap_bytes):
    """The same reads and the same cache as without; each batch holds its units, and each unit comes once."""
    changes = {"cache": cache, "collapse_gap_bytes": gap_bytes}
    plain = open_store(wide_artifact, **changes)
    store = open_store(wide_artifact, options={"use_read_units": True}, **changes)
    further = 0
    for layer, family, ids in requests(wide_artifact):
        here = store.residency((layer, family)).present.copy()
        expected = everything_in_reach(wide_artifact, layer, family, ids[~here[ids]], here, gap_bytes)
        check_fetch(store, wide_artifact, layer, family, expected, ids)
        list(plain.submit((layer, family), ids))
        assert (store.residency((layer, family)).present == plain.residency((layer, family)).present).all()
        further += expected.size - ids.size
    assert further > 100
    assert store.counters.extents_sha256() == plain.counters.extents_sha256()
    assert (store.counters.hits, store.counters.misses) == (plain.counters.hits, plain.counters.misses)
    assert store.counters.active_bytes > plain.counters.active_bytes


def test_what_makes_room_is_used_before_it_is_read_over(wide_artifact):
    """On a device that is done at once; with `use_read_units` a token uses what its own request evicts."""

    class AtOnce:
        direct = moves_data = True

        def __init__(self, inner):
            self.inner = inner

        def submit(self, extents, into, landing=None):
            ticket = self.inner.submit(extents, into, landing)
            ticket.finish()
            return ticket

    store = open_store(wide_artifact, options={"use_read_units": True}, collapse_gap_bytes=0)
    store._device.flash = AtOnce(store._device.flash)
    for layer, family, ids in requests(wide_artifact):
        here = store.residency((layer, family)).present.copy()
        expected = everything_in_reach(wide_artifact, layer, family, ids[~here[ids]], here, 0)
        check_fetch(store, wide_artifact, layer, family, expected, ids)
    assert store.counters.evictions > 0


def test_a_request_that_misses_is_planned_once(wide_artifact, monkeypatch):
    """What reads bring lies in the reads that were planned for what was asked for."""
    plan_reads, planned = planner.plan_reads, []

    def counting(*arguments):
        planned.append(arguments)
        return plan_reads(*arguments)

    monkeypatch.setattr(planner, "plan_reads", counting)
    store = open_store(wide_artifact, options={"use_read_units": True})
    planned.clear()
    num_with_misses = 0
    for layer, family, ids in requests(wide_artifact):
        num_with_misses += not store.residency((layer, family)).present[ids].all()
        list(store.submit((layer, family), ids))
    assert len(planned) == num_with_misses > 0  # and a request that hits everything not at all
    assert store.counters.reads > 0
