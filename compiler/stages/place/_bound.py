"""Computes an upper bound on the optimum without a solver, and which choices an optimum can still contain.

With a price per byte of every tier (Lagrange multipliers of Eq. 6) the groups no longer depend on each other, and the
best counts of one group are found exactly by dynamic programming over tiers, C_l included. Whatever the prices, the sum
is a proven bound; `find_bound` looks for the lowest, which is convex in them, by cutting planes. `open_spans` drops
every choice whose own bound stays below a known solution (reduced-cost fixing): no optimum is lost.
"""

from dataclasses import dataclass

import numpy as np

from coldpress.compiler.stages.place._problem import Group, Problem

MAX_STEPS = 80
STOP_GAP = 1e-8
MAX_FLOAT = float(np.finfo(np.float64).max)
MARGIN = 1e-9
"""Relative rounding error that is allowed in sums of floats."""


@dataclass(frozen=True)
class Bound:
    """A proven bound: no solution is worth more than `value`, as `prices` (per byte and fast tier) show."""

    value: float
    prices: np.ndarray


@dataclass(frozen=True)
class Level:
    """The counts c_0 + … + c_j of one group that are still open: zero if `may_be_off`, and `low` to `high`."""

    may_be_off: bool
    low: int
    high: int
    may_be_empty: bool
    """True if c_j may be 0."""
    may_be_used: bool

    @property
    def may_be_on(self) -> bool:
        return self.high > 0


def _levels(group: Group, prices: np.ndarray) -> list[np.ndarray]:
    """Returns per tier j float64 [num_batches + 1]: what c_0 + … + c_j = k adds to value less price."""
    steps = prices - np.append(prices[1:], 0.0)
    batches = np.arange(group.values.size) * float(group.batch_bytes)
    return [gain * group.values - step * batches for gain, step in zip(group.gains, steps, strict=True)]


def _least(group: Group, tier: int) -> int:
    """Returns the smallest count above 0 that Eq. 7 allows; relaxed: the remainder may count in several tiers."""
    return max(1, group.first_allowed(tier, with_rest=True)) if group.reachable(tier) else group.values.size


def _shifted(best: np.ndarray, least: int) -> np.ndarray:
    """Maps [k] to the largest of best[: k - least + 1], -inf where that is empty."""
    out = np.full(best.size, -np.inf)
    if least < best.size:
        out[least:] = np.maximum.accumulate(best[: best.size - least])
    return out


def _before(group: Group, prices: np.ndarray) -> list[np.ndarray]:
    """Returns per tier j the best value of tiers 0 … j with c_0 + … + c_j = k batches in them."""
    best, found = _start(group), []
    for tier, level in enumerate(_levels(group, prices)):
        best = level + np.maximum(best, _shifted(best, _least(group, tier)))
        found.append(best)
    return found


def _start(group: Group) -> np.ndarray:
    """Returns the values before the first tier, where only zero batches are possible."""
    return np.where(np.arange(group.values.size) == 0, 0.0, -np.inf)


def _after(group: Group, prices: np.ndarray) -> list[np.ndarray]:
    """Returns per tier j the best value of all slower fast tiers, given c_0 + … + c_j = k."""
    best = np.zeros(group.values.size)
    found = [best]
    for tier, level in reversed(list(enumerate(_levels(group, prices)))[1:]):
        best = level + best
        best = np.maximum(best, _shifted(best[::-1], _least(group, tier))[::-1])
        found.insert(0, best)
    return found


def _rest(group: Group, prices: np.ndarray) -> tuple[float, int]:
    """Returns the best value of the remainder and its tier; ignores Eq. 7 of the batches."""
    best, best_tier = 0.0, prices.size
    for tier in range(prices.size if group.rest_units else 0):
        value = group.worth[tier] * group.rest_value - prices[tier] * group.rest_bytes
        if group.reachable(tier) and value > best:
            best, best_tier = value, tier
    return best, best_tier


