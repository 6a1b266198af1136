"""The order stage: layers as they are asked for, families used whole, explicit sub-sampling, and clear refusals."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coldpress.compiler.activity.packed_bits import adjacent_share
from coldpress.compiler.io import Workspace, load_arrays
from coldpress.compiler.stages.allocate import with_smaller
from coldpress.compiler.stages.order import OrderConfig, auto, ripple
from coldpress.compiler.stages.order import run as run_stage
from coldpress.compiler.stages.order._task import Arranged, OrderTask
from coldpress.schemas.activations import Activations
from coldpress.schemas.errors import ColdpressError, UnknownNameError
from coldpress.schemas.order import FamilyOrder, Order
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


def run(
    config: OrderConfig,
    activations: Activations,
    sparsity: Sparsity,
    layers: tuple[int, ...],
    work: Workspace,
    threads: int = 1,
    pinned: tuple[int, ...] = (),
) -> Order:
    """The stage, with units `pinned` in every layer and family."""
    shapes: list[Any] = [
        {found.family: np.empty((found.num_units, 0)) for found in entry.families} for entry in activations.layers
    ]
    shapes[0] |= {found.family: np.empty((1, 0)) for found in sparsity.densities if found.family not in shapes[0]}
    placement = placement_of(work.folder, shapes, pinned)
    model, device = model_of(len(shapes)), device_of()
    return run_stage(config, model, activations, sparsity, placement, device, layers, work, threads)


def order_of(entry: FamilyOrder) -> np.ndarray:
    return load_arrays(entry.arrays)["order"]


def test_stage_orders_the_layers_it_is_given(tmp_path: Path) -> None:
    """Twelve layers, asked for out of order: 10 before 2, which a sort by name would turn round."""
    layers = [{"mlp_in": topical(30, 100, 3, seed), "mlp_mid": topical(50, 100, 4, seed)} for seed in range(12)]
    activations = activations_of(tmp_path / "a", layers)
    sparsity = sparsity_of("topk", {"mlp_in": (0.3,) * 12, "mlp_mid": (0.2,) * 12})
    order = run(OrderConfig(), activations, sparsity, (10, 2, 11), workspace(tmp_path / "o"))
    expected = [(layer, family) for layer in (10, 2, 11) for family in ("mlp_in", "mlp_mid")]
    assert [(entry.layer, entry.family) for entry in order.entries] == expected
    for entry in order.entries:
        active = layers[entry.layer][entry.family]
        assert (order_of(entry) == ripple.Plugin().arrange(task_of(active)).order).all()
        assert entry.heuristic == "ripple"
        assert entry.adjacent_coactivation == adjacent_share(pack(active)[order_of(entry)])


@pytest.mark.slow
@pytest.mark.parametrize("heuristic", ["ripple", "misses", "auto"])
def test_chunks_of_layers_and_threads_do_not_matter(tmp_path: Path, heuristic: str) -> None:
    activations = activations_of(tmp_path / "a", [{"neuron": topical(40, 640, 4, seed)} for seed in range(12)])
    sparsity, config = sparsity_of("predictor", {"neuron": (0.2,) * 12}), OrderConfig(order=heuristic)
    everything = tuple(range(12))
    runs = [
        run(config, activations, sparsity, everything, workspace(tmp_path / "1"), 1, (3, 7)).entries,
        run(config, activations, sparsity, everything, workspace(tmp_path / "2"), 4, (3, 7)).entries,
        [run(config, activations, sparsity, (i,), workspace(tmp_path / "3"), 1, (3, 7)).entries[0] for i in everything],
    ]
    first, *others = [[(entry.arrays.sha256, entry.heuristic) for entry in entries] for entries in runs]
    assert all(other == first for other in others)


def test_an_interrupted_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it left whole is taken, name of the winner and costs included; half an entry is made again."""
    active = [topical(60, 1024, 5, seed) for seed in range(3)]
    activations = activations_of(tmp_path / "a", [{"neuron": layer} for layer in active])
    sparsity = sparsity_of("predictor", {"neuron": (0.2,) * 3}, cache_bytes=0)
    config = OrderConfig(order="auto")
    work = workspace(tmp_path / "o")
    before = run(config, activations, sparsity, (0, 1, 2), work)
    (work.folder / "1.neuron.json").unlink()  # arrays without a record
    work.path("2.neuron").unlink()  # a record without arrays
    ordered: list[int] = []
    arrange = auto.Plugin().arrange

    def recorded(_: auto.Plugin, task: OrderTask) -> Arranged:
        ordered.append(next(layer for layer in range(3) if (pack(active[layer]) == task.activity.bits).all()))
        return arrange(task)

    monkeypatch.setattr(auto.Plugin, "arrange", recorded)
    assert run(config, activations, sparsity, (0, 1, 2), work) == before
    assert ordered == [1, 2]
    other = Workspace(work.folder, "other inputs")
    assert [entry.heuristic for entry in run(config, activations, sparsity, (0,), other).entries]
    assert ordered == [1, 2, 0]


