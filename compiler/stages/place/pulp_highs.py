"""Solves the placement program with HiGHS through PuLP, on one thread.

The search ends at a relative gap, never at a time limit, so the same program always has the same answer.
"""

from typing import Any

from coldpress.compiler.stages.place._program import Answer, Program, Solver
from coldpress.schemas.errors import ColdpressError

LARGEST_VALUE = 1e5
"""Objective coefficients are scaled down to this: HiGHS's absolute tolerances suit values of this size."""


class Plugin(Solver):
    """HiGHS through PuLP."""

    def solve(self, program: Program, gap: float) -> Answer | None:
        import pulp  # imported late: it loads highspy, which clashes with OR-Tools (see cp_sat)

        model = pulp.LpProblem("placement", pulp.LpMaximize)
        columns = [
            pulp.LpVariable(f"x{i}", least, most, pulp.LpInteger)
            for i, (least, most) in enumerate(zip(program.lower, program.upper, strict=True))
        ]
        for constraint in program.constraints:
            form = pulp.LpAffineExpression([(columns[index], weight) for index, weight in constraint.terms])
            if constraint.least is not None:
                model += form >= constraint.least
            if constraint.most is not None:
                model += form <= constraint.most
        scale = max(1.0, max(program.value) / LARGEST_VALUE)
        model.setObjective(
            pulp.LpAffineExpression([(x, value / scale) for x, value in zip(columns, program.value, strict=True)])
        )
        options = {"random_seed": 0, "mip_feasibility_tolerance": 1e-9}
        model.solve(pulp.HiGHS(msg=False, threads=1, gapRel=gap, gapAbs=0.5 / scale, **options))
        if model.status == pulp.LpStatusInfeasible:
            return None
        if model.sol_status not in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible):
            raise ColdpressError(f"HiGHS found no placement (status {pulp.LpStatus[model.status]}); try place=cp_sat")
        highs: Any = model.solverModel
        return Answer(tuple(round(x.varValue or 0) for x in columns), -highs.getInfo().mip_dual_bound * scale)
