"""Layers that lie together on flash share one order: what is counted, and what the reads of each layer's parts cost."""

import itertools
from pathlib import Path

import numpy as np
import pytest

from coldpress.compiler.io import load_arrays, save_arrays
from coldpress.compiler.stages.order import OrderConfig, run
from coldpress.compiler.stages.order._task import Heuristic, modelled, pair_counts
from coldpress.runtime.plugins import load
from coldpress.schemas.activations import Activations
from coldpress.schemas.device import Flash, flash_seconds
from coldpress.schemas.errors import ColdpressError
from coldpress.schemas.order import Order
from coldpress.schemas.placement import Placement
from coldpress.schemas.sparsity import Sparsity
from tests.support.statistics import (
    activations_of,
    device_of,
    model_of,
    pack,
    placement_of,
    sparsity_of,
    task_of,
    topical,
    workspace,
)

FLASH = device_of(latency_s=1e-6).flash
"""Few units are read within one latency, whatever their order; without one, order matters."""
NUM_LAYERS = 11
NUM_UNITS = 60


def parts_read(places: np.ndarray, layer: int, num_layers: int, unit_bytes: int, gap_bytes: int) -> tuple[int, int]:
    """Reads and bytes of one layer's parts at some places of a group's section, page by page."""
    page = FLASH.page_bytes.value
    reads = num_bytes = 0
    end = None
    for place in sorted(places.tolist()):
        first = (place * num_layers + layer) * unit_bytes
        start, stop = first // page * page, -(-(first + unit_bytes) // page) * page
        if end is None or start - end > gap_bytes:
            reads += 1
            num_bytes += stop - start
        else:
            num_bytes += stop - end
        end = stop
    return reads, num_bytes


def group_seconds(layers: np.ndarray, order: np.ndarray, unit_bytes: int, flash: Flash, gap_bytes: int) -> float:
    """Mean seconds of a token: each layer of bool [num_layers, num_units, num_tokens] reads its own parts."""
    place_of = np.argsort(order)
    total = 0.0
    for layer, active in enumerate(layers):
        for token in active.T:
            found = parts_read(place_of[np.flatnonzero(token)], layer, len(layers), unit_bytes, gap_bytes)
            total += flash_seconds(flash, *found)
    return total / layers.shape[2]


def group(num_layers: int, num_units: int, num_tokens: int, seed: int = 0) -> np.ndarray:
    """bool [num_layers, num_units, num_tokens]: layers of the same topics, each active on its own tokens."""
    rng = np.random.default_rng(seed)
    topics = rng.integers(0, 5, num_units)
    texts = rng.integers(0, 5, (num_layers, num_tokens))
    chance = np.where(topics[None, :, None] == texts[:, None, :], 0.7, 0.04)
    return rng.random((num_layers, num_units, num_tokens)) < chance


@pytest.mark.parametrize("unit_bytes", [432, 1536, 4096, 6912])
@pytest.mark.parametrize("gap_bytes", [0, 8192, 65536])
def test_a_group_costs_what_its_layers_read(unit_bytes: int, gap_bytes: int) -> None:
    """Parts a whole unit apart, page by page; every layer waits for the one before."""
    layers, order = group(3, 30, 44), np.random.default_rng(1).permutation(30)
    bits = np.concatenate([pack(active) for active in layers], axis=1)
    found = modelled(bits, 44, order, unit_bytes, FLASH, np.array([gap_bytes]), 3)[0]
    assert found.seconds == pytest.approx(group_seconds(layers, order, unit_bytes, FLASH, gap_bytes))
    places = np.argsort(order)
    single = [
        parts_read(places[np.flatnonzero(token)], layer, 3, unit_bytes, gap_bytes)
        for layer, active in enumerate(layers)
        for token in active.T
    ]
    assert (found.reads, found.read_bytes) == pytest.approx(tuple(np.array(single).sum(axis=0) / 44))


def test_counts_are_summed_over_the_layers() -> None:
    layers = group(3, 40, 101)
    activity = task_of(layers).activity
    summed = sum(pair_counts(pack(active), 101).astype(int) for active in layers)
    upper = np.triu_indices(40, 1)
    assert (activity.counts[upper] == np.asarray(summed)[upper]).all()
    assert (activity.totals == layers.sum(axis=(0, 2))).all()
    assert (activity.by_layer[:, 2] == pack(layers[2])).all()


