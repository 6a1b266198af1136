"""Every solver in compiler/place gives the optimum of PowerInfer's program (Eqs. 2-8), found here by enumeration."""

import itertools

import numpy as np
import pytest

from compiler.place._problem import (
    Choice,
    Problem,
    bytes_of,
    make_group,
    pinned_units,
    relax,
    shrink,
    to_choices,
    to_program,
    value_of,
)
from runtime._plugins import load, names

SOLVERS = names("compiler.place")


def problem_of(seed: int, num_groups: int, batch_units: int, slow: bool = False) -> Problem:
    """A small problem with uneven sizes, ties, idle units, remainders and binding minimums."""
    rng = np.random.default_rng(seed)
    groups = []
    for layer in range(num_groups):
        counts = rng.integers(0, 12, rng.integers(3, 7)) * rng.integers(1, 4)
        least = int(rng.integers(0, counts.size + 2))
        groups.append(make_group(layer, "neuron", counts, int(rng.integers(1, 4)) * 6, least, batch_units))
    total = sum(group.units.size * group.unit_bytes for group in groups)
    fast = int(total * rng.uniform(0.2, 0.8))
    return Problem(tuple(groups), fast, total - fast // 3 if slow else None)


def is_feasible(problem: Problem, choices: tuple[Choice, ...]) -> bool:
    used = sum(map(bytes_of, problem.groups, choices))
    sizes = [pinned_units(group, choice).size for group, choice in zip(problem.groups, choices, strict=True)]
    enough = all(size == 0 or size >= g.min_units for size, g in zip(sizes, problem.groups, strict=True))
    return enough and problem.least_fast_bytes <= used <= problem.fast_bytes


def brute_force(problem: Problem) -> int:
    """The best value over all sets of batches of all groups, in the paper's own terms: one binary per batch."""
    options = []
    for group in problem.groups:
        steps = [group.batch_units] * group.batch_values.size + [group.remainder_units] * bool(group.remainder_units)
        values = [*group.batch_values.tolist(), *([group.remainder_value] if group.remainder_units else [])]
        reached: dict[tuple[int, int], None] = {}
        for taken in itertools.product((0, 1), repeat=len(steps)):
            units = sum(n for n, a in zip(steps, taken, strict=True) if a)
            if units == 0 or units >= group.min_units:
                value = sum(v for v, a in zip(values, taken, strict=True) if a)
                reached[units * group.unit_bytes, value] = None
        options.append(list(reached))
    best = -1
    for picked in itertools.product(*options):
        if problem.least_fast_bytes <= sum(size for size, _ in picked) <= problem.fast_bytes:
            best = max(best, sum(value for _, value in picked))
    return best


def solve(problem: Problem, solver: str) -> tuple[int, tuple[Choice, ...]]:
    spans = shrink(problem, relax(problem))
    choices = to_choices(problem, spans, load("compiler.place", solver).solve(to_program(problem, spans), 0.0))
    return sum(map(value_of, problem.groups, choices)), choices


CASES = [(0, 3, 1, False), (1, 4, 2, False), (2, 3, 2, True)]


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize(("seed", "num_groups", "batch_units", "slow"), CASES)
def test_optimum_equals_enumeration(solver: str, seed: int, num_groups: int, batch_units: int, slow: bool) -> None:
    problem = problem_of(seed, num_groups, batch_units, slow)
    value, choices = solve(problem, solver)
    assert is_feasible(problem, choices)
    assert value == brute_force(problem)
    assert value > 0


@pytest.mark.parametrize("seed", range(40))
def test_shrinking_loses_no_optimum(seed: int) -> None:
    problem = problem_of(100 + seed, 3, 1 + seed % 3, slow=seed % 4 == 0)
    assert solve(problem, "pulp_highs")[0] == brute_force(problem)


def test_solvers_agree_at_scale() -> None:
    """24 groups of 4,096 units in batches of 64, half of the groups too small to be worth a synchronization."""
    rng = np.random.default_rng(5)
    groups = tuple(
        make_group(layer, "neuron", rng.integers(0, 900, 4096) // (1 + layer % 5), 768, 500 + 150 * layer, 64)
        for layer in range(24)
    )
    problem = Problem(groups, 24 * 4096 * 768 // 4)
    values = {solver: solve(problem, solver)[0] for solver in SOLVERS}
    assert len(SOLVERS) >= 2
    assert len(set(values.values())) == 1, values
