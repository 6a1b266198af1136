"""Solves a placement problem with the user's solver, and proves the result's distance to the optimum.

The solver gets the choices that the bound leaves open. How many depends on a solution's value, which is not known
beforehand: the search starts from a guess, and if the answer is worse than the guess, it solves again with the choices
that this answer leaves open. So every choice left out is worth less than the answer, and the solver's proof holds for
the whole problem.
"""

import math
from typing import NamedTuple

from coldpress.compiler.stages.place._bound import MARGIN, Level, find_bound, open_spans
from coldpress.compiler.stages.place._problem import Choice, Problem, nowhere, value_of, without_idle
from coldpress.compiler.stages.place._program import Solver, Tangents, first_tangents, to_program
from coldpress.schemas.errors import DoesNotFitError

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


def search(problem: Problem, solver: Solver, gap: float) -> Solution:
    """Finds a placement within the relative `gap` of the optimum.

    Raises:
        DoesNotFitError: if the tiers together do not hold the model.
    """
    bound = find_bound(problem)
    if bound.value <= 0 and not problem.least_fast_bytes:
        return Solution(nowhere(problem), 0, 0.0)
    slack, best = FIRST_SLACK * (1 + abs(bound.value)), None
    while True:
        found = _best_of(problem, open_spans(problem, bound, slack), solver, gap, bound.value)
        if found is None and slack == math.inf:
            raise DoesNotFitError(
                f"no placement keeps {problem.least_fast_bytes:,} bytes of units in tiers of "
                f"{', '.join(f'{size:,}' for size in problem.fast_bytes)} bytes; raise dram_budget"
            )
        if found is None:
            slack = slack * GROWTH if slack < abs(bound.value) else math.inf
            continue
        best = found if best is None or found.value > best.value else best._replace(bound=found.bound)
        if bound.value - best.value <= max(slack, gap * bound.value):
            break
        slack = bound.value - best.value
    # What was left out is worth less than `bound.value - slack`, and nothing is worth more than the bound.
    proven = min(max(best.bound, bound.value - slack), bound.value) + MARGIN * abs(bound.value)
    proven = max(best.value, math.floor(proven))  # impacts are integers
    return Solution(best.choices, best.value, (proven - best.value) / proven if proven > 0 else 0.0)


class _Best(NamedTuple):
    choices: tuple[Choice, ...]
    value: int
    bound: float
    """No solution within the spans is worth more."""


def _best_of(
    problem: Problem, spans: tuple[tuple[Level, ...], ...], solver: Solver, gap: float, scale: float
) -> _Best | None:
    """Finds the best placement within `spans`; adds tangents around the answers until the envelopes are exact there."""
    num_levels = sum(map(len, spans))
    tangents = first_tangents(problem, spans, max(gap, ENVELOPE_GAP) * abs(scale) / num_levels)
    best: _Best | None = None
    while True:
        placed = to_program(problem, spans, tangents)
        answer = solver.solve(placed.program, gap / 2)
        if answer is None:
            return None
        choices = placed.choices(answer)
        added = _refine(tangents, spans, choices)
        if not problem.least_fast_bytes:
            choices = tuple(map(without_idle, problem.groups, choices))
        value = sum(map(value_of, problem.groups, choices))
        bound = answer.bound if best is None else min(best.bound, answer.bound)
        best = _Best(choices, value, bound) if best is None or value > best.value else best._replace(bound=bound)
        if not added or bound - best.value <= gap * abs(bound):
            return best


def _refine(tangents: Tangents, spans: tuple[tuple[Level, ...], ...], choices: tuple[Choice, ...]) -> bool:
    added = False
    for steps_of, levels, choice in zip(tangents, spans, choices, strict=True):
        count = 0
        for steps, level, here in zip(steps_of, levels, choice.counts, strict=True):
            count += here
            near = range(max(level.low, count - 1, 0) + 1, min(level.high, count + 2) + 1)
            added |= count > 0 and not steps.issuperset(near)
            steps.update(near if count else ())
    return added
