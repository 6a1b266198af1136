"""The placement of a dense run: every unit is used on every token, so any unit is worth as much as any other.

Then what counts is that layers are not read at all: a layer that misses one unit waits for a first byte. Whole layers
are pinned, the first ones first, and of the next one what still fits; no placement has a larger objective (Eq. 2),
since all counts are equal and no byte is left that a unit would fit. Of a mixture of experts that are used whole it is
a candidate: some experts are used more often than others, which other placements and caches make use of.
"""

from coldpress.compiler.stages.place._problem import Choice, Group, Problem, value_of
from coldpress.compiler.stages.place._solve import Solution


def whole_layers(problem: Problem) -> Solution:
    """All groups in order, as long as the fast tier has room."""
    (room,) = problem.fast_bytes
    choices: list[Choice] = []
    for group in problem.groups:
        choice = _filled(group, room)
        room -= choice.counts[0] * group.batch_bytes + (choice.rest_tier == 0) * group.rest_bytes
        choices.append(choice)
    value = sum(map(value_of, problem.groups, choices))
    return Solution(tuple(choices), value, 0.0)


def _filled(group: Group, room: int) -> Choice:
    """As many batches as fit, and the remainder where the whole group does; none where C_l is not reached (Eq. 7)."""
    batches = min(group.num_batches, room // group.batch_bytes)
    whole = batches == group.num_batches and batches * group.batch_bytes + group.rest_bytes <= room
    has_rest = whole and group.rest_units > 0
    units = batches * group.batch_units + (group.rest_units if has_rest else 0)
    if units < group.min_units[0]:
        return Choice((0,), 1)
    return Choice((batches,), 0 if has_rest else 1)
