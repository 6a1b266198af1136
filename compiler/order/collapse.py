"""An order for the reads that really happen: local search on the collapsed-read cost of the units that are not pinned.

Algorithm 1 (order/ripple.py) joins pairs, so it counts a read saved only where two units lie side by side, and it
spends its best places on hot units, which are pinned in DRAM anyway. Here the cost is that of the runtime: two active
units with a gap between them cost the gap's bytes or one more read, whichever is cheaper (access collapse, Ripple 5.1),

    cost of an active unit, in reads = min((distance to the active unit before it - 1) * gap_cost, 1)

summed over calibration tokens, `gap_cost` being a unit's bytes times IOPS over bandwidth. Pinned units go to the end.
Starting from Algorithm 1 over the others, segments of one to three units are moved beside units they are often active
with, turned or not, wherever that lowers the cost. All tokens are looked at together, 64 a word.
"""

import numpy as np

from compiler.order._coactivation import pair_counts, to_words
from compiler.order._numba import compiled, population_count
from compiler.order._problem import Problem
from compiler.order.ripple import join_links

MAX_TOKENS = 8192
"""Calibration tokens the search looks at."""
PROPOSALS_PER_UNIT = 140
NUM_FRIENDS = 12
LONGEST_SEGMENT = 3
FRIENDS_BLOCK = 512


def arrange(problem: Problem) -> np.ndarray:
    """The order on flash, int32 [num_units]; pinned units last, by id."""
    pinned = np.flatnonzero(problem.pinned).astype(np.int32)
    cold = np.flatnonzero(~problem.pinned).astype(np.int32)
    if cold.size < 3:
        return np.concatenate([cold, pinned])
    bits = problem.bits[cold]
    counts = pair_counts(bits, problem.num_tokens)
    order = join_links(counts).astype(np.int64)
    friends = nearest_friends(counts, np.bitwise_count(to_words(bits)).sum(axis=1, dtype=np.int64))
    del counts
    improve(to_words(_sample(bits)), order, friends, problem.gap_cost, PROPOSALS_PER_UNIT * cold.size, problem.seed)
    return np.concatenate([cold[order], pinned])