def test_a_count_of_many_layers_does_not_overflow() -> None:
    """Two layers of 40,000 tokens each count to more than 16 bits hold."""
    counts = task_of(np.ones((2, 3, 40000), bool)).activity.counts
    assert counts[0, 1] == counts[1, 2] == 80000


def test_each_layer_has_its_own_pins_and_its_own_cache() -> None:
    """Unit 3 is read by the second layer only, unit 5 by neither; a unit that some layer reads is not put last."""
    layers = group(2, 24, 256)
    pinned = np.zeros((2, 24), bool)
    pinned[0, 3] = pinned[:, 5] = True
    both = task_of(layers, pinned, cache="lru", cache_slots=(0, 6))
    for layer, slots in enumerate((0, 6)):
        alone = task_of(layers[layer], pinned[layer : layer + 1], cache="lru", cache_slots=slots)
        assert (both.demand.missed.by_layer[:, layer] == alone.demand.missed.bits).all()
        assert (both.demand.judged_reads.by_layer[:, layer] == alone.demand.judged_reads.bits).all()
    assert both.demand.missed.by_layer[3, 0].sum() == 0 < both.demand.missed.by_layer[3, 1].sum()
    assert 3 in both.demand.left_on_flash
    assert 5 not in both.demand.left_on_flash
    order = load("coldpress.compiler.stages.order", Heuristic, "misses").arrange(both).order.tolist()
    assert order[-1] == 5


def test_the_last_tokens_are_those_of_every_layer() -> None:
    task = task_of(group(3, 16, 203))
    kept = 203 - task.demand.num_judged
    for layer in range(3):
        bits, everything = (
            np.unpackbits(found.activity.by_layer[:, layer], axis=1, bitorder="little")
            for found in (task.fitting, task)
        )
        assert bits.shape[1] == kept
        assert (bits == everything[:, :kept]).all()


def test_a_tiny_group_by_brute_force() -> None:
    """Of all orders of six units the search finds one of the fastest: pairs of both layers, which no layer knows alone.

    Layer 0 uses 0 with 3 and 1 with 4, layer 1 uses 2 with 5 and 3 with 1: a path 0-3-1-4, and 2-5 beside it.
    """
    pairs = [[(0, 3), (1, 4)], [(2, 5), (3, 1)]]
    layers = np.zeros((2, 6, 64), bool)
    for layer, choices in enumerate(pairs):
        for token in range(64):
            layers[layer, list(choices[token % 2]), token] = True
    task = task_of(layers, unit_bytes=8192, flash=FLASH)
    seconds = {order: task.judge(np.array(order)).seconds for order in itertools.permutations(range(6))}
    assert min(seconds.values()) < np.median(list(seconds.values()))
    for name in ("ripple", "misses"):
        order = load("coldpress.compiler.stages.order", Heuristic, name).arrange(task).order
        assert seconds[tuple(order.tolist())] == min(seconds.values()), name
        assert abs(np.diff(np.argsort(order)[[2, 5]])) == 1
    for layer in range(2):
        alone = (
            load("coldpress.compiler.stages.order", Heuristic, "ripple")
            .arrange(task_of(layers[layer], unit_bytes=8192, flash=FLASH))
            .order
        )
        assert seconds[tuple(alone.tolist())] > min(seconds.values())


