"""Algorithm 1 to the letter, over all units or some, and what it finds."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from coldpress.compiler.activity.packed_bits import adjacent_share
from coldpress.compiler.stages.order import ripple
from coldpress.compiler.stages.order._task import pair_counts
from coldpress.compiler.stages.order.ripple import join_links
from tests.support.statistics import pack, task_of, topical


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


SQUARES = st.integers(1, 14).flatmap(lambda n: arrays(np.int64, (n, n), elements=st.integers(0, 4)))
RUNS = st.sampled_from([1, 5, 1 << 23])


@settings(max_examples=150, deadline=None)
@given(counts=SQUARES, run_pairs=RUNS)
def test_links_are_joined_as_published(counts: np.ndarray, run_pairs: int) -> None:
    """Few distinct counts, so nearly every step has ties; short runs, so that pairs are split over many of them."""
    upper = np.triu(counts, 1)
    assert join_links(upper.astype(np.uint16), run_pairs=run_pairs).tolist() == algorithm_1(upper)


@settings(max_examples=150, deadline=None)
@given(counts=SQUARES, run_pairs=RUNS, data=st.data())
def test_some_units_are_joined_as_if_there_were_no_others(counts: np.ndarray, run_pairs: int, data: st.DataObject):
    units = np.flatnonzero(data.draw(arrays(bool, len(counts)))).astype(np.int32)
    expected = algorithm_1(np.triu(counts, 1)[np.ix_(units, units)]) if units.size else []
    found = join_links(counts.astype(np.uint16), units, run_pairs)
    assert found.tolist() == [int(units[place]) for place in expected]


def test_larger_graphs_are_joined_as_published() -> None:
    active = topical(90, 400, 6)
    counts = np.triu(pair_counts(pack(active), 400), 1)
    assert ripple.Plugin().arrange(task_of(active)).order.tolist() == algorithm_1(counts)
    assert join_links(counts, run_pairs=100).tolist() == algorithm_1(counts)


def test_the_lower_triangle_and_the_diagonal_say_nothing() -> None:
    counts = np.random.default_rng(0).integers(0, 50, (40, 40)).astype(np.uint16)
    assert (join_links(counts) == join_links(np.triu(counts, 1))).all()


def test_units_that_never_fire_together_are_joined_by_id() -> None:
    """2 and 4 first; then pairs of count 0, by i and j: 0-1, 0-2, 1-3, 3-5. The path's ends are 4 and 5."""
    active = np.zeros((6, 16), bool)
    active[2, :5] = active[4, :5] = True
    assert ripple.Plugin().arrange(task_of(active)).order.tolist() == [4, 2, 0, 1, 3, 5]


def test_planted_groups_are_found() -> None:
    active = topical(400, 1000, 10)
    bits = pack(active)
    joined = adjacent_share(bits[ripple.Plugin().arrange(task_of(active)).order])
    structural = adjacent_share(bits[np.arange(400)])
    assert structural < 0.35
    assert joined > 2 * structural


@pytest.mark.parametrize("seed", range(5))
def test_never_worse_than_the_model_s_order(seed: int) -> None:
    active = np.random.default_rng(seed).random((120, 256)) < 0.15
    bits = pack(active)
    assert adjacent_share(bits[ripple.Plugin().arrange(task_of(active)).order]) >= adjacent_share(bits[np.arange(120)])
