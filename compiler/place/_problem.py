"""PowerInfer's placement problem (6.3) over batches of units: built, shrunk without losing an optimum, read back.

A group is one family of one layer. Its units, sorted by impact, form batches of equal size (6.3.3) and one remainder,
so some optimum takes the first k batches of a group: only k, and whether the remainder is taken, are open. `shrink`
bounds k from both sides with a Lagrange multiplier: a k is dropped when even the relaxation that is forced to it stays
below a known solution. The rest is a small integer program (`Program`), the same for every solver.
"""

import math
from dataclasses import dataclass

import numpy as np

from schemas.families import FamilyName


@dataclass(frozen=True)
class Group:
    """The batches of one family of one layer, in descending impact.

    Impacts are integers (sums of activation counts, Eq. 1), so that solvers can agree exactly.
    """

    layer: int
    family: FamilyName
    unit_bytes: int
    batch_units: int
    min_units: int
    """C_l (Eq. 4): the group pins none or at least so many units."""
    units: np.ndarray
    """int64 [num_units]: unit ids, descending impact, ties by id."""
    batch_values: np.ndarray
    """int64 [num_full_batches], descending."""
    remainder_units: int
    remainder_value: int

    @property
    def reachable(self) -> bool:
        """Whether the group has C_l units at all."""
        return self.min_units <= self.units.size

    def first_allowed(self, with_remainder: bool) -> int:
        """Fewest full batches that reach C_l."""
        lacking = self.min_units - (self.remainder_units if with_remainder else 0)
        return max(0, -(-lacking // self.batch_units))


def make_group(
    layer: int, family: FamilyName, counts: np.ndarray, unit_bytes: int, min_units: int, batch_units: int
) -> Group:
    """Sorts units by impact and cuts them into batches; `counts` int64 [num_units]."""
    units = np.lexsort((np.arange(counts.size), -counts))
    full = counts.size // batch_units
    ordered = counts[units]
    values = ordered[: full * batch_units].reshape(full, batch_units).sum(axis=1)
    rest = ordered[full * batch_units :]
    return Group(layer, family, unit_bytes, batch_units, min_units, units, values, rest.size, int(rest.sum()))


@dataclass(frozen=True)
class Problem:
    """All groups and the bytes of both tiers (Eq. 6); `slow_bytes` None: the slow tier holds everything."""

    groups: tuple[Group, ...]
    fast_bytes: int
    slow_bytes: int | None = None

    @property
    def least_fast_bytes(self) -> int:
        """What does not fit the slow tier must be in the fast one, since every unit is in one of them (Eq. 3)."""
        total = sum(group.units.size * group.unit_bytes for group in self.groups)
        return 0 if self.slow_bytes is None else max(0, total - self.slow_bytes)


@dataclass(frozen=True)
class Choice:
    """What is pinned of a group: its first `num_batches` full batches, and its remainder or not."""

    num_batches: int
    remainder: bool


def pinned_units(group: Group, choice: Choice) -> np.ndarray:
    """Ids of the pinned units, int64, descending impact."""
    full = group.batch_values.size * group.batch_units
    rest = group.units[full:] if choice.remainder else group.units[:0]
    return np.concatenate([group.units[: choice.num_batches * group.batch_units], rest])


def value_of(group: Group, choice: Choice) -> int:
    """Summed impact of what is pinned."""
    return int(group.batch_values[: choice.num_batches].sum()) + choice.remainder * group.remainder_value


def bytes_of(group: Group, choice: Choice) -> int:
    """Bytes of what is pinned."""
    return (choice.num_batches * group.batch_units + choice.remainder * group.remainder_units) * group.unit_bytes


# Shrinking


@dataclass(frozen=True)
class Span:
    """The choices of one group that remain open: off, or from `low` to `high` full batches."""

    may_be_off: bool
    may_be_on: bool
    low: int
    high: int


@dataclass(frozen=True)
class Relaxation:
    """A bound on the optimum, a multiplier that gives it, and the value of a known solution (None: none known)."""

    bound: float
    multiplier: float
    known: int | None


def _batch_bytes(group: Group) -> int:
    return group.batch_units * group.unit_bytes


def _priced(group: Group, price: float) -> np.ndarray:
    """float64 [num_full_batches + 1]: value minus price x bytes of k batches and the remainder if that pays.

    A relaxation of Eq. 7: k below the reach of C_l even with the remainder is -inf, all others are allowed.
    """
    steps = group.batch_values - price * _batch_bytes(group)
    totals = np.concatenate([[0.0], np.cumsum(steps)])
    totals += max(0.0, group.remainder_value - price * group.remainder_units * group.unit_bytes)
    totals[: group.first_allowed(with_remainder=True)] = -np.inf
    return totals if group.reachable else np.full_like(totals, -np.inf)


def _bound(problem: Problem, price: float) -> float:
    """Lagrange bound at `price` per byte (negative: a premium for what the slow tier cannot hold)."""
    limit = problem.fast_bytes if price >= 0 else problem.least_fast_bytes
    return price * limit + sum(max(0.0, float(_priced(group, price).max())) for group in problem.groups)


def relax(problem: Problem, num_steps: int = 60) -> Relaxation:
    """The best Lagrange bound, by ternary search over the price (the bound is convex in it), and a greedy solution."""
    highest = max((float(g.batch_values.max(initial=0)) / _batch_bytes(g) for g in problem.groups), default=0.0)
    highest = max([highest, *(g.remainder_value / (g.unit_bytes * max(1, g.remainder_units)) for g in problem.groups)])
    low, high = (-highest if problem.least_fast_bytes else 0.0), highest
    for _ in range(num_steps):
        third = (high - low) / 3
        if _bound(problem, low + third) <= _bound(problem, high - third):
            high -= third
        else:
            low += third
    price = min((low, high, 0.0), key=lambda value: _bound(problem, value))
    return Relaxation(_bound(problem, price), price, _known_value(problem, price))


def _known_value(problem: Problem, price: float) -> int | None:
    """Value of a feasible solution: groups in the order of their worth at `price`, then the best batches that fit."""
    if problem.least_fast_bytes:
        return None
    room, taken = problem.fast_bytes, dict.fromkeys(range(len(problem.groups)), 0)
    worth = [float(_priced(group, price).max()) for group in problem.groups]
    for index in sorted(taken, key=lambda i: (-worth[i], i)):
        group = problem.groups[index]
        first, size = group.first_allowed(with_remainder=False), _batch_bytes(group)
        wanted = max(first, int((group.batch_values > price * size).sum()))
        wanted = min(wanted, room // size)
        if worth[index] > 0 and group.batch_values.size >= wanted >= first:
            taken[index], room = wanted, room - wanted * size
    value = sum(value_of(group, Choice(taken[i], False)) for i, group in enumerate(problem.groups))
    return value + _fill(problem, taken, room)


def _fill(problem: Problem, taken: dict[int, int], room: int) -> int:
    """Value of further batches of the groups in use that fit into `room`, best value per byte first."""
    added = 0
    while True:
        open_groups = [
            (group.batch_values[taken[i]] / _batch_bytes(group), -i)
            for i, group in enumerate(problem.groups)
            if (taken[i] or not group.min_units) and taken[i] < group.batch_values.size and _batch_bytes(group) <= room
        ]
        if not open_groups:
            return added
        index = -max(open_groups)[1]
        added += int(problem.groups[index].batch_values[taken[index]])
        room -= _batch_bytes(problem.groups[index])
        taken[index] += 1


def shrink(problem: Problem, relaxation: Relaxation) -> tuple[Span, ...]:
    """Per group, the choices that may be part of an optimum."""
    spans: list[Span] = []
    for group in problem.groups:
        priced = _priced(group, relaxation.multiplier)
        best = max(0.0, float(priced.max()))
        # Forcing a group to a choice lowers the bound by what the choice lacks; the margin covers rounding of floats.
        lacking = -np.inf if relaxation.known is None else relaxation.known - relaxation.bound
        lacking -= 1e-9 * (1 + abs(relaxation.bound))
        may_be_off = -best >= lacking
        open_counts = np.flatnonzero(np.isfinite(priced) & (priced - best >= lacking))
        on = open_counts.size > 0
        spans.append(Span(may_be_off, on, int(open_counts[0]) if on else 0, int(open_counts[-1]) if on else 0))
    return tuple(spans)


# The integer program


@dataclass(frozen=True)
class Column:
    """An integer variable from 0 to `upper`: batches of equal value and size, or a group's remainder."""

    upper: int
    value: int
    units: int
    size: int


@dataclass(frozen=True)
class Row:
    """One group of the program: y_l, what y_l = 1 brings by itself, and the columns that need y_l = 1."""

    may_be_off: bool
    base_value: int
    base_units: int
    base_size: int
    min_units: int
    columns: tuple[Column, ...]


@dataclass(frozen=True)
class Program:
    """Maximize the value; sizes (bytes over their common divisor) between `least_size` and `most_size`."""

    rows: tuple[Row, ...]
    least_size: int
    most_size: int


@dataclass(frozen=True)
class Answer:
    """A solver's values of y (bool per row) and of the columns (ints per row), and its proven upper bound."""

    on: tuple[bool, ...]
    columns: tuple[tuple[int, ...], ...]
    bound: float


def to_program(problem: Problem, spans: tuple[Span, ...]) -> Program:
    """The open part of the problem; groups that can only be off are left out."""
    divisor = math.gcd(*(group.unit_bytes for group in problem.groups))
    rows = tuple(
        _row(group, span, divisor) for group, span in zip(problem.groups, spans, strict=True) if span.may_be_on
    )
    return Program(rows, -(-problem.least_fast_bytes // divisor), problem.fast_bytes // divisor)


def _row(group: Group, span: Span, divisor: int) -> Row:
    unit_size = group.unit_bytes // divisor
    base = Choice(span.low, remainder=False)
    values, repeats = np.unique(-group.batch_values[span.low : span.high], return_counts=True)
    columns = [
        Column(int(times), int(-value), group.batch_units, group.batch_units * unit_size)
        for value, times in zip(values, repeats, strict=True)
    ]
    if group.remainder_units:
        size = group.remainder_units * unit_size
        columns.append(Column(1, group.remainder_value, group.remainder_units, size))
    base_units = span.low * group.batch_units
    return Row(
        span.may_be_off, value_of(group, base), base_units, base_units * unit_size, group.min_units, tuple(columns)
    )


def to_choices(problem: Problem, spans: tuple[Span, ...], answer: Answer) -> tuple[Choice, ...]:
    """What is pinned of every group; units that never fire are left out where Eqs. 6 and 7 allow."""
    found = iter(zip(answer.on, answer.columns, strict=True))
    choices: list[Choice] = []
    for group, span in zip(problem.groups, spans, strict=True):
        on, values = next(found) if span.may_be_on else (False, ())
        if not on:
            choices.append(Choice(0, remainder=False))
            continue
        of_remainder = sum(values[len(values) - bool(group.remainder_units) :])
        choice = Choice(span.low + sum(values) - of_remainder, bool(of_remainder))
        choices.append(choice if problem.least_fast_bytes else _without_idle(group, choice))
    return tuple(choices)


def _without_idle(group: Group, choice: Choice) -> Choice:
    if value_of(group, choice) == 0:
        return Choice(0, remainder=False)
    remainder, num_batches = choice.remainder, choice.num_batches
    if remainder and group.remainder_value == 0 and num_batches >= group.first_allowed(with_remainder=False):
        remainder = False
    busy = int((group.batch_values > 0).sum())
    return Choice(min(num_batches, max(busy, group.first_allowed(remainder))), remainder)
