"""order: exact counts, Algorithm 1 to the letter, and what an order is worth."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from compiler._io import Workspace, load_arrays
from compiler.order import OrderConfig, collapse
from compiler.order import run as run_stage
from compiler.order._coactivation import adjacent_share, pair_counts, to_words
from compiler.order.ripple import arrange, join_links
from schemas.activations import Activations
from schemas.errors import ColdpressError, UnknownNameError
from schemas.order import Order
from schemas.sparsity import Sparsity
from tests.support.statistics import (
    activations_of,
    device_of,
    model_of,
    pack,
    placement_of,
    problem_of,
    sparsity_of,
    workspace,
)


def run(
    config: OrderConfig, activations: Activations, sparsity: Sparsity, layers: tuple[int, ...], work: Workspace
) -> Order:
    """The stage, with nothing pinned."""
    shapes = [
        {found.family: np.empty((found.num_units, 0)) for found in entry.families} for entry in activations.layers
    ]
    shapes[0] |= {found.family: np.empty((1, 0)) for found in sparsity.densities if found.family not in shapes[0]}
    placement = placement_of(work.folder, shapes)
    return run_stage(config, model_of(len(shapes)), activations, sparsity, placement, device_of(), layers, work)


def algorithm_1(counts: np.ndarray) -> list[int]:
    """The paper's pseudocode line by line, with lists and a sort in place of the queue."""
    n = len(counts)
    degree, member, edges = [0] * n, list(range(n)), []
    pairs = ((i, j) for i in range(n) for j in range(i + 1, n))
    for i, j in sorted(pairs, key=lambda pair: (-int(counts[pair]), pair)):
        if degree[i] == 2 or degree[j] == 2 or member[i] == member[j]:
            continue
        degree[i] += 1
        degree[j] += 1
        member = [member[i] if root == member[j] else root for root in member]
        edges.append((i, j))
    path, before = [min((unit for unit in range(n) if degree[unit] < 2), default=0)], -1
    while len(path) < n:
        beside = [a + b - path[-1] for a, b in edges if path[-1] in (a, b)]
        following = next(unit for unit in beside if unit != before)
        before = path[-1]
        path.append(following)
    return path


def planted(num_units: int, num_tokens: int, num_topics: int, seed: int = 0) -> np.ndarray:
    """bool [num_units, num_tokens]: units fire with their topic, whose members are scattered over the ids."""
    rng = np.random.default_rng(seed)
    topics, texts = rng.integers(0, num_topics, num_units), rng.integers(0, num_topics, num_tokens)
    return rng.random((num_units, num_tokens)) < np.where(topics[:, None] == texts, 0.8, 0.05)


SQUARES = st.integers(1, 14).flatmap(lambda n: arrays(np.int64, (n, n), elements=st.integers(0, 4)))


@settings(max_examples=150, deadline=None)
@given(counts=SQUARES, run_pairs=st.sampled_from([1, 5, 1 << 23]))
def test_links_are_joined_as_published(counts: np.ndarray, run_pairs: int) -> None:
    """Few distinct counts, so nearly every step has ties; short runs, so that pairs are split over many of them."""
    upper = np.triu(counts, 1)
    assert join_links(upper.astype(np.uint16), run_pairs).tolist() == algorithm_1(upper)


def test_larger_graphs_are_joined_as_published() -> None:
    active = planted(90, 400, 6)
    counts = np.triu(pair_counts(pack(active), 400), 1)
    assert arrange(problem_of(active)).tolist() == algorithm_1(counts)
    assert join_links(counts, 100).tolist() == algorithm_1(counts)


def test_units_that_never_fire_together_are_joined_by_id() -> None:
    """2 and 4 first; then pairs of count 0, by i and j: 0-1, 0-2, 1-3, 3-5. The path's ends are 4 and 5."""
    active = np.zeros((6, 16), bool)
    active[2, :5] = active[4, :5] = True
    assert arrange(problem_of(active)).tolist() == [4, 2, 0, 1, 3, 5]


