"""place: PowerInfer's constraints in bytes and seconds of a device, and what the stage makes of them."""

import time
from pathlib import Path

import numpy as np
import pytest

from compiler._io import load_arrays
from compiler.place import PlaceConfig, _solve, min_pinned, run
from compiler.place._problem import Problem, bytes_of, make_group, pinned_units, value_of
from schemas.errors import ColdpressError, DoesNotFitError
from schemas.placement import Placement
from tests.support.statistics import activations_of, device_of, model_of, sparsity_of, workspace

LAYERS, UNITS, TOKENS = 3, 160, 64
UNIT_BYTES = 3 * 64 * 2


def active_of(seed: int = 0) -> list[np.ndarray]:
    """Per layer bool [UNITS, TOKENS], every unit with a frequency of its own."""
    rng = np.random.default_rng(seed)
    return [rng.random((UNITS, TOKENS)) < rng.random((UNITS, 1)) ** 3 for _ in range(LAYERS)]


def place(
    tmp_path: Path, config: PlaceConfig, cache_units: int, **device: object
) -> tuple[Placement, list[np.ndarray]]:
    active = active_of()
    density = tuple(float(layer.mean()) for layer in active)
    placement = run(
        config,
        model_of(LAYERS),
        activations_of(tmp_path / "activations", [{"neuron": layer} for layer in active]),
        sparsity_of("predictor", {"neuron": density}, cache_units * UNIT_BYTES),
        device_of(**device),
        workspace(tmp_path / "place"),
    )
    arrays = load_arrays(placement.arrays)
    return placement, [arrays[f"{layer}.neuron"] for layer in range(LAYERS)]


def test_pins_the_most_frequent_units_of_all_layers(tmp_path: Path) -> None:
    placement, tiers = place(tmp_path, PlaceConfig(pinned_share=1.0), 100)
    counts = np.stack([layer.sum(axis=1) for layer in active_of()])
    assert placement.tiers == ("dram", "flash")
    assert placement.pinned_bytes == 100 * UNIT_BYTES
    pinned = np.stack(tiers) == 0
    assert pinned.sum() == 100
    assert counts[pinned].min() >= counts[~pinned].max()
    assert placement.objective == counts[pinned].sum() / TOKENS
    assert placement.gap == 0.0
    assert [entry.num_pinned for entry in placement.layers] == pinned.sum(axis=1).tolist()


@pytest.mark.parametrize(("cache", "share"), [("lru", 0.5), ("static", 1.0)])
def test_pinned_share_follows_the_cache_policy(tmp_path: Path, cache: str, share: float) -> None:
    placement, _ = place(tmp_path, PlaceConfig(cache=cache), 100)
    assert placement.pinned_bytes == 100 * share * UNIT_BYTES


def test_layers_pin_none_or_at_least_what_a_flash_round_trip_is_worth(tmp_path: Path) -> None:
    """90 units fit: spread by frequency alone every layer would stay below C_l."""
    least = min_pinned(UNIT_BYTES, device_of(latency_s=6e-4), None)
    placement, tiers = place(tmp_path, PlaceConfig(pinned_share=1.0), 90, latency_s=6e-4)
    sizes = [int((tier == 0).sum()) for tier in tiers]
    assert 30 < least <= 45
    assert all(entry.min_pinned == least for entry in placement.layers)
    assert all(size == 0 or size >= least for size in sizes)
    assert sum(sizes) == 90


def test_the_program_beats_global_top_k_where_communication_binds() -> None:
    """Global top-k, which the published engine's solver amounts to, wastes half its room on layers below C_l = 4."""
    counts = [np.array([90, 80, 70, 65, 1]), np.array([60, 55, 50, 45, 40]), np.array([85, 75, 9, 8, 7])]
    groups = tuple(make_group(i, "neuron", values, 8, 4, 1) for i, values in enumerate(counts))
    problem = Problem(groups, 8 * 8)
    ranked = sorted(((int(v), g) for g, values in enumerate(counts) for v in values), reverse=True)[:8]
    per_layer = [sum(1 for _, g in ranked if g == layer) for layer in range(3)]
    assert per_layer == [4, 2, 2]  # layers 1 and 2 break Eq. 7: their split costs more than it saves
    top_k = sum(v for v, g in ranked if per_layer[g] >= 4)

    choices, gap = _solve(PlaceConfig(gap=0.0), problem)
    assert [pinned_units(group, choice).size for group, choice in zip(groups, choices, strict=True)] == [4, 4, 0]
    assert sum(map(bytes_of, groups, choices)) <= problem.fast_bytes
    assert sum(map(value_of, groups, choices)) == 90 + 80 + 70 + 65 + 60 + 55 + 50 + 45 > top_k
    assert gap == 0.0


