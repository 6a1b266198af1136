"""PowerInfer's placement problem (6.3) over batches of units and any number of memory tiers, fastest first.

A group is one family of one layer. Its units, sorted by impact, form batches of equal size (6.3.3) and one remainder.
Equal batches differ only in impact, so some optimum gives the first c_0 batches of a group to the fastest tier, the
next c_1 to the second, and so on: sorting any other arrangement this way loses nothing (the rearrangement inequality)
and moves no byte. The unknowns per group are these counts and the remainder's tier, instead of one binary per batch
and tier; tests compare this with brute force over the paper's own variables.
"""

from dataclasses import dataclass

import numpy as np

from coldpress.schemas.families import FamilyName


@dataclass(frozen=True)
class Group:
    """The batches of one family of one layer, in descending impact. Impacts are integers (sums of activation counts,
    Eq. 1), so that solvers can agree exactly."""

    layer: int
    family: FamilyName
    unit_bytes: int
    batch_units: int
    min_units: tuple[int, ...]
    """C_l (Eq. 4) per fast tier: the tier gets none of the group's units, or at least this many."""
    worth: tuple[int, ...]
    """Weight of an impact of 1 per fast tier, descending; (1,) where there is one fast tier (Eq. 2)."""
    units: np.ndarray
    """int64 [num_units]: unit ids, descending impact, ties by id."""
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
    def gains(self) -> tuple[int, ...]:
        """Worth of a tier over the next one: an impact among the first c_0 + … + c_j batches counts gains[j] more."""
        return tuple(here - below for here, below in zip(self.worth, (*self.worth[1:], 0), strict=True))

    def reachable(self, tier: int) -> bool:
        """Tells whether the group has at least C_l units."""
        return self.min_units[tier] <= self.units.size

    def first_allowed(self, tier: int, with_rest: bool) -> int:
        """Returns the fewest full batches that reach C_l in a tier, together with the remainder or without it."""
        lacking = self.min_units[tier] - (self.rest_units if with_rest else 0)
        return max(0, -(-lacking // self.batch_units))


def make_group(
    layer: int,
    family: FamilyName,
    counts: np.ndarray,
    unit_bytes: int,
    min_units: tuple[int, ...],
    batch_units: int,
    worth: tuple[int, ...] = (1,),
) -> Group:
    """Sorts units by impact and cuts them into batches; `counts` int64 [num_units]."""
    units = np.argsort(-counts, kind="stable")
    ordered = counts[units]
    totals = np.concatenate([[0], np.cumsum(ordered)])
    values = totals[: counts.size // batch_units * batch_units + 1 : batch_units].copy()
    rest_units, rest_value = counts.size % batch_units, int(totals[-1] - values[-1])
    return Group(layer, family, unit_bytes, batch_units, min_units, worth, units, values, rest_units, rest_value)


@dataclass(frozen=True)
class Problem:
    """All groups and the bytes of every tier (Eq. 6); `last_bytes` None: the slowest tier holds everything."""

    groups: tuple[Group, ...]
    fast_bytes: tuple[int, ...]
    last_bytes: int | None = None

    @property
    def least_fast_bytes(self) -> int:
        """Bytes that do not fit the slowest tier and so need a faster one, since every unit is in one tier (Eq. 3)."""
        total = sum(group.units.size * group.unit_bytes for group in self.groups)
        return 0 if self.last_bytes is None else max(0, total - self.last_bytes)


@dataclass(frozen=True)
class Choice:
    """A group's tiers: full batches per fast tier, and the remainder's tier (the number of fast tiers: slowest)."""

    counts: tuple[int, ...]
    rest_tier: int


def nowhere(problem: Problem) -> tuple[Choice, ...]:
    """Puts all units in the slowest tier."""
    tiers = len(problem.fast_bytes)
    return tuple(Choice((0,) * tiers, tiers) for _ in problem.groups)


def tiers_of(group: Group, choice: Choice) -> np.ndarray:
    """Returns int8 [num_units] by unit id: the tier's index, 0 the fastest."""
    tier = np.full(group.units.size, len(choice.counts), np.int8)
    ends = np.cumsum(choice.counts) * group.batch_units
    for number, (count, end) in enumerate(zip(choice.counts, ends.tolist(), strict=True)):
        tier[group.units[end - count * group.batch_units : end]] = number
    tier[group.units[group.units.size - group.rest_units :]] = choice.rest_tier
    return tier


def rank_of(group: Group, choice: Choice) -> np.ndarray:
    """Returns int32 [num_units]: unit ids by claim to DRAM: by tier, then falling impact, then id."""
    return group.units[np.argsort(tiers_of(group, choice)[group.units], kind="stable")].astype(np.int32)


def units_of(group: Group, choice: Choice, tier: int) -> int:
    return choice.counts[tier] * group.batch_units + (choice.rest_tier == tier) * group.rest_units


def bytes_of(group: Group, choice: Choice) -> int:
    """Counts the group's bytes in all fast tiers together."""
    return sum(units_of(group, choice, tier) for tier in range(len(choice.counts))) * group.unit_bytes


def impact_of(group: Group, choice: Choice) -> int:
    """Sums the impact of all units outside the slowest tier."""
    return int(group.values[sum(choice.counts)]) + (choice.rest_tier < len(choice.counts)) * group.rest_value


def value_of(group: Group, choice: Choice) -> int:
    """Returns the group's part of the objective (Eq. 2): impacts weighted by their tier's worth."""
    levels = np.cumsum(choice.counts).tolist()
    value = sum(gain * int(group.values[level]) for gain, level in zip(group.gains, levels, strict=True))
    return value + (*group.worth, 0)[choice.rest_tier] * group.rest_value


def without_idle(group: Group, choice: Choice) -> Choice:
    """Moves units that never fire to the slowest tier, unless a faster tier would then fall below C_l."""
    tiers = len(choice.counts)
    rest_tier = tiers if group.rest_value == 0 else choice.rest_tier
    open_busy, counts = int((np.diff(group.values) > 0).sum()), []
    for tier, count in enumerate(choice.counts):
        busy = min(open_busy, count)
        open_busy -= busy
        has_rest = choice.rest_tier == tier
        if busy == 0 and (not has_rest or group.rest_value == 0):
            counts.append(0)
            continue
        if has_rest and rest_tier != tier and count < group.first_allowed(tier, with_rest=False):
            rest_tier = tier  # without it the tier would fall below C_l
        counts.append(max(busy, min(count, group.first_allowed(tier, with_rest=rest_tier == tier))))
    return Choice(tuple(counts), rest_tier)
