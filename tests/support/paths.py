"""Finds the heaviest Hamiltonian path of a small graph, proven by OR-Tools CP-SAT.

It runs in another process: the wheels of OR-Tools and of highspy carry different HiGHS libraries of one name, and only
the first one loads.
"""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor


def heaviest_paths(graphs: list[list[list[int]]]) -> list[int]:
    """Returns, for each graph, the greatest sum of weights along a path through all its nodes.

    Args:
        graphs: Integer weights [n, n]; only [i][j] with i < j is read.
    """
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return list(pool.map(_heaviest_path, graphs))


def _heaviest_path(weights: list[list[int]]) -> int:
    """Solves for the heaviest circuit through one more node, whose arcs weigh nothing: without it, a path remains."""
    from ortools.sat.python import cp_model

    n, model = len(weights), cp_model.CpModel()
    arcs = [(i, j, model.new_bool_var("")) for i in range(n + 1) for j in range(n + 1) if i != j]
    model.add_circuit(arcs)
    model.maximize(sum(weights[min(i, j)][max(i, j)] * arc for i, j, arc in arcs if max(i, j) < n))
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    if solver.solve(model) != cp_model.OPTIMAL:
        raise RuntimeError(f"CP-SAT ended with {solver.status_name()} on {n} nodes")
    return round(solver.objective_value)
