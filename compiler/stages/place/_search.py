"""Solves a placement problem (_program.py), and proves the result's distance to the optimum.

The solver gets the counts that a bound leaves open. With a price per byte of DRAM (the Lagrange multiplier of Eq. 6)
groups no longer depend on each other, and the best count of each is found exactly, C_l included. Whatever the price,
the sum is a proven bound; `lowest_bound` looks for the lowest, which is convex in the price, by cutting planes.
`open_spans` drops every count whose own bound stays below a known solution (reduced-cost fixing): no optimum is lost.

How many counts stay open depends on a solution's value, which is not known beforehand: the search starts from a guess,
and if the answer is worse than the guess, it solves again with the counts that this answer leaves open. So every count
left out is worth less than the answer, and the solver's proof holds for the whole problem.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from coldpress.compiler.stages.place._program import (
    Choice,
    Group,
    Problem,
    Span,
    first_tangents,
    solve,
    value_of,
    without_idle,
)

MAX_STEPS = 80
STOP_GAP = 1e-8
MARGIN = 1e-9
"""Relative rounding error that is allowed in sums of floats."""
MAX_FLOAT = float(np.finfo(np.float64).max)
FIRST_SLACK = 2e-6
"""Guessed relative distance of the optimum to the bound."""
GROWTH = 16
ENVELOPE_GAP = 1e-2
"""Relative error of the objective that the first envelopes may have."""


class Solution(NamedTuple):
    """A placement, its value, and the proven relative distance of that value to the optimum."""

    choices: tuple[Choice, ...]
    value: int
    gap: float


def search(problem: Problem, gap: float) -> Solution:
    """Finds a placement within the relative `gap` of the optimum."""
    bound = lowest_bound(problem)
    if bound.value <= 0:
        return Solution((Choice(0, False),) * len(problem.groups), 0, 0.0)
    slack, best = FIRST_SLACK * (1 + bound.value), None
    while True:
        found = _best_of(problem, open_spans(problem, bound, slack), gap, bound.value)
        if found is None:  # with all counts open, at the latest, there is a solution: to pin nothing
            slack = slack * GROWTH if slack < bound.value else math.inf
            continue
        best = found if best is None or found.value > best.value else best._replace(bound=found.bound)
        if bound.value - best.value <= max(slack, gap * bound.value):
            break
        slack = bound.value - best.value
    # Every excluded placement is worth less than `bound.value - slack`; no placement is worth more than the bound.
    proven = min(max(best.bound, bound.value - slack), bound.value) + MARGIN * bound.value
    proven = max(best.value, math.floor(proven))  # impacts are integers
    return Solution(best.choices, best.value, (proven - best.value) / proven if proven > 0 else 0.0)


class _Best(NamedTuple):
    choices: tuple[Choice, ...]
    value: int
    bound: float
    """No solution within the spans is worth more."""


def _best_of(problem: Problem, spans: tuple[Span, ...], gap: float, scale: float) -> _Best | None:
    """Finds the best placement within `spans`; adds tangents around the answers until the envelopes are exact there."""
    tangents = first_tangents(problem.groups, spans, max(gap, ENVELOPE_GAP) * scale / len(spans))
    best: _Best | None = None
    while True:
        answer = solve(problem, spans, tangents, gap / 2)
        if answer is None:
            return None
        added = _refine(tangents, spans, answer.choices)
        choices = tuple(map(without_idle, problem.groups, answer.choices))
        value = sum(map(value_of, problem.groups, choices))
        bound = answer.bound if best is None else min(best.bound, answer.bound)
        best = _Best(choices, value, bound) if best is None or value > best.value else best._replace(bound=bound)
        if not added or bound - best.value <= gap * abs(bound):
            return best


def _refine(tangents: Sequence[set[int]], spans: Sequence[Span], choices: Sequence[Choice]) -> bool:
    """Adds the tangents beside the chosen counts; returns whether there were any to add."""
    added = False
    for steps, span, (count, _) in zip(tangents, spans, choices, strict=True):
        near = range(max(span.low, count - 1, 0) + 1, min(span.high, count + 2) + 1) if count else range(0)
        added |= not steps.issuperset(near)
        steps.update(near)
    return added


class Bound(NamedTuple):
    """A proven bound: no solution is worth more than `value`, as the `price` of a byte shows."""

    value: float
    price: float


def lowest_bound(problem: Problem) -> Bound:
    """Finds the price with the lowest bound by cutting planes: each price gives a tangent of a convex function, and the
    next price is where the nearest falling tangent and the nearest rising one meet."""
    highest = max(map(_highest_price, problem.groups))
    scale = max(1.0, float(sum(group.values[-1] + group.rest_value for group in problem.groups)))
    price, lowest = highest / 2, Bound(math.inf, highest / 2)
    falling = rising = None  # tangents: (slope, value at price 0)
    for _ in range(MAX_STEPS):
        found = [_best_at(group, price) for group in problem.groups]
        slope = float(problem.dram_bytes - sum(used for _, used in found))
        value = problem.dram_bytes * price + sum(best for best, _ in found)
        if value < lowest.value:
            lowest = Bound(value, price)
        tangent = slope, value - slope * price
        falling, rising = (tangent, rising) if slope < 0 else (falling, tangent)
        if falling and rising:
            price = (falling[1] - rising[1]) / (rising[0] - falling[0])
        else:
            price = highest if falling else 0.0
        slope, start = falling or tangent
        floor = slope * price + start
        if (lowest.value - floor) / scale <= STOP_GAP:
            break
    return lowest


def _highest_price(group: Group) -> float:
    """Returns a price per byte at which no unit of the group is worth its bytes."""
    of_batch = float(group.values[:2][-1] / group.batch_bytes)
    return 2 * max(of_batch, group.rest_value / max(1, group.rest_bytes), 1e-300)


def _worth(group: Group, price: float) -> np.ndarray:
    """Returns float64 [num_batches + 1]: the value less price of k batches; -inf where Eq. 7 forbids k. Relaxed: the
    remainder counts for C_l, pinned or not."""
    batches = np.arange(group.values.size)
    least = max(1, group.least_batches(with_rest=True)) if group.can_pin else group.values.size
    allowed = (batches == 0) | (batches >= least)
    return np.where(allowed, group.values - price * (batches * float(group.batch_bytes)), -np.inf)


def _best_at(group: Group, price: float) -> tuple[float, int]:
    """Returns a group's best value less price, and the bytes that reach it; the remainder's Eq. 7 is ignored."""
    worth = _worth(group, price)
    batches = int(worth.argmax())
    rest = group.rest_value - price * group.rest_bytes if group.rest_units and group.can_pin else 0.0
    has_rest = rest > 0
    return float(worth[batches]) + max(0.0, rest), batches * group.batch_bytes + has_rest * group.rest_bytes


def open_spans(problem: Problem, bound: Bound, slack: float) -> tuple[Span, ...]:
    """Returns per group all counts of solutions that are worth at least `bound.value - slack`."""
    slack += MARGIN * (1 + bound.value)
    spans: list[Span] = []
    for group in problem.groups:
        worth = _worth(group, bound.price)
        counts = np.flatnonzero(worth >= max(float(worth.max()) - slack, -MAX_FLOAT))
        some = counts[counts > 0]
        spans.append(Span(bool(counts[0] == 0), *((int(some[0]), int(some[-1])) if some.size else (0, 0))))
    return tuple(spans)
