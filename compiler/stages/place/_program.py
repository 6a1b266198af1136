"""Writes the open counts of a placement problem as an integer program (Eqs. 2-8), and reads its answer back.

Each group has per fast tier y_l (Eqs. 7, 8), and the number of batches in this tier and all faster ones: a switch u,
the smallest open count, and columns for the steps above it. Impacts of steps fall, so their sum is concave, and the
least of some of its tangents (an envelope) can replace it: steps of one tangent share a column, and the program's
optimum is never below the problem's. The large K of Eq. 8 is the group's number of batches, the smallest valid value.
"""

import math
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from coldpress.compiler.stages.place._bound import Level
from coldpress.compiler.stages.place._problem import Choice, Group, Problem
from coldpress.runtime.plugins import PluginBase

Terms = list[tuple[int, int]]
"""(column, coefficient) pairs: a linear form over the columns of a program."""


@dataclass(frozen=True)
class Constraint:
    """least <= sum of terms <= most; None: no limit."""

    terms: Terms
    least: int | None
    most: int | None


@dataclass
class Program:
    """An integer program, the same for every solver: maximize the value of the columns, all of them integers."""

    lower: list[int] = field(default_factory=list)
    upper: list[int] = field(default_factory=list)
    value: list[int] = field(default_factory=list)
    constraints: list[Constraint] = field(default_factory=list)

    def column(self, upper: int, value: int = 0, lower: int = 0) -> int:
        """Adds a column; returns its number."""
        self.lower.append(lower)
        self.upper.append(upper)
        self.value.append(value)
        return len(self.value) - 1

    def require(self, terms: Iterable[tuple[int, int]], least: int | None = None, most: int | None = None) -> None:
        self.constraints.append(Constraint([term for term in terms if term[1]], least, most))


@dataclass(frozen=True)
class Answer:
    """A solver's integers, one per column, and its proven upper bound."""

    columns: tuple[int, ...]
    bound: float


class Solver(PluginBase):
    """Solves integer programs. The base class of all placement solvers."""

    @abstractmethod
    def solve(self, program: Program, gap: float) -> Answer | None:
        """Returns an answer whose value is within the relative `gap` of the optimum; None if there is no solution.

        Raises:
            ColdpressError: if the solver fails.
        """


@dataclass(frozen=True)
class _Place:
    batches: list[Terms]
    """Per fast tier: batches in it and all faster ones."""
    rest: list[int]
    """Per fast tier: whether the remainder is in it; empty without one."""


@dataclass(frozen=True)
class Placed:
    program: Program
    places: list[_Place]

    def choices(self, answer: Answer) -> tuple[Choice, ...]:
        return tuple(_choice(place, answer.columns) for place in self.places)


def _choice(place: _Place, columns: tuple[int, ...]) -> Choice:
    levels = [sum(weight * columns[index] for index, weight in terms) for terms in place.batches]
    counts = tuple(level - below for level, below in zip(levels, [0, *levels], strict=False))
    rest_tier = next((tier for tier, index in enumerate(place.rest) if columns[index]), len(counts))
    return Choice(counts, rest_tier)


Tangents = tuple[tuple[set[int], ...], ...]
"""Per group and fast tier, the steps (1: from no batch to one) whose tangents are in the envelope."""


def first_tangents(problem: Problem, spans: tuple[tuple[Level, ...], ...], error: float) -> Tangents:
    """Picks tangents whose envelope is nowhere more than `error` (of the objective) above the true values."""
    return tuple(
        tuple(
            _tangents_within(group.values, level, error / max(1, gain))
            for gain, level in zip(group.gains, levels, strict=True)
        )
        for group, levels in zip(problem.groups, spans, strict=True)
    )


def _tangents_within(values: np.ndarray, level: Level, error: float) -> set[int]:
    if level.high <= level.low:
        return {max(1, level.low)}
    steps = {level.low + 1, level.high}
    true = values[level.low : level.high + 1]
    found = _envelope(values, level, sorted(steps))
    while (worst := int((found - true).argmax())) and found[worst] - true[worst] > error:
        steps.add(level.low + worst)
        found = np.minimum(found, _envelope(values, level, [level.low + worst]))
    return steps