def test_the_record_says_what_the_order_costs(tmp_path: Path) -> None:
    """The gap and the seconds of the last tokens, given what is pinned and what the plan's cache will hold."""
    active = topical(160, 1024, 6)
    activations = activations_of(tmp_path / "a", [{"neuron": active}])
    sparsity = sparsity_of("predictor", {"neuron": (0.2,)}, cache_bytes=60 * 384)
    pinned = tuple(range(0, 160, 8))
    config = OrderConfig(order="auto")
    entry = run(config, activations, sparsity, (0,), workspace(tmp_path / "o"), pinned=pinned).entries[0]
    task = task_of(active, pinned, cache="lfu", cache_slots=40, unit_bytes=384)
    judged = task.judge(order_of(entry))
    costs = {cost.gap_bytes: cost.flash_s_per_token for cost in entry.gap_costs}
    assert entry.flash_s_per_token == costs[judged.gap_bytes] == judged.seconds == min(costs.values())
    assert entry.flash_s_per_token > 0
    assert entry.heuristic in ("ripple", "frequency", "misses")


def test_families_used_whole_keep_the_model_s_order(tmp_path: Path) -> None:
    activations = activations_of(tmp_path / "a", [{"neuron": np.ones((40, 64), bool)}])
    bare = activations.layers[0].families[0].model_copy(update={"density": None})
    layer = activations.layers[0].model_copy(update={"families": (bare,)})
    for given_activations in (activations, activations.model_copy(update={"layers": (layer,)})):
        sparsity = sparsity_of("dense", {"neuron": (1.0,)})
        entry = run(OrderConfig(), given_activations, sparsity, (0,), workspace(tmp_path / "o")).entries[0]
        assert entry.heuristic == "structural"
        assert order_of(entry).tolist() == list(range(40))
        assert entry.adjacent_coactivation == 1.0


def test_what_cannot_be_ordered_is_refused(tmp_path: Path) -> None:
    activations = activations_of(tmp_path / "a", [{"mlp_mid": topical(40, 64, 4)}])
    sparsity, work = sparsity_of("predictor", {"neuron": (0.2,)}), workspace(tmp_path / "o")
    with pytest.raises(ColdpressError, match="layer 0: no activation bits of family neuron in the statistics; delete"):
        run(OrderConfig(), activations, sparsity, (0,), work)
    with pytest.raises(UnknownNameError, match="Did you mean 'ripple'"):
        run(OrderConfig(order="riple"), activations, sparsity, (0,), work)


def test_of_several_budgets_the_smallest_one_is_ordered_for(tmp_path: Path) -> None:
    """A cache that holds everything would leave nothing to order."""
    activations = activations_of(tmp_path / "a", [{"neuron": topical(60, 256, 5, seed)} for seed in range(2)])
    small = sparsity_of("predictor", {"neuron": (0.2,) * 2}, cache_bytes=0)
    large = sparsity_of("predictor", {"neuron": (1.0,) * 2}, cache_bytes=1 << 24)
    found = {
        name: run(OrderConfig(order="misses"), activations, chosen, (0, 1), workspace(tmp_path / name))
        for name, chosen in (("small", small), ("large", large), ("both", with_smaller(large, [small])))
    }
    orders = {name: [order_of(entry).tolist() for entry in order.entries] for name, order in found.items()}
    assert orders["both"] == orders["small"] != orders["large"]
    assert [entry.gap_costs for entry in found["both"].entries] == [entry.gap_costs for entry in found["small"].entries]