@settings(max_examples=60, deadline=None)
@given(
    active=st.tuples(st.integers(1, 33), st.integers(1, 200)).flatmap(lambda shape: arrays(bool, shape)),
)
def test_pair_counts_are_exact(active: np.ndarray) -> None:
    expected = active.astype(np.int64) @ active.T.astype(np.int64)
    found = pair_counts(pack(active), active.shape[1])
    assert (np.triu(found, 1) == np.triu(expected, 1)).all()


def test_pair_counts_cross_blocks_and_sixteen_bits() -> None:
    rng = np.random.default_rng(1)
    active = rng.random((37, 70000)) < 0.97  # 1,094 words a row: blocks of 118 rows
    many = np.repeat(active, 4, axis=0)
    found = pair_counts(pack(many), many.shape[1])
    expected = active.astype(np.float64) @ active.T
    assert found.dtype == np.uint32
    assert (np.triu(found, 1) == np.triu(np.repeat(np.repeat(expected, 4, 0), 4, 1), 1)).all()
    assert found.max() > 65535


def test_adjacent_share_counts_either_neighbour() -> None:
    active = np.array([[1, 1, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 1, 1, 0]], bool)
    bits = pack(active)
    assert adjacent_share(bits, np.array([0, 1, 2, 3])) == 4 / 6  # unit 0 and 1 on token 1, unit 2 and 3 on token 2
    assert adjacent_share(bits, np.array([1, 2, 0, 3])) == 2 / 6  # unit 0 and 3 on token 1
    assert adjacent_share(bits * 0, np.arange(4)) == 0.0


def test_planted_groups_are_found() -> None:
    active = planted(400, 1000, 10)
    bits = pack(active)
    ripple, structural = adjacent_share(bits, arrange(problem_of(active))), adjacent_share(bits, np.arange(400))
    assert structural < 0.35
    assert ripple > 2 * structural


@pytest.mark.parametrize("seed", range(5))
def test_never_worse_than_the_model_s_order(seed: int) -> None:
    active = np.random.default_rng(seed).random((120, 256)) < 0.15
    bits = pack(active)
    assert adjacent_share(bits, arrange(problem_of(active))) >= adjacent_share(bits, np.arange(120))


def test_stage_orders_the_layers_it_is_given(tmp_path: Path) -> None:
    layers = [{"mlp_in": planted(30, 100, 3, seed), "mlp_mid": planted(50, 100, 4, seed)} for seed in range(12)]
    activations = activations_of(tmp_path / "a", layers)
    sparsity = sparsity_of("topk", {"mlp_in": (0.3,) * 12, "mlp_mid": (0.2,) * 12})
    order = run(OrderConfig(), activations, sparsity, (10, 2), workspace(tmp_path / "o"))
    assert [(entry.layer, entry.family) for entry in order.entries] == [
        (10, "mlp_in"),
        (10, "mlp_mid"),
        (2, "mlp_in"),
        (2, "mlp_mid"),
    ]
    expected = pack(layers[10]["mlp_mid"])
    found = load_arrays(order.entries[1].arrays)["order"]
    assert (found == arrange(problem_of(layers[10]["mlp_mid"]))).all()
    assert order.entries[1].heuristic == "ripple"
    assert order.entries[1].adjacent_coactivation == adjacent_share(expected, found)


def test_chunks_of_layers_do_not_matter(tmp_path: Path) -> None:
    activations = activations_of(tmp_path / "a", [{"neuron": planted(40, 64, 4, seed)} for seed in range(3)])
    sparsity = sparsity_of("predictor", {"neuron": (0.2,) * 3})
    together = run(OrderConfig(), activations, sparsity, (0, 1, 2), workspace(tmp_path / "1")).entries
    alone = [run(OrderConfig(), activations, sparsity, (i,), workspace(tmp_path / "2")).entries[0] for i in range(3)]
    assert [entry.arrays.sha256 for entry in together] == [entry.arrays.sha256 for entry in alone]