def _envelope(values: np.ndarray, level: Level, steps: Sequence[int]) -> np.ndarray:
    """Returns int64 [high - low + 1]: the least of the tangents at `steps` for each open count of batches."""
    ends = np.array(steps)[:, None]
    slopes = values[ends] - values[ends - 1]
    return (values[ends] + slopes * (np.arange(level.low, level.high + 1) - ends)).min(axis=0)


def to_program(problem: Problem, spans: tuple[tuple[Level, ...], ...], tangents: Tangents) -> Placed:
    program, places = Program(), []
    divisor = math.gcd(*(group.unit_bytes for group in problem.groups))
    sizes: list[Terms] = [[] for _ in problem.fast_bytes]
    for group, levels, steps in zip(problem.groups, spans, tangents, strict=True):
        place = _add_group(program, group, levels, steps)
        places.append(place)
        for tier, size in enumerate(sizes):
            size += _scaled(_units(group, place, tier), group.unit_bytes // divisor)
    for size, fast_bytes in zip(sizes, problem.fast_bytes, strict=True):
        program.require(size, most=fast_bytes // divisor)  # Eq. 6
    if problem.least_fast_bytes:  # Eq. 6 of the slowest tier, with Eq. 3
        program.require([term for size in sizes for term in size], least=-(-problem.least_fast_bytes // divisor))
    return Placed(program, places)


def _add_group(program: Program, group: Group, levels: tuple[Level, ...], tangents: tuple[set[int], ...]) -> _Place:
    place = _Place([], [])
    used: list[int] = []
    for tier, (level, steps) in enumerate(zip(levels, tangents, strict=True)):
        may_be_used = level.may_be_used or bool(group.rest_units and group.reachable(tier))
        used.append(program.column(int(may_be_used), lower=int(not level.may_be_empty)))  # y_l
        switch = program.column(int(level.may_be_on), lower=int(not level.may_be_off))  # u
        place.batches.append(_count(program, group, group.gains[tier], level, switch, sorted(steps)))
        program.require([(switch, -1), *((y, 1) for y in used)], least=0)
        if not group.rest_units:
            program.require([(switch, 1), (used[-1], -1)], least=0)
        if group.rest_units:
            place.rest.append(program.column(1, group.worth[tier] * group.rest_value))
    for tier, y in enumerate(used):
        batches, units = _within(place, tier), _units(group, place, tier)
        program.require(batches, least=0)
        program.require([*batches, (y, -group.num_batches)], most=0)  # Eq. 8
        program.require([*units, (y, -group.min_units[tier])], least=0)  # Eq. 7
        if group.rest_units:
            program.require([(place.rest[tier], 1), (y, -1)], most=0)  # Eq. 8
    if group.rest_units:
        program.require(((index, 1) for index in place.rest), most=1)  # Eq. 3
    return place


def _count(program: Program, group: Group, gain: int, level: Level, switch: int, tangents: list[int]) -> Terms:
    """Counts the batches in all tiers up to one: `level.low` if the switch is on, then steps by falling value."""
    if not level.may_be_on:
        return []
    envelope = _envelope(group.values, level, tangents)
    program.value[switch] = gain * int(envelope[0])
    terms = [(switch, level.low)]
    slopes, times = np.unique(-np.diff(envelope), return_counts=True)
    for slope, repeated in zip(slopes.tolist(), times.tolist(), strict=True):
        terms.append((program.column(repeated, -gain * slope), 1))
        program.require([(terms[-1][0], 1), (switch, -repeated)], most=0)
    return terms


def _within(place: _Place, tier: int) -> Terms:
    return [*place.batches[tier], *(_scaled(place.batches[tier - 1], -1) if tier else [])]


def _units(group: Group, place: _Place, tier: int) -> Terms:
    rest = [(place.rest[tier], group.rest_units)] if group.rest_units else []
    return [*_scaled(_within(place, tier), group.batch_units), *rest]


def _scaled(terms: Terms, factor: int) -> Terms:
    return [(index, factor * weight) for index, weight in terms]
