"""PowerInfer's placement (6.2 and 6.3, Eqs. 1 to 8): which units stay in DRAM, as an integer program.

The paper's two processing units are two memories here: DRAM, and flash, which holds everything (Eq. 6 binds DRAM only).
A synchronization is one flash round trip: pinning fewer units of a layer than that is worth in reads does not pay.

A group is one family of one layer. Its units, sorted by impact, form batches of equal size (6.3.3) and one remainder.
Equal batches differ only in impact, so some optimum pins the first ones: any other choice of as many is worth less and
takes as many bytes. So a group has two unknowns, how many batches are pinned and whether the remainder is, instead of
one binary per unit (a_in), and every unit is in one memory (Eq. 3) by construction. `tests/contracts/test_place.py`
compares this with the paper's own variables.

Impacts of batches fall, so the impact of the first n is concave in n, and the least of some of its tangents (an
envelope) can replace it: steps of one tangent share a column, and the program's optimum is never below the true one.

The solver gets the counts that a bound leaves open. With a price per byte of DRAM (the Lagrange multiplier of Eq. 6)
groups no longer depend on each other, and the best count of each is found exactly, C_l included; whatever the price,
the sum is a proven bound. `open_spans` drops every count whose own bound stays below a known solution (reduced-cost
fixing). That solution's value is first guessed; if the answer is worse, the search solves again with the counts that
this answer leaves open. So every count left out is worth less than the answer, and the solver's proof holds for the
whole problem.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from coldpress.schemas.device import DeviceProfile, flash_seconds
from coldpress.schemas.errors import ColdpressError
from coldpress.schemas.families import FamilyName

if TYPE_CHECKING:
    import pulp

LARGEST_VALUE = 1e5
"""Objective coefficients are scaled down to this: HiGHS's absolute tolerances suit values of this size."""
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


