"""What an order costs: the runtime's own reads and cache, and the plan's own cache slots."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from coldpress.compiler.search.settings import AllocateConfig
from coldpress.compiler.seconds import requests_of, simulated
from coldpress.compiler.stages.allocate import run as allocate
from coldpress.compiler.stages.order import OrderConfig, OrderInputs
from coldpress.compiler.stages.order import run as order_units
from coldpress.compiler.stages.order._task import gap_candidates, modelled, read_bits
from coldpress.compiler.stages.place import PlaceConfig
from coldpress.compiler.stages.place import run as place
from coldpress.runtime.store import planner
from coldpress.schemas.device import Flash, flash_seconds
from tests.support.caches import RUNNABLE, empty
from tests.support.records import lay_out
from tests.support.settings import FAMILY, setting_of
from tests.support.statistics import activations_of, device_of, model_of, pack, task_of, topical, workspace

FLASH = device_of().flash
ACTIVE = st.tuples(st.integers(1, 40), st.integers(1, 140)).flatmap(lambda shape: arrays(bool, shape))


def planned(active: np.ndarray, order: np.ndarray, unit_bytes: int, flash: Flash, gap_bytes: int) -> np.ndarray:
    """Mean seconds, reads and bytes of a token, through the runtime's planner, float64 [3]."""
    totals = np.zeros(3)
    page_bytes = flash.page_bytes.value
    for token in active[order].T:
        places = np.flatnonzero(token)
        if places.size:
            units = planner.Strided(0, unit_bytes, unit_bytes)
            extents = planner.plan_reads(units, places, page_bytes, gap_bytes, 1 << 40).extents
            totals += flash_seconds(flash, len(extents), extents.num_bytes), len(extents), extents.num_bytes
    return totals / active.shape[1]


@settings(max_examples=80, deadline=None)
@given(
    active=ACTIVE,
    unit_bytes=st.sampled_from([100, 432, 1536, 4096, 6912, 24576]),
    gaps=st.lists(st.sampled_from([0, 4096, 12288, 65536, 1 << 20]), min_size=1, max_size=3, unique=True).map(sorted),
    seed=st.integers(0, 99),
)
def test_reads_are_those_of_the_runtime(active: np.ndarray, unit_bytes: int, gaps: list[int], seed: int) -> None:
    order = np.random.default_rng(seed).permutation(len(active))
    found = modelled(pack(active), active.shape[1], order, unit_bytes, FLASH, np.array(gaps))
    for entry in found:
        expected = planned(active, order, unit_bytes, FLASH, entry.gap_bytes)
        assert (entry.seconds, entry.reads, entry.read_bytes) == pytest.approx(tuple(expected))
    assert [entry.gap_bytes for entry in found] == gaps


