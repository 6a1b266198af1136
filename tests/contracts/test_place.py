"""Every solver in compiler/stages/place gives the optimum of PowerInfer's program (Eqs. 2-8), found here by
enumeration."""

import itertools

import numpy as np
import pytest

from coldpress.compiler.stages.place._problem import (
    Choice,
    Group,
    Problem,
    bytes_of,
    make_group,
    tiers_of,
    units_of,
    value_of,
)
from coldpress.compiler.stages.place._program import Program, Solver
from coldpress.compiler.stages.place._solve import Solution, search
from coldpress.runtime.plugins import load, names

SOLVERS = names("coldpress.compiler.stages.place")


def problem_of(seed: int, num_groups: int, batch_units: int, num_fast: int = 1, bounded: bool = False) -> Problem:
    """A small problem with uneven sizes, ties, idle units, remainders and binding minimums."""
    rng = np.random.default_rng(seed)
    groups = []
    for layer in range(num_groups):
        counts = rng.integers(0, 12, rng.integers(3, 7)) * rng.integers(1, 4)
        least = tuple(rng.integers(0, counts.size + 2, num_fast).tolist())
        worth = tuple(np.sort(rng.integers(1, 9, num_fast))[::-1].tolist()) if num_fast > 1 else (1,)
        size = int(rng.integers(1, 4)) * 6
        groups.append(make_group(layer, "neuron", counts, size, least, batch_units, worth))
    total = sum(group.units.size * group.unit_bytes for group in groups)
    fast = tuple(int(total * rng.uniform(0.2, 0.8) / num_fast) for _ in range(num_fast))
    return Problem(tuple(groups), fast, total - sum(fast) // 3 if bounded else None)


def batches_of(group: Group) -> list[tuple[int, int]]:
    """(units, impact) of every batch, the remainder last."""
    full = [(group.batch_units, int(value)) for value in np.diff(group.values)]
    return [*full, *([(group.rest_units, group.rest_value)] if group.rest_units else [])]


def is_feasible(problem: Problem, choices: tuple[Choice, ...]) -> bool:
    """Eqs. 3, 6 and 7, from the tiers of single units."""
    used = np.zeros(len(problem.fast_bytes) + 1, int)
    for group, choice in zip(problem.groups, choices, strict=True):
        held = np.bincount(tiers_of(group, choice), minlength=used.size)
        used += held * group.unit_bytes
        if any(0 < count < least for count, least in zip(held[:-1], group.min_units, strict=True)):
            return False
        assert held[:-1].tolist() == [units_of(group, choice, tier) for tier in range(used.size - 1)]
        assert held[:-1].sum() * group.unit_bytes == bytes_of(group, choice)
    limits = [*problem.fast_bytes, np.inf if problem.last_bytes is None else problem.last_bytes]
    return bool((used <= limits).all())


def brute_force(problem: Problem) -> int:
    """The best value in the paper's own terms: every batch of every group in any of the tiers; -1: there is none."""
    fast = len(problem.fast_bytes)
    reached: dict[tuple[int, ...], int] = {(0,) * fast: 0}
    for group in problem.groups:
        options: dict[tuple[int, ...], int] = {}
        for tiers in itertools.product(range(fast + 1), repeat=len(batches_of(group))):
            held = [0] * fast
            value = 0
            for tier, (units, impact) in zip(tiers, batches_of(group), strict=True):
                if tier < fast:
                    held[tier] += units
                    value += group.worth[tier] * impact
            if all(n == 0 or n >= least for n, least in zip(held, group.min_units, strict=True)):
                key = tuple(n * group.unit_bytes for n in held)
                options[key] = max(value, options.get(key, 0))
        merged: dict[tuple[int, ...], int] = {}
        for used, value in reached.items():
            for size, more in options.items():
                key = tuple(a + b for a, b in zip(used, size, strict=True))
                if all(n <= limit for n, limit in zip(key, problem.fast_bytes, strict=True)):
                    merged[key] = max(value + more, merged.get(key, 0))
        reached = merged
    return max((value for used, value in reached.items() if sum(used) >= problem.least_fast_bytes), default=-1)


def solve(problem: Problem, solver: str, gap: float = 0.0) -> Solution:
    return search(problem, load("coldpress.compiler.stages.place", Solver, solver), gap)


CASES = [(0, 3, 1, 1, False), (1, 4, 2, 1, False), (2, 3, 2, 1, True), (3, 3, 1, 2, False), (4, 2, 2, 3, False)]


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize(("seed", "num_groups", "batch_units", "num_fast", "bounded"), CASES)
def test_optimum_equals_enumeration(
    solver: str, seed: int, num_groups: int, batch_units: int, num_fast: int, bounded: bool
) -> None:
    problem = problem_of(seed, num_groups, batch_units, num_fast, bounded)
    solution = solve(problem, solver)
    assert is_feasible(problem, solution.choices)
    assert sum(map(value_of, problem.groups, solution.choices)) == solution.value == brute_force(problem) > 0
    assert solution.gap == 0.0


@pytest.mark.parametrize("seed", range(60))
def test_counts_and_fixing_lose_no_optimum(seed: int) -> None:
    """One integer per group and tier, bounds and envelopes instead of one binary per batch and tier."""
    problem = problem_of(100 + seed, 3, 1 + seed % 3, 1 + seed % 2, bounded=seed % 4 == 0)
    if (best := brute_force(problem)) >= 0:
        solution = solve(problem, "pulp_highs")
        assert solution.value == best
        assert solution.gap == 0.0


def plain_program(problem: Problem) -> Program:
    """Eqs. 2-8 as they are printed: a binary per batch, one y per group, a big K."""
    program, size = Program(), []
    for group in problem.groups:
        y = program.column(1)
        units = []
        for number, impact in batches_of(group):
            units.append((program.column(1, impact), number))
        program.require([*units, (y, -group.min_units[0])], least=0)  # Eq. 7
        program.require([*units, (y, -group.units.size)], most=0)  # Eq. 8
        size += [(index, number * group.unit_bytes) for index, number in units]
    program.require(size, most=problem.fast_bytes[0])  # Eq. 6
    return program


@pytest.mark.parametrize("seed", range(3))
def test_the_plain_program_has_the_same_optimum(seed: int) -> None:
    """10 layers of 1,700 units with skews of their own, half of them worth a synchronization only as a whole."""
    rng = np.random.default_rng(seed)
    ranks = np.arange(1, 1701)
    counts = [(4000 * (20 / (20 + ranks)) ** rng.uniform(0.3, 1.5)).astype(int) for _ in range(10)]
    groups = tuple(
        make_group(layer, "neuron", values, 768, (150 + 130 * layer,), 64) for layer, values in enumerate(counts)
    )
    problem = Problem(groups, (17000 * 768 // 5,))
    answer = load("coldpress.compiler.stages.place", Solver, "pulp_highs").solve(plain_program(problem), 0.0)
    by_batch = sum(value * x for value, x in zip(plain_program(problem).value, answer.columns, strict=True))
    solution = solve(problem, "pulp_highs")
    assert solution.value == by_batch
    assert any(units_of(*pair, 0) > 0 for pair in zip(groups, solution.choices, strict=True))
    assert any(units_of(*pair, 0) == 0 for pair in zip(groups, solution.choices, strict=True))


def test_solvers_agree_at_scale() -> None:
    """24 groups of 4,096 units in batches of 64, half of the groups too small to be worth a synchronization."""
    rng = np.random.default_rng(5)
    groups = tuple(
        make_group(layer, "neuron", rng.integers(0, 900, 4096) // (1 + layer % 5), 768, (500 + 150 * layer,), 64)
        for layer in range(24)
    )
    problem = Problem(groups, (24 * 4096 * 768 // 4,))
    found = {solver: solve(problem, solver) for solver in SOLVERS}
    assert len(SOLVERS) >= 2
    assert len({solution.value for solution in found.values()}) == 1, found
    assert all(solution.gap == 0.0 for solution in found.values())


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_wide_gap_is_kept(solver: str) -> None:
    """Three tiers; what is proven must hold against the other solver's better answer."""
    rng = np.random.default_rng(8)
    groups = tuple(
        make_group(layer, "neuron", rng.integers(0, 4000, 1500), 768, (300 + 40 * layer, 100), 64, (10_000, 9_800))
        for layer in range(8)
    )
    total = 8 * 1500 * 768
    problem = Problem(groups, (total // 10, total // 5))
    near, exact = solve(problem, solver, 1e-2), solve(problem, "pulp_highs", 1e-6)
    assert is_feasible(problem, near.choices)
    assert near.gap <= 1e-2
    assert near.value <= exact.value / (1 - exact.gap) <= near.value / (1 - near.gap) * (1 + 1e-6)