def _sample(bits: np.ndarray) -> np.ndarray:
    """At most MAX_TOKENS tokens, whole bytes of eight, evenly spread."""
    num_bytes = bits.shape[1]
    step = max(1, -(-num_bytes * 8 // MAX_TOKENS))
    return np.ascontiguousarray(bits[:, ::step])


def nearest_friends(counts: np.ndarray, totals: np.ndarray) -> np.ndarray:
    """The units each unit shares most of its tokens with (Jaccard), int32 [n, min(NUM_FRIENDS, n - 1)], by id.

    Args:
        counts: Co-activation counts [n, n]; only [i, j] with i < j is read.
        totals: Activations of each unit, int64 [n].
    """
    num_units = len(counts)
    num_friends = min(NUM_FRIENDS, num_units - 1)
    friends = np.empty((num_units, num_friends), np.int32)
    for start in range(0, num_units, FRIENDS_BLOCK):
        stop = min(num_units, start + FRIENDS_BLOCK)
        rows = np.arange(start, stop)
        together = np.triu(counts[start:stop], start + 1).astype(np.float32)
        together[:, :stop] += np.tril(counts[:stop, start:stop].T, start - 1)
        likeness = together / np.maximum(totals[start:stop, None] + totals[None] - together, 1)
        likeness[rows - start, rows] = -1
        best = np.argpartition(-likeness, num_friends - 1, axis=1)[:, :num_friends]
        friends[start:stop] = np.sort(best, axis=1)
    return friends


def improve(
    words: np.ndarray, order: np.ndarray, friends: np.ndarray, gap_cost: float, num_proposals: int, seed: int
) -> tuple[float, float]:
    """Improves `order` in place; returns the cost before and after, in reads over all tokens.

    Args:
        words: Packed activations uint64 [n, num_words].
        order: Unit ids by place, int64 [n].
        friends: Candidates for a place beside, int32 [n, k].
        gap_cost: Cost of one unit read for nothing, in reads.
        num_proposals: Moves to try; the same number gives the same order on any machine.
        seed: Seed of the proposals.
    """
    gap_cost = min(1.0, gap_cost)
    reach = int(np.ceil(1 / gap_cost)) if gap_cost > 0 else len(order)
    costs = np.minimum(np.arange(-1, min(reach, len(order)) + 1) * gap_cost, 1.0)  # [distance]; distance 1: no gap
    return _search(words, order, friends, costs, num_proposals, seed)


@compiled
def _moved(order, start, length, target, turned, place):
    """The unit at `place` once the segment order[start : start + length] lies before what is at `target` now."""
    first = target if target < start else target - length
    if first <= place < first + length:
        step = place - first
        return order[start + length - 1 - step] if turned else order[start + step]
    if target < start:
        return order[place - length] if first + length <= place < start + length else order[place]
    return order[place + length] if start <= place < first else order[place]


@compiled
def _cost(words, order, costs, run, start, length, target, turned, place):
    """Cost of the unit at `place` after a move, over all tokens; a move of length 0 changes nothing."""
    unit = _moved(order, start, length, target, turned, place)
    left = np.uint64(0)
    for w in range(words.shape[1]):
        run[w] = words[unit, w]
        left += population_count(run[w])
    total = 0.0
    for distance in range(1, min(place, costs.size - 1) + 1):
        if left == 0:
            break
        before = _moved(order, start, length, target, turned, place - distance)
        found = np.uint64(0)
        for w in range(words.shape[1]):
            found += population_count(run[w] & words[before, w])
            run[w] &= ~words[before, w]
        total += costs[distance] * found
        left -= found
    return total + left


@compiled
def _gain(words, order, costs, run, current, changed, start, length, target, turned):
    """Cost saved by a move; the new costs of the units it touches are left in `changed`, by place."""
    reach, n = costs.size - 1, order.size
    saved = 0.0
    for place in _touched(start, length, target, reach, n):
        unit = _moved(order, start, length, target, turned, place)
        changed[place] = _cost(words, order, costs, run, start, length, target, turned, place)
        saved += current[unit] - changed[place]
    return saved


@compiled
def _touched(start, length, target, reach, n):
    """Places, after the move, of units with other predecessors within reach: the segment and what follows each cut."""
    if target < start:
        first, second = (target, target + length + reach), (start + length, start + length + reach)
    else:
        first, second = (start, start + reach), (target - length, target + reach)
    places = np.empty(max(0, min(n, first[1]) - first[0]) + max(0, min(n, second[1]) - second[0]), np.int64)
    size = 0
    for place in range(first[0], min(n, first[1])):
        places[size] = place
        size += 1
    for place in range(max(first[1], second[0]), min(n, second[1])):
        places[size] = place
        size += 1
    return places[:size]


@compiled
def _move(order, places, start, length, target, turned):
    """Carries a move out and keeps `places`, the place of each unit, up to date."""
    low, high = min(start, target), max(start + length, target)
    after = np.empty(high - low, order.dtype)
    for place in range(low, high):
        after[place - low] = _moved(order, start, length, target, turned, place)
    order[low:high] = after
    for place in range(low, high):
        places[order[place]] = place


@compiled
def _search(words, order, friends, costs, num_proposals, seed):
    np.random.seed(seed)
    n, reach = order.size, costs.size - 1
    run, changed = np.empty(words.shape[1], np.uint64), np.empty(n)
    places, current = np.empty(n, np.int64), np.empty(n)
    for place in range(n):
        places[order[place]] = place
        current[order[place]] = _cost(words, order, costs, run, 0, 0, 0, False, place)
    before = current.sum()
    for _ in range(num_proposals):
        unit = np.random.randint(n)
        friend = friends[unit, np.random.randint(friends.shape[1])]
        length = 1 + np.random.randint(LONGEST_SEGMENT)
        target = places[friend] + np.random.randint(2)
        turned = np.random.randint(2) == 1
        start = places[unit]
        if start + length > n or start <= target <= start + length:
            continue
        if _gain(words, order, costs, run, current, changed, start, length, target, turned) > 1e-9:
            _move(order, places, start, length, target, turned)
            for place in _touched(start, length, target, reach, n):
                current[order[place]] = changed[place]
    return before, current.sum()