@settings(max_examples=40, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 3), st.integers(2, 40), st.integers(1, 70)),
    unit_bytes=st.sampled_from([100, 432, 1536, 4096]),
    gap_bytes=st.sampled_from([0, 4096, 12288, 1 << 20]),
    cache=st.sampled_from([("static", 0), ("lru", 6), ("lfu", 6)]),
    seed=st.integers(0, 999),
)
def test_an_order_costs_what_the_store_on_simulated_flash_takes(
    shape: tuple[int, int, int], unit_bytes: int, gap_bytes: int, cache: tuple[str, int], seed: int
) -> None:
    """Random activity of a layer or a group in a random order, behind pins and a cache, against compiler/seconds.py."""
    (num_layers, num_units, num_tokens), (policy, slots) = shape, cache
    assume(num_units // 4 + slots != num_units)  # with room for all units a store reads nothing
    random = np.random.default_rng(seed)
    active = random.random(shape) < random.random((1, num_units, 1))
    order, pinned = random.permutation(num_units), random.permutation(num_units)[: num_units // 4]
    mask = np.isin(np.arange(num_units), pinned)
    missed = [read_bits(pack(layer), num_tokens, mask, policy, slots) for layer in active]
    bits = np.concatenate(missed, axis=1)
    (found,) = modelled(bits, num_tokens, order, unit_bytes, FLASH, np.array([gap_bytes]), num_layers)
    changes = {"cache": policy, "collapse_gap_bytes": gap_bytes}
    setting = setting_of(num_units, unit_bytes, num_layers, pinned, slots, order=order, **changes)
    tokens = [
        {(layer, FAMILY): np.flatnonzero(active[layer, :, t]) for layer in range(num_layers)} for t in range(num_tokens)
    ]
    run = simulated(setting, requests_of(tokens))
    assert found.seconds * num_tokens == pytest.approx(run.modelled_flash_s, rel=1e-9)
    assert found.reads * num_tokens == pytest.approx(run.reads)
    assert found.read_bytes * num_tokens == pytest.approx(run.read_bytes)


def test_the_best_gap_is_the_fastest_of_many() -> None:
    active = topical(200, 300, 8)
    order = np.random.default_rng(0).permutation(200)
    gaps = gap_candidates(FLASH)
    seconds = [planned(active, order, 432, FLASH, int(gap))[0] for gap in gaps]
    found = min(modelled(pack(active), 300, order, 432, FLASH, gaps))
    assert found.seconds == pytest.approx(min(seconds))
    assert 0 < found.gap_bytes < gaps[-1]
    assert (np.diff(gaps) > 0).all()
    assert (gaps % 4096 == 0).all()
    even = FLASH.bytes_per_s / FLASH.iops
    assert gaps[0] == 0
    assert gaps[-1] > 4 * even


@pytest.mark.parametrize("policy", RUNNABLE)
@pytest.mark.parametrize(("num_slots", "num_tokens"), [(0, 100), (15, 700), (15, 1100)])
def test_misses_are_those_of_the_runtime_s_cache(policy: str, num_slots: int, num_tokens: int) -> None:
    active = topical(60, num_tokens, 5)
    pinned = np.random.default_rng(0).random(60) < 0.2
    found = np.unpackbits(
        read_bits(pack(active), num_tokens, pinned, policy, num_slots), axis=1, bitorder="little"
    ).astype(bool)
    cache = empty(policy, 60, num_slots, np.flatnonzero(pinned))
    for token in range(num_tokens):
        ids = np.flatnonzero(active[:, token])
        missing = ids[~cache.touch(ids)]
        cache.admit(missing)
        cache.end_tokens()
        assert np.flatnonzero(found[:, token]).tolist() == missing.tolist()
    assert not found[:, num_tokens:].any()
    assert found[~pinned].any()


def test_judged_reads_are_the_end_of_all_reads_where_the_warm_up_fills_the_cache() -> None:
    active = np.random.default_rng(3).random((80, 4000)) < 0.3
    task = task_of(active, (1, 5, 9), cache="lru", cache_slots=12)
    everything = np.unpackbits(task.demand.missed.bits, axis=1, bitorder="little")
    judged = np.unpackbits(task.demand.judged_reads.bits, axis=1, bitorder="little")
    assert judged.shape[1] == task.demand.num_judged == 504
    assert (judged == everything[:, -504:]).all()
    assert task.fitting.activity.num_tokens == 4000 - 504
    assert (task.fitting.activity.bits == task.activity.bits[:, : (4000 - 504) // 8]).all()


@pytest.mark.slow
@pytest.mark.parametrize("cache", RUNNABLE)
@pytest.mark.parametrize("pinned_share", [0.0, 0.4, 1.0])
def test_cache_slots_are_those_of_the_layout(tmp_path: Path, cache: str, pinned_share: float) -> None:
    """Twelve layers of different density, two families: through allocate and place to the layout's own plan."""
    rng = np.random.default_rng(0)
    layers = [
        {"mlp_in": rng.random((256, 64)) < (i + 1) / 32, "mlp_mid": rng.random((1024, 64)) < (i + 2) / 32}
        for i in range(12)
    ]
    model, device = model_of(12, 256, 1024, hidden_act="silu"), device_of()
    activations = activations_of(tmp_path, layers, exact_zeros=False)
    asked = AllocateConfig(
        method="topk",
        format="int8_group32",
        dram_budget="60%",
        context_length=64,
        cache=cache,
        density=0.2,
        density_allocation="uniform",
    )
    sparsity = allocate(asked, model, activations, device, workspace(tmp_path / "a"))
    placement = place(PlaceConfig(pinned_share=pinned_share), model, activations, sparsity, device, workspace(tmp_path))
    plan = lay_out(model, sparsity, placement, device).plans[0]
    sections = {(part.layer, part.family): part.cache_slots for part in plan.parts}
    inputs = OrderInputs(OrderConfig(), model, activations, sparsity, placement, device)
    assert inputs.slots == sections
    assert any(sections.values()) == (cache != "static" and pinned_share < 1)
    order = order_units(
        OrderConfig(), model, activations, sparsity, placement, device, (11,), workspace(tmp_path / "o")
    )
    assert [entry.family for entry in order.entries] == ["mlp_in", "mlp_mid"]