class Stage:
    """Eleven layers in groups of four, the last one of three; every layer has its own pins."""

    def __init__(self, folder: Path, layers_per_group: int = 4) -> None:
        self.folder = folder
        self.active = [topical(NUM_UNITS, 320, 4, seed // 4) for seed in range(NUM_LAYERS)]
        self.activations: Activations = activations_of(folder / "a", [{"neuron": active} for active in self.active])
        sparsity = sparsity_of("predictor", {"neuron": (0.2,) * NUM_LAYERS}, cache_bytes=NUM_LAYERS * 30 * 384)
        self.sparsity: Sparsity = sparsity.model_copy(update={"layers_per_group": layers_per_group})
        self.pinned = [(layer, layer + 20, 59) for layer in range(NUM_LAYERS)]

    def placement(self) -> Placement:
        whole = placement_of(self.folder, [{"neuron": active} for active in self.active], (0, 1, 2))
        tiers = {f"{layer}.neuron": np.ones(NUM_UNITS, np.int8) for layer in range(NUM_LAYERS)}
        for layer, ids in enumerate(self.pinned):
            tiers[f"{layer}.neuron"][list(ids)] = 0
        return whole.model_copy(update={"arrays": save_arrays(self.folder / "tiers.safetensors", tiers)})

    def order(self, name: str, layers: tuple[int, ...], **settings: object) -> Order:
        config = OrderConfig.model_validate({"order": "misses", **settings})
        model = model_of(NUM_LAYERS, 64, NUM_UNITS)
        records = (self.activations, self.sparsity, self.placement(), device_of(latency_s=1e-6))
        return run(config, model, *records, layers, workspace(self.folder / name))


def test_the_stage_orders_one_group_at_a_time(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    entries = stage.order("o", tuple(range(NUM_LAYERS))).entries
    assert [(entry.layer, entry.num_layers) for entry in entries] == [(0, 4), (4, 4), (8, 3)]
    for entry in entries:
        group = slice(entry.layer, entry.layer + entry.num_layers)
        pinned = np.zeros((entry.num_layers, NUM_UNITS), bool)
        for number, ids in enumerate(stage.pinned[group]):
            pinned[number, list(ids)] = True
        values = {"cache": "lfu", "cache_slots": 27, "unit_bytes": 384, "flash": FLASH}
        task = task_of(np.stack(stage.active[group]), pinned, **values)
        order = load_arrays(entry.arrays)["order"]
        assert (
            order.tolist() == load("coldpress.compiler.stages.order", Heuristic, "misses").arrange(task).order.tolist()
        )
        costs = {cost.gap_bytes: cost.seconds for cost in task.judge_gaps(order)}
        assert {cost.gap_bytes: cost.flash_s_per_token for cost in entry.gap_costs} == costs
        assert order[-1] == 59


def test_chunks_of_whole_groups_do_not_matter(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    everything = stage.order("1", tuple(range(NUM_LAYERS))).entries
    parts = [*stage.order("2", (8, 9, 10)).entries, *stage.order("2", tuple(range(8))).entries]
    assert [entry.layer for entry in parts] == [8, 0, 4]
    by_layer = {entry.layer: entry for entry in parts}
    for entry in everything:
        assert entry.model_copy(update={"arrays": None}) == by_layer[entry.layer].model_copy(update={"arrays": None})
        assert entry.arrays.sha256 == by_layer[entry.layer].arrays.sha256


@pytest.mark.parametrize("layers", [(0, 1, 2), (3, 4, 5, 6, 7), (9, 10)])
def test_a_job_never_cuts_a_group(tmp_path: Path, layers: tuple[int, ...]) -> None:
    with pytest.raises(
        ColdpressError, match=r"share one order, this job has no layer .*multiple of layers_per_group=4"
    ):
        Stage(tmp_path).order("o", layers)


def test_a_layer_that_is_always_used_whole_may_be_in_a_group(tmp_path: Path) -> None:
    """Without bits it counts as active throughout; a group of such layers keeps the model's order."""
    stage = Stage(tmp_path, layers_per_group=2)
    bare = {
        layer: stage.activations.layers[layer].model_copy(
            update={"families": (stage.activations.layers[layer].families[0].model_copy(update={"density": None}),)}
        )
        for layer in (1, 2, 3)
    }
    layers = tuple(bare.get(entry.layer, entry) for entry in stage.activations.layers)
    stage.activations = stage.activations.model_copy(update={"layers": layers})
    with pytest.raises(ColdpressError, match="layer 1: no activation bits of family neuron"):
        stage.order("o", (0, 1))
    densities = stage.sparsity.densities[0].model_copy(update={"per_layer": (0.2, 1.0, 1.0, 1.0, *(0.2,) * 7)})
    stage.sparsity = stage.sparsity.model_copy(update={"densities": (densities,)})
    mixed, whole = stage.order("o", (0, 1, 2, 3)).entries
    assert (mixed.heuristic, whole.heuristic) == ("misses", "structural")
    assert load_arrays(whole.arrays)["order"].tolist() == list(range(NUM_UNITS))
    assert sorted(load_arrays(mixed.arrays)["order"].tolist()) == list(range(NUM_UNITS))
    assert load_arrays(mixed.arrays)["order"].tolist() != list(range(NUM_UNITS))
    alone = Stage(tmp_path / "alone", layers_per_group=1)
    assert mixed.flash_s_per_token > alone.order("o", (0,)).entries[0].flash_s_per_token