def _priced(group: Group, prices: np.ndarray) -> tuple[float, np.ndarray]:
    """Returns a group's best value less price, and the bytes [tiers] that reach it."""
    before, (best, rest_tier) = _before(group, prices), _rest(group, prices)
    used, count = np.zeros(prices.size), int(before[-1].argmax())
    best += float(before[-1][count])
    for tier in range(prices.size - 1, 0, -1):
        found, furthest = before[tier - 1], count - _least(group, tier)
        below = int(found[: furthest + 1].argmax()) if furthest >= 0 else count
        below = below if found[below] > found[count] else count
        used[tier], count = (count - below) * group.batch_bytes, below
    used[0] = count * group.batch_bytes
    if rest_tier < prices.size:
        used[rest_tier] += group.rest_bytes
    return best, used


def find_bound(problem: Problem) -> Bound:
    """Finds the lowest bound over all prices by cutting planes: each evaluation gives a tangent of a convex function.
    Unknowns are one price per fast tier and, where the slowest tier is bounded too, one premium for leaving it."""
    tiers, least = len(problem.fast_bytes), problem.least_fast_bytes
    limits = np.array([*problem.fast_bytes, *([-least] if least else [])], float)
    highest = max(_highest_price(group) for group in problem.groups)
    point = np.zeros(limits.size)
    point[:tiers] = highest / 2
    scale = max(1.0, float(sum(group.worth[0] * (group.values[-1] + group.rest_value) for group in problem.groups)))
    slopes: list[np.ndarray] = []
    offsets: list[float] = []
    lowest = Bound(np.inf, point)
    for _ in range(MAX_STEPS):
        prices = point[:tiers] - (point[tiers] if least else 0.0)
        found = [_priced(group, prices) for group in problem.groups]
        used = np.sum([part for _, part in found], axis=0)
        value = float(limits @ point) + sum(best for best, _ in found)
        if value < lowest.value:
            lowest = Bound(value, prices)
        slope = limits - np.concatenate([used, [-used.sum()] if least else []])
        slopes.append(slope * highest / scale)
        offsets.append((value - float(slope @ point)) / scale)
        point, floor = _lowest_point(np.array(slopes), np.array(offsets))
        point *= highest
        if lowest.value / scale - floor <= STOP_GAP:
            break
    return lowest


def _highest_price(group: Group) -> float:
    """Returns a price per byte at which no unit of the group is worth its bytes."""
    of_batch = group.worth[0] * group.values[:2][-1] / group.batch_bytes
    of_rest = group.worth[0] * group.rest_value / max(1, group.rest_bytes)
    return 2 * max(float(of_batch), of_rest, 1e-300)


def _lowest_point(slopes: np.ndarray, offsets: np.ndarray) -> tuple[np.ndarray, float]:
    """Returns the point in the unit box where the largest of the tangents is lowest, and its value."""
    from scipy.optimize import linprog  # takes a second to import, and this module is read for every dry run

    cost = np.append(np.zeros(slopes.shape[1]), 1.0)
    rows = np.hstack([slopes, -np.ones((len(slopes), 1))])
    bounds = [(0.0, 1.0)] * slopes.shape[1] + [(None, None)]
    answer = linprog(cost, A_ub=rows, b_ub=-offsets, bounds=bounds, method="highs-ds")
    return answer.x[:-1], float(answer.x[-1])


def open_spans(problem: Problem, bound: Bound, slack: float) -> tuple[tuple[Level, ...], ...]:
    """Returns per group and fast tier all counts of solutions that are worth at least `bound.value - slack`."""
    slack += MARGIN * (1 + abs(bound.value))
    spans: list[tuple[Level, ...]] = []
    for group in problem.groups:
        before, after = _before(group, bound.prices), _after(group, bound.prices)
        least = max(float(before[-1].max()) - slack, -MAX_FLOAT)
        below = [_start(group), *before]
        levels = _levels(group, bound.prices)
        found: list[Level] = []
        for tier, (level, behind) in enumerate(zip(levels, after, strict=True)):
            unused = below[tier] + level + behind
            used = _shifted(below[tier], _least(group, tier)) + level + behind
            counts = np.flatnonzero(np.maximum(unused, used) >= least)
            on = counts[counts > 0]
            low, high = (int(on[0]), int(on[-1])) if on.size else (0, 0)
            may_be_empty, may_be_used = bool((unused >= least).any()), bool((used >= least).any())
            found.append(Level(bool(counts[0] == 0), low, high, may_be_empty, may_be_used))
        spans.append(tuple(found))
    return tuple(spans)
