"""The local search knows its own cost and lowers it; other weights and friends are what their formulas say."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from coldpress.compiler.stages.order import closest_friend, cold, collapse, jaccard, lift, misses, ripple
from coldpress.compiler.stages.order._coactivation import pair_counts, to_words
from coldpress.compiler.stages.order._task import read_bits
from coldpress.compiler.stages.order.collapse import SCALE, gap_step, improve, nearest_friends, total_cost
from coldpress.compiler.stages.order.jaccard import HIGHEST, jaccard_weights
from coldpress.compiler.stages.order.lift import lift_weights
from tests.support.statistics import pack, task_of, topical

ACTIVE = st.tuples(st.integers(3, 24), st.integers(1, 150)).flatmap(lambda shape: arrays(bool, shape))
GAP_COSTS = st.sampled_from([0.0, 0.02, 0.1, 0.3, 1.0, 4.0])


def reads_cost(active: np.ndarray, order: np.ndarray, gap_cost: float) -> float:
    """The cost that the search lowers, token by token: a first read, then the cheaper of bytes and read."""
    step = gap_step(gap_cost) / SCALE
    total = 0.0
    for token in active[order].T:
        places = np.flatnonzero(token)
        total += (1.0 if places.size else 0.0) + np.minimum((np.diff(places) - 1) * step, 1.0).sum()
    return total


def hottest(active: np.ndarray, count: int) -> tuple[int, ...]:
    return tuple(np.argsort(-active.sum(axis=1), kind="stable")[:count].tolist())


@settings(max_examples=60, deadline=None)
@given(active=ACTIVE, gap_cost=GAP_COSTS, seed=st.integers(0, 99))
def test_the_search_knows_its_own_cost(active: np.ndarray, gap_cost: float, seed: int) -> None:
    """What every accepted move saves, found from unions of neighbours, adds up to the difference of whole costs."""
    rng, words = np.random.default_rng(seed), to_words(pack(active))
    order = rng.permutation(len(active))
    before, start = total_cost(words, order, gap_step(gap_cost)), order.copy()
    counts, units = pair_counts(pack(active), active.shape[1]), np.arange(len(active), dtype=np.int32)
    friends = nearest_friends(counts, active.sum(axis=1), units, 2)
    saved = improve(words, order, friends, gap_cost, rng.permutation(len(active)))
    assert sorted(order) == list(range(len(active)))
    assert before / SCALE == pytest.approx(reads_cost(active, start, gap_cost))
    assert before / SCALE - saved == pytest.approx(reads_cost(active, order, gap_cost))
    assert saved >= 0
    assert saved > 0 or (order == start).all()


@pytest.mark.parametrize("gap_cost", [0.02, 0.1, 0.3, 1.0])
def test_the_search_lowers_the_cost_of_a_random_order(gap_cost: float) -> None:
    active = topical(90, 300, 6)
    order = np.random.default_rng(0).permutation(90)
    before = reads_cost(active, order, gap_cost)
    friends = nearest_friends(pair_counts(pack(active), 300), active.sum(axis=1), np.arange(90, dtype=np.int32), 8)
    improve(to_words(pack(active)), order, friends, gap_cost, np.arange(90))
    assert reads_cost(active, order, gap_cost) < 0.9 * before


def test_the_search_looks_at_no_more_words_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    """With none it leaves the order alone; with some it sweeps once or twice and then stops, before it is done."""
    active = topical(90, 300, 6)
    friends = nearest_friends(pair_counts(pack(active), 300), active.sum(axis=1), np.arange(90, dtype=np.int32), 8)
    start = np.random.default_rng(0).permutation(90)

    def saved(max_words: int) -> float:
        monkeypatch.setattr(collapse, "MAX_WORDS", max_words)
        order = start.copy()
        found = improve(to_words(pack(active)), order, friends, 0.1, np.arange(90))
        assert (order == start).all() == (found == 0)
        return found

    first_sweep = 90 * (1 + 2 * 8) * 2 * 5 * 10  # units, cuts of each, both sides, words of 300 tokens, reach
    assert saved(0) == saved(first_sweep - 1) == 0
    assert 0 < saved(first_sweep) < saved(1 << 30)


def test_no_single_move_beside_a_friend_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the search ends by itself, with no gain too small, every move it may make costs more."""
    monkeypatch.setattr(collapse, "LAST_GAIN", 0.0)
    active, gap_cost = topical(30, 128, 3), 0.2
    words, order = to_words(pack(active)), np.arange(30)
    friends = nearest_friends(pair_counts(pack(active), 128), active.sum(axis=1), np.arange(30, dtype=np.int32), 4)
    improve(words, order, friends, gap_cost, np.arange(30))
    step = gap_step(gap_cost)
    cost = total_cost(words, order, step)
    for unit in range(30):
        rest = order[order != unit]
        for friend in friends[unit]:
            for cut in (int(np.flatnonzero(rest == friend)[0]) + side for side in (0, 1)):
                assert total_cost(words, np.insert(rest, cut, unit), step) >= cost


def test_pinned_units_lie_last_and_the_others_cost_less_than_algorithm_1() -> None:
    active = topical(120, 400, 6)
    pinned = hottest(active, 24)
    task = task_of(active, pinned)
    read = active & ~task.demand.pinned[0][:, None]
    gap_cost = collapse.gap_cost(task, task.judge(cold.Plugin().arrange(task).order).gap_bytes)
    found = {
        module.__name__: module.Plugin().arrange(task).order
        for module in (ripple, cold, collapse, jaccard, lift, misses)
    }
    for name in ("cold", "collapse", "jaccard", "lift", "misses"):
        assert found[f"coldpress.compiler.stages.order.{name}"][-24:].tolist() == sorted(pinned)
    costs = {name.rpartition(".")[2]: reads_cost(read, order, gap_cost) for name, order in found.items()}
    assert costs["collapse"] < costs["cold"] < costs["ripple"]


