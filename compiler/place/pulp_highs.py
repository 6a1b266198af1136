"""The placement program (PowerInfer Eqs. 2-8) through PuLP with HiGHS, on one thread.

Reads a `Program`; returns values and a proven bound. The search ends at a relative gap, never at a time limit, so the
same program always has the same answer.
"""

from typing import Any

from compiler.place._problem import Answer, Program
from schemas.errors import ColdpressError


def solve(program: Program, gap: float) -> Answer:
    """An answer whose value is within the relative `gap` of the optimum.

    Raises:
        ColdpressError: if the program has no solution or the solver fails.
    """
    import pulp  # here, since it loads highspy: see cp_sat

    model = pulp.LpProblem("placement", pulp.LpMaximize)
    on: list[Any] = []
    chosen: list[list[Any]] = []
    objective, size = [], []
    for number, row in enumerate(program.rows):
        y = pulp.LpVariable(f"y_{number}", 0 if row.may_be_off else 1, 1, pulp.LpInteger)
        a = [pulp.LpVariable(f"a_{number}_{i}", 0, col.upper, pulp.LpInteger) for i, col in enumerate(row.columns)]
        units = [(y, row.base_units - row.min_units), *((x, col.units) for x, col in zip(a, row.columns, strict=True))]
        model += pulp.LpAffineExpression(units) >= 0  # Eq. 7
        if row.may_be_off:  # Eq. 8, column by column: the smallest K there is
            for x, col in zip(a, row.columns, strict=True):
                model += pulp.LpAffineExpression([(x, 1), (y, -col.upper)]) <= 0
        objective += [(y, row.base_value), *((x, col.value) for x, col in zip(a, row.columns, strict=True))]
        size += [(y, row.base_size), *((x, col.size) for x, col in zip(a, row.columns, strict=True))]
        on.append(y)
        chosen.append(a)
    model += pulp.LpAffineExpression(size) <= program.most_size  # Eq. 6
    model += pulp.LpAffineExpression(size) >= program.least_size  # Eq. 6 of the slow tier, with Eq. 3
    model.setObjective(pulp.LpAffineExpression(objective))  # Eq. 2
    model.solve(pulp.HiGHS(msg=False, threads=1, gapRel=gap, gapAbs=0.5, random_seed=0, mip_feasibility_tolerance=1e-9))
    if model.sol_status not in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible):
        raise ColdpressError(f"HiGHS found no placement (status {pulp.LpStatus[model.status]}); try place=cp_sat")
    highs: Any = model.solverModel
    return Answer(
        on=tuple(round(y.varValue) == 1 for y in on),
        columns=tuple(tuple(round(x.varValue) for x in a) for a in chosen),
        bound=-highs.getInfo().mip_dual_bound,
    )