def test_families_used_whole_keep_the_model_s_order(tmp_path: Path) -> None:
    activations = activations_of(tmp_path / "a", [{"neuron": np.ones((40, 64), bool)}])
    bare = activations.layers[0].families[0].model_copy(update={"density": None})
    layer = activations.layers[0].model_copy(update={"families": (bare,)})
    for given_activations in (activations, activations.model_copy(update={"layers": (layer,)})):
        sparsity = sparsity_of("dense", {"neuron": (1.0,)})
        entry = run(OrderConfig(), given_activations, sparsity, (0,), workspace(tmp_path / "o")).entries[0]
        assert entry.heuristic == "structural"
        assert load_arrays(entry.arrays)["order"].tolist() == list(range(40))
        assert entry.adjacent_coactivation == 1.0


def test_missing_bits_and_unknown_heuristics_are_named(tmp_path: Path) -> None:
    activations = activations_of(tmp_path / "a", [{"mlp_mid": planted(40, 64, 4)}])
    sparsity = sparsity_of("predictor", {"neuron": (0.2,)})
    with pytest.raises(ColdpressError, match="layer 0: no activation bits of family neuron; run recalibrate"):
        run(OrderConfig(), activations, sparsity, (0,), workspace(tmp_path / "o"))
    with pytest.raises(UnknownNameError, match="Did you mean 'ripple'"):
        run(OrderConfig(heuristic="riple"), activations, sparsity, (0,), workspace(tmp_path / "o"))


def reads_cost(active: np.ndarray, order: np.ndarray, gap_cost: float) -> float:
    """The cost that `collapse` lowers, token by token: a first read, then the cheaper of bytes and read."""
    total = 0.0
    for token in active[order].T:
        places = np.flatnonzero(token)
        total += (1.0 if places.size else 0.0) + np.minimum((np.diff(places) - 1) * gap_cost, 1.0).sum()
    return total


@pytest.mark.parametrize("gap_cost", [0.02, 0.1, 0.3, 1.0, 4.0])
def test_the_search_knows_its_own_cost_and_lowers_it(gap_cost: float) -> None:
    active = planted(90, 300, 6)
    order = np.random.default_rng(0).permutation(90)
    start = order.copy()
    friends = collapse.nearest_friends(pair_counts(pack(active), 300), active.sum(axis=1))
    before, after = collapse.improve(to_words(pack(active)), order, friends, gap_cost, 20_000, 0)
    assert sorted(order) == list(range(90))
    assert before == pytest.approx(reads_cost(active, start, min(1.0, gap_cost)))
    assert after == pytest.approx(reads_cost(active, order, min(1.0, gap_cost)))
    assert after < 0.9 * before


def test_pinned_units_lie_last_and_the_others_cost_less_than_algorithm_1() -> None:
    active = planted(120, 400, 6)
    pinned = tuple(np.argsort(-active.sum(axis=1), kind="stable")[:24].tolist())
    problem = problem_of(active, pinned, gap_cost=0.1)
    order = collapse.arrange(problem)
    assert order[-24:].tolist() == sorted(pinned)
    read = active & ~problem.pinned[:, None]
    assert reads_cost(read, order, 0.1) < reads_cost(read, arrange(problem), 0.1)


def test_friends_share_the_most_tokens() -> None:
    active = planted(40, 200, 4)
    friends = collapse.nearest_friends(pair_counts(pack(active), 200), active.sum(axis=1))
    for unit, found in enumerate(friends):
        both = (active & active[unit]).sum(axis=1)
        likeness = both / np.maximum((active | active[unit]).sum(axis=1), 1)
        likeness[unit] = -1
        assert unit not in found
        assert likeness[found].min() >= np.sort(likeness)[-len(found)] - 1e-6
