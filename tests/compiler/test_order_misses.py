"""Orders of what flash is read for, and of closest friends."""

import numpy as np

from coldpress.compiler.stages.order import closest_friend, misses, ripple
from coldpress.compiler.stages.order._task import pair_counts, read_bits
from tests.support.statistics import pack, task_of, topical


def hottest(active: np.ndarray, count: int) -> tuple[int, ...]:
    return tuple(np.argsort(-active.sum(axis=1), kind="stable")[:count].tolist())


def test_misses_of_the_last_tokens_are_joined() -> None:
    """Of `search_tokens` tokens at the end, and nothing of others; pinned units lie last."""
    active = topical(60, 640, 5)
    pinned = hottest(active, 6)
    task = task_of(active, pinned, search_tokens=320, cache="lru", cache_slots=10)
    bits = read_bits(pack(active[:, 320:]), 320, task.demand.pinned[0], "lru", 10)
    assert (task.demand.missed.bits == bits).all()
    order = misses.Plugin().arrange(task).order.tolist()
    assert order[:54] == ripple.join_links(pair_counts(bits, 320), task.demand.left_on_flash).tolist()
    assert order[54:] == sorted(pinned)


def test_misses_are_joined_by_what_the_cache_does_not_hold() -> None:
    active = topical(60, 400, 5)
    task = task_of(active, hottest(active, 6), cache="lru", cache_slots=20)
    counts, everything = pair_counts(task.demand.missed.bits, 400), pair_counts(task.activity.bits, 400)
    assert (counts <= everything)[np.triu_indices(60, 1)].all()
    uncached = ripple.join_links(everything, task.demand.left_on_flash).tolist()
    assert misses.Plugin().arrange(task).order[:54].tolist() != uncached


def test_misses_are_algorithm_1_where_nothing_is_in_dram() -> None:
    task = task_of(topical(80, 300, 6))
    assert (misses.Plugin().arrange(task).order == ripple.Plugin().arrange(task).order).all()


def test_closest_friends_by_hand() -> None:
    """Unit 2 is everybody's friend: 0 gets it, 1 stays alone, 3 and 4 meet nobody and lie where their ids say."""
    active = np.zeros((5, 20), bool)
    active[2, :12] = True
    active[0, :5] = active[1, 4:10] = True
    active[3, 15] = True
    counts = pair_counts(pack(active), 20)
    assert closest_friend.closest_friends(counts).tolist() == [2, 2, 1, 3, 4]
    assert closest_friend.Plugin().arrange(task_of(active)).order.tolist() == [0, 2, 1, 3, 4]
