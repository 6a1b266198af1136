"""The placement program (PowerInfer Eqs. 2-8) with OR-Tools CP-SAT: integer arithmetic throughout, one thread.

A second opinion on `pulp_highs`, from a solver that shares nothing with it; tests hold them to the same objective.
It runs in a process of its own: the wheels of OR-Tools and of highspy carry different HiGHS libraries of one name, and
whichever is loaded second fails.
"""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

from compiler.place._problem import Answer, Program
from schemas.errors import ColdpressError


def solve(program: Program, gap: float) -> Answer:
    """An answer whose value is within the relative `gap` of the optimum.

    Raises:
        ColdpressError: if the program has no solution or the solver fails.
    """
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        return process.submit(_solve, program, gap).result()


def _solve(program: Program, gap: float) -> Answer:
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    on: list[cp_model.IntVar] = []
    chosen: list[list[cp_model.IntVar]] = []
    value, size = [], []
    for number, row in enumerate(program.rows):
        y = model.new_int_var(0 if row.may_be_off else 1, 1, f"y_{number}")
        a = [model.new_int_var(0, column.upper, f"a_{number}_{i}") for i, column in enumerate(row.columns)]
        units = sum(x * column.units for x, column in zip(a, row.columns, strict=True))
        model.add(units + (row.base_units - row.min_units) * y >= 0)  # Eq. 7
        if row.may_be_off:
            for x, column in zip(a, row.columns, strict=True):
                model.add(x <= column.upper * y)  # Eq. 8
        value += [row.base_value * y, *(x * column.value for x, column in zip(a, row.columns, strict=True))]
        size += [row.base_size * y, *(x * column.size for x, column in zip(a, row.columns, strict=True))]
        on.append(y)
        chosen.append(a)
    model.add(sum(size) <= program.most_size)  # Eq. 6
    model.add(sum(size) >= program.least_size)  # Eq. 6 of the slow tier, with Eq. 3
    model.maximize(sum(value))  # Eq. 2
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    solver.parameters.relative_gap_limit = gap
    status = solver.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        raise ColdpressError(f"CP-SAT found no placement (status {solver.status_name(status)}); try place=pulp_highs")
    return Answer(
        tuple(solver.value(y) == 1 for y in on),
        tuple(tuple(solver.value(x) for x in a) for a in chosen),
        solver.best_objective_bound,
    )
