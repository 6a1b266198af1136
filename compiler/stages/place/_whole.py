"""Places whole layers, for dense runs: every token uses every unit, so all units are worth the same.

Then only layers that are not read at all save time: a layer that misses one unit still waits for its first byte. Layers
are pinned whole, from the first on, and the next one as far as it fits; no placement has a larger objective (Eq. 2),
since all counts are equal and the bytes left are too few for a unit. For a mixture whose experts are used whole this is
one candidate: some experts are used more often than others, which other placements and caches exploit.

Where the next layer's units are read ahead while a layer computes, nothing waits for a first byte. Then every layer has
as many pinned units, so that all of them read and compute for equally long.
"""

from coldpress.compiler.stages.place._problem import Choice, Group, Problem, value_of
from coldpress.compiler.stages.place._solve import Solution


def whole_layers(problem: Problem) -> Solution:
    (room,) = problem.fast_bytes
    choices: list[Choice] = []
    for group in problem.groups:
        choice = _filled(group, room)
        room -= choice.counts[0] * group.batch_bytes + (choice.rest_tier == 0) * group.rest_bytes
        choices.append(choice)
    value = sum(map(value_of, problem.groups, choices))
    return Solution(tuple(choices), value, 0.0)


def evenly(problem: Problem) -> Solution:
    """Pins as many units in each group, with an equal share of the fast tier for each."""
    (room,), count = problem.fast_bytes, len(problem.groups)
    choices: list[Choice] = []
    used = 0
    for number, group in enumerate(problem.groups):
        batches, has_rest = _fitting(group, room * (number + 1) // count - used)
        used += batches * group.batch_bytes + has_rest * group.rest_bytes
        choices.append(Choice((batches,), 0 if has_rest else 1))
    return Solution(tuple(choices), sum(map(value_of, problem.groups, choices)), 0.0)


def _filled(group: Group, room: int) -> Choice:
    """Takes as many batches as fit, plus the remainder if the whole group fits; none if that is below C_l (Eq. 7)."""
    batches, has_rest = _fitting(group, room)
    units = batches * group.batch_units + (group.rest_units if has_rest else 0)
    if units < group.min_units[0]:
        return Choice((0,), 1)
    return Choice((batches,), 0 if has_rest else 1)


def _fitting(group: Group, room: int) -> tuple[int, bool]:
    """Returns how many batches fit, and whether they are all and the remainder fits, too."""
    batches = min(group.num_batches, room // group.batch_bytes)
    whole = batches == group.num_batches and batches * group.batch_bytes + group.rest_bytes <= room
    return batches, whole and group.rest_units > 0
