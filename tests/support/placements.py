"""Solves PowerInfer's placement as the paper prints it, with OR-Tools CP-SAT: in integers throughout, on one thread.

It runs in another process: the wheels of OR-Tools and of highspy carry different HiGHS libraries of one name, and only
the first one loads.
"""

import functools
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass


@dataclass(frozen=True)
class Layer:
    """A layer's batches, their units and impacts (Eq. 1), and the least units that DRAM may hold of them (Eq. 4)."""

    units: list[int]
    impacts: list[int]
    unit_bytes: int
    min_units: int


def optimum(layers: list[Layer], dram_bytes: int) -> int:
    """Returns the greatest impact of the pinned batches (Eq. 2)."""
    return _process().submit(_optimum, layers, dram_bytes).result()


@functools.cache
def _process() -> ProcessPoolExecutor:
    """Starts the process once and keeps it: loading OR-Tools takes longer than most solutions."""
    return ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))


def _optimum(layers: list[Layer], dram_bytes: int) -> int:
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    impact, used = 0, 0
    for layer in layers:
        y = model.new_bool_var("")
        in_dram = [model.new_bool_var("") for _ in layer.units]  # a_in; Eq. 3: what is not in DRAM is on flash
        held = sum(units * a for units, a in zip(layer.units, in_dram, strict=True))
        model.add(held >= layer.min_units * y)  # Eq. 7
        model.add(held <= sum(layer.units) * y)  # Eq. 8
        impact += sum(value * a for value, a in zip(layer.impacts, in_dram, strict=True))
        used += layer.unit_bytes * held
    model.add(used <= dram_bytes)  # Eq. 6
    model.maximize(impact)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    solver.parameters.linearization_level = 2  # without it the linear relaxation is too weak to prove an optimum
    assert solver.solve(model) == cp_model.OPTIMAL
    return round(solver.objective_value)
