"""Places whole layers, for dense runs: every token uses every unit, so all units are worth the same.

Then only layers that are not read at all save time: a layer that misses one unit still waits for its first byte. Layers
are pinned whole, from the first on, and the next one as far as it fits; no placement has a larger objective (Eq. 2),
since all counts are equal and the bytes left are too few for a unit. For a mixture whose experts are used whole this is
one candidate: some experts are used more often than others, which other placements and caches exploit.
"""

from coldpress.compiler.stages.place._problem import Choice, Group, Problem, value_of
from coldpress.compiler.stages.place._solve import Solution


def whole_layers(problem: Problem) -> Solution:
    """Pins the groups in order until the fast tier is full."""
    (room,) = problem.fast_bytes
    choices: list[Choice] = []
    for group in problem.groups:
        choice = _filled(group, room)
        room -= choice.counts[0] * group.batch_bytes + (choice.rest_tier == 0) * group.rest_bytes
        choices.append(choice)
    value = sum(map(value_of, problem.groups, choices))
    return Solution(tuple(choices), value, 0.0)


def _filled(group: Group, room: int) -> Choice:
    """Takes as many batches as fit, plus the remainder if the whole group fits; none if that is below C_l (Eq. 7)."""
    batches = min(group.num_batches, room // group.batch_bytes)
    whole = batches == group.num_batches and batches * group.batch_bytes + group.rest_bytes <= room
    has_rest = whole and group.rest_units > 0
    units = batches * group.batch_units + (group.rest_units if has_rest else 0)
    if units < group.min_units[0]:
        return Choice((0,), 1)
    return Choice((batches,), 0 if has_rest else 1)