@dataclass(frozen=True)
class Group:
    """Batches of one family of one layer, in falling impact; impacts are counts (Eq. 1), so their sums are exact."""

    layer: int
    family: FamilyName
    unit_bytes: int
    batch_units: int
    min_units: int
    """C_l (Eq. 4): DRAM holds none of the group's units, or at least this many."""
    units: np.ndarray
    """int64 [num_units]: unit ids, falling impact, ties by id."""
    values: np.ndarray
    """int64 [num_batches + 1]: summed impact of the first k full batches, concave in k."""
    rest_units: int
    rest_value: int

    @property
    def num_batches(self) -> int:
        return self.values.size - 1

    @property
    def batch_bytes(self) -> int:
        return self.batch_units * self.unit_bytes

    @property
    def rest_bytes(self) -> int:
        return self.rest_units * self.unit_bytes

    @property
    def can_pin(self) -> bool:
        return self.min_units <= self.units.size

    def least_batches(self, with_rest: bool) -> int:
        """Returns the fewest full batches that reach C_l, together with the remainder or without it."""
        lacking = self.min_units - (self.rest_units if with_rest else 0)
        return max(0, -(-lacking // self.batch_units))


class UnitChoice(NamedTuple):
    """A group's pinned full batches, and whether its remainder is pinned."""

    batches: int
    has_rest: bool


class Problem(NamedTuple):
    groups: tuple[Group, ...]
    dram_bytes: int


def make_group(
    layer: int, family: FamilyName, counts: np.ndarray, unit_bytes: int, min_units: int, batch_units: int
) -> Group:
    """Sorts units by impact and cuts them into batches; `counts` int64 [num_units]."""
    units = np.argsort(-counts, kind="stable")
    totals = np.concatenate([[0], np.cumsum(counts[units])])
    values = totals[: counts.size // batch_units * batch_units + 1 : batch_units].copy()
    rest_units, rest_value = counts.size % batch_units, int(totals[-1] - values[-1])
    return Group(layer, family, unit_bytes, batch_units, min_units, units, values, rest_units, rest_value)


def min_units(unit_bytes: int, device: DeviceProfile) -> int:
    """Returns C_l of Eq. 4 with the times of Eq. 5: a unit's bytes over DRAM's bandwidth, and one read of whole pages
    with the queue full. Computing with a unit takes equally long wherever it came from, so it is in neither. Raises
    ColdpressError if DRAM is not faster than flash."""
    flash, page, together = device.flash, device.flash.page_bytes.value, device.flash.queue_depth.value
    dram_s = unit_bytes / device.dram_bytes_per_s.value
    flash_s = float(flash_seconds(flash, together, together * -(-unit_bytes // page) * page)) / together
    if dram_s >= flash_s:
        raise ColdpressError(
            f"device {device.name}: a unit of {unit_bytes} bytes takes {dram_s:.3g} s in dram and {flash_s:.3g} s "
            "in flash, expected less; correct the profile's bandwidths"
        )
    return least_units(dram_s, flash_s, flash.latency_s.value)


def least_units(fast_s: float, slow_s: float, sync_s: float) -> int:
    """Returns the least C with C T_fast + T_sync <= C T_slow (Eq. 4)."""
    return math.ceil(sync_s / (slow_s - fast_s))


def units_of(group: Group, choice: UnitChoice) -> int:
    return choice.batches * group.batch_units + choice.has_rest * group.rest_units


def bytes_of(group: Group, choice: UnitChoice) -> int:
    return units_of(group, choice) * group.unit_bytes


def value_of(group: Group, choice: UnitChoice) -> int:
    """Returns the group's part of the objective (Eq. 2)."""
    return int(group.values[choice.batches]) + choice.has_rest * group.rest_value


def is_pinned(group: Group, choice: UnitChoice) -> np.ndarray:
    """Returns bool [num_units] by unit id."""
    pinned = np.zeros(group.units.size, bool)
    pinned[group.units[: choice.batches * group.batch_units]] = True
    pinned[group.units[group.units.size - group.rest_units :]] = choice.has_rest
    return pinned


def rank_of(group: Group, choice: UnitChoice) -> np.ndarray:
    """Returns int32 [num_units]: unit ids by claim to DRAM: pinned ones first, then falling impact, then id."""
    return group.units[np.argsort(~is_pinned(group, choice)[group.units], kind="stable")].astype(np.int32)


def without_idle(group: Group, choice: UnitChoice) -> UnitChoice:
    """Unpins units that never fire, unless the group would then fall below C_l."""
    busy = min(int((np.diff(group.values) > 0).sum()), choice.batches)
    has_rest = choice.has_rest and group.rest_value > 0
    if not busy and not has_rest:
        return UnitChoice(0, False)
    if choice.has_rest and choice.batches < group.least_batches(with_rest=False):
        has_rest = True
    return UnitChoice(max(busy, min(choice.batches, group.least_batches(has_rest))), has_rest)


class Interval(NamedTuple):
    """The open numbers of pinned batches in a group: 0 if `may_be_zero`, and `low` to `high`, unless `high` is 0."""

    may_be_zero: bool
    low: int
    high: int


Column = Callable[..., "pulp.LpVariable"]
"""(upper bound, lower bound) -> the program's next integer column."""


class _Pinned(NamedTuple):
    batches: "pulp.LpAffineExpression"
    rest: Any
    """The binary of the remainder; 0 without one."""
    impact: list[tuple["pulp.LpVariable", int]]


def solve(
    problem: Problem, spans: tuple[Interval, ...], tangents: Sequence[set[int]], gap: float
) -> tuple[tuple[UnitChoice, ...], float] | None:
    """Solves Eqs. 2 to 8 with HiGHS on one thread; returns choices, and a value that no answer within the spans
    exceeds; None if the spans hold no solution. The search ends at the relative `gap`, never at a time limit, so the
    same program always has the same answer. Raises ColdpressError if the solver fails."""
    import pulp  # takes a while to import, and this module is read for every dry run

    def column(most: int, least: int = 0) -> pulp.LpVariable:
        columns.append(pulp.LpVariable(f"x{len(columns)}", least, most, pulp.LpInteger))
        return columns[-1]

    columns: list[pulp.LpVariable] = []
    program = pulp.LpProblem("placement", pulp.LpMaximize)
    pinned = [_add_group(program, column, *given) for given in zip(problem.groups, spans, tangents, strict=True)]
    divisor = math.gcd(*(group.unit_bytes for group in problem.groups))
    used = [
        group.unit_bytes // divisor * (group.batch_units * found.batches + group.rest_units * found.rest)
        for group, found in zip(problem.groups, pinned, strict=True)
    ]
    program += pulp.lpSum(used) <= problem.dram_bytes // divisor  # Eq. 6
    impacts = dict.fromkeys(columns, 0) | dict(term for found in pinned for term in found.impact)
    scale = max(1.0, max(impacts.values()) / LARGEST_VALUE)
    program.setObjective(pulp.LpAffineExpression([(x, value / scale) for x, value in impacts.items()]))  # Eq. 2
    options = {"random_seed": 0, "mip_feasibility_tolerance": 1e-9}
    program.solve(pulp.HiGHS(msg=False, threads=1, gapRel=gap, gapAbs=0.5 / scale, **options))
    if program.status == pulp.LpStatusInfeasible:
        return None
    if program.sol_status not in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible):
        raise ColdpressError(f"HiGHS found no placement (status {pulp.LpStatus[program.status]}); report this as a bug")
    choices = tuple(UnitChoice(_whole(found.batches), bool(_whole(found.rest))) for found in pinned)
    highs: Any = program.solverModel
    return choices, -highs.getInfo().mip_dual_bound * scale


def _whole(found: Any) -> int:
    import pulp

    return round(pulp.value(found) or 0)


def _add_group(program: Any, column: Column, group: Group, span: Interval, tangents: set[int]) -> _Pinned:
    """Adds a group's columns, and Eqs. 7 and 8; their large K is the number of batches, the smallest that is valid."""
    y = column(int(span.high > 0 or (group.rest_units > 0 and group.can_pin)), int(not span.may_be_zero))
    switch = column(int(span.high > 0), int(not span.may_be_zero))  # whether any full batch is pinned
    batches, impact = _add_batches(program, column, group, span, switch, tangents)
    program += y - switch >= 0
    if not group.rest_units:
        program += switch - y >= 0
        rest = 0
    else:
        rest = column(1)
        impact.append((rest, group.rest_value))
    program += batches - group.num_batches * y <= 0  # Eq. 8
    program += group.batch_units * batches + group.rest_units * rest - group.min_units * y >= 0  # Eq. 7
    if group.rest_units:
        program += rest - y <= 0  # Eq. 8
    return _Pinned(batches, rest, impact)


def _add_batches(
    program: Any, column: Column, group: Group, span: Interval, switch: Any, tangents: set[int]
) -> tuple[Any, list[tuple[Any, int]]]:
    """Adds pinned batches, `span.low` if the switch is on and steps by falling impact; returns number and impact."""
    import pulp

    if not span.high:
        return pulp.LpAffineExpression(), []
    envelope = envelope_of(group.values, span, sorted(tangents))
    terms, impact = [(switch, span.low)], [(switch, int(envelope[0]))]
    slopes, times = np.unique(-np.diff(envelope), return_counts=True)
    for slope, repeated in zip(slopes.tolist(), times.tolist(), strict=True):
        steps = column(repeated)
        terms.append((steps, 1))
        impact.append((steps, -slope))
        program += steps - repeated * switch <= 0
    return pulp.LpAffineExpression(terms), impact


def _tangents_within(values: np.ndarray, span: Interval, error: float) -> set[int]:
    """Picks the steps of a group (1: from no batch to one) whose tangents are nowhere more than `error` too high."""
    if span.high <= span.low:
        return {max(1, span.low)}
    steps = {span.low + 1, span.high}
    true = values[span.low : span.high + 1]
    found = envelope_of(values, span, sorted(steps))
    while (worst := int((found - true).argmax())) and found[worst] - true[worst] > error:
        steps.add(span.low + worst)
        found = np.minimum(found, envelope_of(values, span, [span.low + worst]))
    return steps


def envelope_of(values: np.ndarray, span: Interval, steps: Sequence[int]) -> np.ndarray:
    """Returns int64 [high - low + 1]: the least of the tangents at `steps` for each open count of batches."""
    ends = np.array(steps)[:, None]
    slopes = values[ends] - values[ends - 1]
    return (values[ends] + slopes * (np.arange(span.low, span.high + 1) - ends)).min(axis=0)


class Solution(NamedTuple):
    """A placement, its value, and the proven relative distance of that value to the optimum."""

    choices: tuple[UnitChoice, ...]
    value: int
    gap: float


def search(problem: Problem, gap: float) -> Solution:
    """Finds a placement within the relative `gap` of the optimum."""
    bound = lowest_bound(problem)
    if bound.value <= 0:
        return Solution((UnitChoice(0, False),) * len(problem.groups), 0, 0.0)
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
    choices: tuple[UnitChoice, ...]
    value: int
    bound: float
    """No solution within the spans is worth more."""


def _best_of(problem: Problem, spans: tuple[Interval, ...], gap: float, scale: float) -> _Best | None:
    """Finds the best placement within `spans`; adds tangents around the answers until the envelopes are exact there."""
    error = max(gap, ENVELOPE_GAP) * scale / len(spans)
    tangents = [_tangents_within(group.values, span, error) for group, span in zip(problem.groups, spans, strict=True)]
    best: _Best | None = None
    while True:
        answer = solve(problem, spans, tangents, gap / 2)
        if answer is None:
            return None
        found, bound = answer
        added = _refine(tangents, spans, found)
        choices = tuple(map(without_idle, problem.groups, found))
        value = sum(map(value_of, problem.groups, choices))
        bound = bound if best is None else min(best.bound, bound)
        best = _Best(choices, value, bound) if best is None or value > best.value else best._replace(bound=bound)
        if not added or bound - best.value <= gap * abs(bound):
            return best


def _refine(tangents: Sequence[set[int]], spans: Sequence[Interval], choices: Sequence[UnitChoice]) -> bool:
    """Adds the tangents beside the chosen counts; returns whether there were any to add."""
    added = False
    for steps, span, (count, _) in zip(tangents, spans, choices, strict=True):
        near = range(max(span.low, count - 1, 0) + 1, min(span.high, count + 2) + 1) if count else range(0)
        added |= not steps.issuperset(near)
        steps.update(near)
    return added


class Bound(NamedTuple):
    """No solution is worth more than `value`, as the `price` of a byte proves."""

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


def open_spans(problem: Problem, bound: Bound, slack: float) -> tuple[Interval, ...]:
    """Returns per group all counts of solutions that are worth at least `bound.value - slack`."""
    slack += MARGIN * (1 + bound.value)
    spans: list[Interval] = []
    for group in problem.groups:
        worth = _worth(group, bound.price)
        counts = np.flatnonzero(worth >= max(float(worth.max()) - slack, -MAX_FLOAT))
        some = counts[counts > 0]
        spans.append(Interval(bool(counts[0] == 0), *((int(some[0]), int(some[-1])) if some.size else (0, 0))))
    return tuple(spans)
