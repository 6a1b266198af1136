"""Solves the placement program with OR-Tools CP-SAT: integer arithmetic throughout, one thread.

An independent check of `pulp_highs`; tests require the same objective from both. It runs in a separate process: the
wheels of OR-Tools and of highspy carry different HiGHS libraries under one name, and the second one to load fails.
"""

import functools
import multiprocessing
from concurrent.futures import ProcessPoolExecutor

from coldpress.compiler.stages.place._program import Answer, Program, Solver
from coldpress.schemas.errors import ColdpressError


class Plugin(Solver):
    """CP-SAT in a separate process."""

    def solve(self, program: Program, gap: float) -> Answer | None:
        return _process().submit(_solve, program, gap).result()


@functools.cache
def _process() -> ProcessPoolExecutor:
    """Starts the process once and keeps it: loading OR-Tools takes longer than most solutions."""
    return ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))


def _solve(program: Program, gap: float) -> Answer | None:
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    columns = [
        model.new_int_var(least, most, f"x{i}")
        for i, (least, most) in enumerate(zip(program.lower, program.upper, strict=True))
    ]
    for constraint in program.constraints:
        form = sum(columns[index] * weight for index, weight in constraint.terms)
        if constraint.least is not None:
            model.add(form >= constraint.least)
        if constraint.most is not None:
            model.add(form <= constraint.most)
    model.maximize(sum(x * value for x, value in zip(columns, program.value, strict=True)))
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    solver.parameters.linearization_level = 2  # without it the linear relaxation is too weak to prove a gap
    solver.parameters.relative_gap_limit = gap
    status = solver.solve(model)
    if status == cp_model.INFEASIBLE:
        return None
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        raise ColdpressError(f"CP-SAT found no placement (status {solver.status_name(status)}); try place=pulp_highs")
    return Answer(tuple(solver.value(x) for x in columns), solver.best_objective_bound)