def test_cold_is_algorithm_1_where_nothing_is_pinned() -> None:
    task = task_of(topical(80, 300, 6))
    assert (cold.Plugin().arrange(task).order == ripple.Plugin().arrange(task).order).all()


def test_a_gap_costs_its_share_of_the_best_gap() -> None:
    active = topical(20, 64, 2)
    assert collapse.gap_cost(task_of(active, unit_bytes=4096), 16384) == 0.25
    assert collapse.gap_cost(task_of(active, unit_bytes=2048), 16384) == 0.1  # a page is read around it
    assert collapse.gap_cost(task_of(active, unit_bytes=4096), 0) == 1.0


def test_the_search_looks_at_what_the_last_tokens_miss() -> None:
    """Friends, start and search know the misses of `search_tokens` tokens at the end, and nothing of others."""
    active = topical(60, 640, 5)
    pinned = hottest(active, 6)
    task = task_of(active, pinned, search_tokens=320, cache="lru", cache_slots=10)
    bits = read_bits(pack(active[:, 320:]), 320, task.demand.pinned[0], "lru", 10)
    assert (task.demand.missed.bits == bits).all()
    units, counts = task.demand.left_on_flash, pair_counts(bits, 320)
    start = misses.Plugin().arrange(task).order
    assert start[:54].tolist() == ripple.join_links(counts, units).tolist()
    order = np.searchsorted(units, start[:54])
    friends = nearest_friends(counts, np.bitwise_count(bits).sum(axis=1), units, collapse.NUM_FRIENDS)
    gap_cost = collapse.gap_cost(task, task.judge(start).gap_bytes)
    visits = np.random.default_rng(task.seed).permutation(54)
    assert improve(to_words(bits[units]), order, friends, gap_cost, visits) > 0
    assert collapse.Plugin().arrange(task).order[:54].tolist() == units[order].tolist()


def test_friends_share_the_most_tokens() -> None:
    active = topical(40, 200, 4)
    units = np.flatnonzero(np.arange(40) % 5 != 0).astype(np.int32)
    friends = nearest_friends(pair_counts(pack(active), 200), active.sum(axis=1), units, 6)
    for place, found in enumerate(friends):
        both = (active[units] & active[units[place]]).sum(axis=1)
        likeness = both / np.maximum((active[units] | active[units[place]]).sum(axis=1), 1)
        likeness[place] = -1
        assert likeness[found] == pytest.approx(np.sort(likeness)[::-1][:6])


def test_a_unit_without_friends_has_none() -> None:
    active = np.zeros((4, 16), bool)
    active[0, :4] = active[1, 2:6] = active[2, 10] = True
    friends = nearest_friends(pair_counts(pack(active), 16), active.sum(axis=1), np.arange(4, dtype=np.int32), 2)
    assert friends.tolist() == [[1, -1], [0, -1], [-1, -1], [-1, -1]]


@settings(max_examples=50, deadline=None)
@given(active=ACTIVE)
def test_weights_are_their_formulas(active: np.ndarray) -> None:
    num_tokens, totals = active.shape[1], active.sum(axis=1)
    counts = pair_counts(pack(active), num_tokens)
    like, lifted = jaccard_weights(counts, totals), lift_weights(counts, totals, num_tokens)
    expected: dict[tuple[int, int], float] = {}
    for i in range(len(active)):
        for j in range(i + 1, len(active)):
            both, either = int((active[i] & active[j]).sum()), int((active[i] | active[j]).sum())
            assert like[i, j] == HIGHEST * both // max(1, either)
            assert (lifted[i, j] > 0) == (both > 0)
            if both:
                expected[i, j] = both * num_tokens / (totals[i] * totals[j])
    pairs = sorted(expected, key=lambda pair: expected[pair])
    for first, second in itertools.pairwise(pairs):
        assert lifted[first] <= lifted[second]
        if expected[second] > 1.01 * expected[first]:
            assert lifted[first] < lifted[second]


def test_closest_friends_by_hand() -> None:
    """Unit 2 is everybody's friend: 0 gets it, 1 stays alone, 3 and 4 meet nobody and lie where their ids say."""
    active = np.zeros((5, 20), bool)
    active[2, :12] = True
    active[0, :5] = active[1, 4:10] = True
    active[3, 15] = True
    counts = pair_counts(pack(active), 20)
    assert closest_friend.closest_friends(counts).tolist() == [2, 2, 1, 3, 4]
    assert closest_friend.Plugin().arrange(task_of(active)).order.tolist() == [0, 2, 1, 3, 4]


def test_misses_are_joined_by_what_the_cache_does_not_hold() -> None:
    active = topical(60, 400, 5)
    task = task_of(active, hottest(active, 6), cache="lru", cache_slots=20)
    units = task.demand.left_on_flash
    counts = pair_counts(task.demand.missed.bits, 400)
    assert (counts <= pair_counts(task.activity.bits, 400))[np.triu_indices(60, 1)].all()
    assert misses.Plugin().arrange(task).order[:54].tolist() == ripple.join_links(counts, units).tolist()
    assert misses.Plugin().arrange(task).order.tolist() != cold.Plugin().arrange(task).order.tolist()