def test_minimum_follows_equations_4_and_5() -> None:
    device = device_of(latency_s=1e-4, dram_bytes_per_s=3e10)
    slow, fast = 4096 / 2.56e8, 384 / 3e10
    least = min_pinned(384, device, None)
    assert least * fast + 1e-4 <= least * slow
    assert (least - 1) * fast + 1e-4 > (least - 1) * slow


def test_accelerator_splits_against_dram(tmp_path: Path) -> None:
    gpu = {"memory_bytes": 200 * UNIT_BYTES, "bytes_per_s": 9e11, "link_bytes_per_s": 3e10, "sync_s": 4e-7}
    config = PlaceConfig(fast_tier="accelerator", batch_units=16)
    placement, tiers = place(tmp_path, config, 400, accelerator=gpu)
    assert placement.tiers == ("accelerator", "dram")
    assert placement.layers[0].min_pinned == 33  # 4e-7 s over 384 bytes / 30 GB/s less 384 bytes / 900 GB/s
    pinned = sum(int((tier == 0).sum()) for tier in tiers)
    assert 80 <= pinned <= 200
    assert (LAYERS * UNITS - pinned) * UNIT_BYTES <= 400 * UNIT_BYTES


def test_accelerator_refuses_what_neither_tier_holds(tmp_path: Path) -> None:
    gpu = {"memory_bytes": 10 * UNIT_BYTES, "bytes_per_s": 9e11, "link_bytes_per_s": 3e10, "sync_s": 4e-7}
    with pytest.raises(DoesNotFitError, match=r"must lie on the accelerator, which has 3,840"):
        place(tmp_path, PlaceConfig(fast_tier="accelerator"), 20, accelerator=gpu)


def test_a_fast_tier_that_is_slower_is_refused() -> None:
    with pytest.raises(ColdpressError, match="correct the profile's bandwidths"):
        min_pinned(4096, device_of(dram_bytes_per_s=1e6), None)


def test_dense_families_need_no_counts(tmp_path: Path) -> None:
    activations = activations_of(tmp_path / "a", [{"mlp_mid": np.ones((UNITS, TOKENS), bool)}] * LAYERS)
    sparsity = sparsity_of("dense", {"neuron": (1.0,) * LAYERS}, 96 * UNIT_BYTES)
    placement = run(
        PlaceConfig(pinned_share=1.0), model_of(LAYERS), activations, sparsity, device_of(), workspace(tmp_path)
    )
    assert placement.objective == 96.0
    assert placement.pinned_bytes == 96 * UNIT_BYTES


def test_missing_counts_name_the_stage_that_makes_them(tmp_path: Path) -> None:
    activations = activations_of(tmp_path / "a", [{"mlp_mid": np.ones((UNITS, TOKENS), bool)}] * LAYERS)
    with pytest.raises(ColdpressError, match="layer 0: no activation counts of family neuron; run recalibrate"):
        run(
            PlaceConfig(),
            model_of(LAYERS),
            activations,
            sparsity_of("predictor", {"neuron": (0.1,) * LAYERS}),
            device_of(),
            workspace(tmp_path),
        )


def test_units_that_never_fire_are_not_pinned(tmp_path: Path) -> None:
    active = np.zeros((UNITS, TOKENS), bool)
    active[:20] = True
    placement = run(
        PlaceConfig(pinned_share=1.0),
        model_of(LAYERS),
        activations_of(tmp_path / "a", [{"neuron": active}] * LAYERS),
        sparsity_of("predictor", {"neuron": (0.125,) * LAYERS}, 300 * UNIT_BYTES),
        device_of(),
        workspace(tmp_path),
    )
    assert [entry.num_pinned for entry in placement.layers] == [20, 20, 20]


def test_nothing_is_pinned_without_room(tmp_path: Path) -> None:
    placement, tiers = place(tmp_path, PlaceConfig(), 1)
    assert placement.pinned_bytes == 0
    assert all((tier == 1).all() for tier in tiers)


def test_two_runs_give_the_same_bytes(tmp_path: Path) -> None:
    first, _ = place(tmp_path / "1", PlaceConfig(batch_units=7), 100)
    second, _ = place(tmp_path / "2", PlaceConfig(batch_units=7), 100)
    assert first.arrays.sha256 == second.arrays.sha256


def test_the_paper_s_largest_model_takes_seconds() -> None:
    """OPT-175B's shape, 96 layers of 49,152 neurons in batches of 64: about 10 s in the paper (6.3.3)."""
    rng = np.random.default_rng(0)
    counts = [(8192 * np.minimum(1, rng.pareto(0.6 + 0.01 * layer, 49152) * 0.003)).astype(int) for layer in range(96)]
    started = time.perf_counter()
    groups = tuple(make_group(i, "neuron", values, 24576, 15000 + 150 * i, 64) for i, values in enumerate(counts))
    choices, gap = _solve(PlaceConfig(), Problem(groups, 96 * 49152 * 24576 // 5))
    assert time.perf_counter() - started < 20
    assert gap <= 1e-6
    assert sum(map(value_of, groups, choices)) > 0
