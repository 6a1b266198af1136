"""`place` finds the optimum of PowerInfer's program (Eqs. 2-8), found here by enumeration, and by another solver from
the paper's own variables."""

import itertools

import numpy as np
import pytest

from coldpress.compiler.stages.place._program import (
    Group,
    Problem,
    UnitChoice,
    bytes_of,
    is_pinned,
    make_group,
    search,
    units_of,
    value_of,
)
from tests.support.placements import Layer, optimum


def problem_of(seed: int, num_groups: int, batch_units: int) -> Problem:
    """A small problem with uneven sizes, ties, idle units, remainders and binding minimums."""
    rng = np.random.default_rng(seed)
    groups = []
    for layer in range(num_groups):
        counts = rng.integers(0, 12, rng.integers(3, 7)) * rng.integers(1, 4)
        least = int(rng.integers(0, counts.size + 2))
        size = int(rng.integers(1, 4)) * 6
        groups.append(make_group(layer, "neuron", counts, size, least, batch_units))
    total = sum(group.units.size * group.unit_bytes for group in groups)
    return Problem(tuple(groups), int(total * rng.uniform(0.2, 0.8)))


def batches_of(group: Group) -> list[tuple[int, int]]:
    """(units, impact) of every batch, the remainder last."""
    full = [(group.batch_units, int(value)) for value in np.diff(group.values)]
    return [*full, *([(group.rest_units, group.rest_value)] if group.rest_units else [])]


def is_feasible(problem: Problem, choices: tuple[UnitChoice, ...]) -> bool:
    """Eqs. 6 and 7, from single units."""
    used = 0
    for group, choice in zip(problem.groups, choices, strict=True):
        held = int(is_pinned(group, choice).sum())
        assert held == units_of(group, choice)
        assert held * group.unit_bytes == bytes_of(group, choice)
        if 0 < held < group.min_units:
            return False
        used += held * group.unit_bytes
    return used <= problem.dram_bytes


def brute_force(problem: Problem) -> int:
    """The best value in the paper's own terms: every batch of every group in DRAM or on flash."""
    reached = {0: 0}
    for group in problem.groups:
        options: dict[int, int] = {}
        for pinned in itertools.product((False, True), repeat=len(batches_of(group))):
            chosen = [batch for batch, is_in in zip(batches_of(group), pinned, strict=True) if is_in]
            held, value = (sum(part) for part in zip((0, 0), *chosen, strict=True))
            if held == 0 or held >= group.min_units:
                size = held * group.unit_bytes
                options[size] = max(value, options.get(size, 0))
        merged: dict[int, int] = {}
        for (used, value), (size, more) in itertools.product(reached.items(), options.items()):
            if used + size <= problem.dram_bytes:
                merged[used + size] = max(value + more, merged.get(used + size, 0))
        reached = merged
    return max(reached.values())


@pytest.mark.parametrize("seed", range(60))
def test_counts_and_fixing_lose_no_optimum(seed: int) -> None:
    """One integer per group, bounds and envelopes instead of one binary per batch."""
    problem = problem_of(seed, 3 + seed % 2, 1 + seed % 3)
    solution = search(problem, 0.0)
    assert is_feasible(problem, solution.choices)
    assert sum(map(value_of, problem.groups, solution.choices)) == solution.value == brute_force(problem)
    assert solution.gap == 0.0


def as_printed(problem: Problem) -> int:
    """Eqs. 2-8 as they are printed: a binary per batch, one y per group, a big K."""
    layers = []
    for group in problem.groups:
        units, impacts = (list(part) for part in zip(*batches_of(group), strict=True))
        layers.append(Layer(units, impacts, group.unit_bytes, group.min_units))
    return optimum(layers, problem.dram_bytes)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_the_printed_program_has_the_same_optimum(seed: int) -> None:
    """10 layers of 1,700 units with skews of their own, half of them worth a synchronization only as a whole."""
    rng = np.random.default_rng(seed)
    ranks = np.arange(1, 1701)
    counts = [(4000 * (20 / (20 + ranks)) ** rng.uniform(0.3, 1.5)).astype(int) for _ in range(10)]
    groups = tuple(
        make_group(layer, "neuron", values, 768, 150 + 130 * layer, 64) for layer, values in enumerate(counts)
    )
    problem = Problem(groups, 17000 * 768 // 5)
    solution = search(problem, 0.0)
    assert solution.value == as_printed(problem)
    assert solution.gap == 0.0
    assert any(units_of(*pair) > 0 for pair in zip(groups, solution.choices, strict=True))
    assert any(units_of(*pair) == 0 for pair in zip(groups, solution.choices, strict=True))


def wide() -> Problem:
    """24 groups of 4,096 units in batches of 64, half of the groups too small to be worth a synchronization."""
    rng = np.random.default_rng(5)
    groups = tuple(
        make_group(layer, "neuron", rng.integers(0, 900, 4096) // (1 + layer % 5), 768, 500 + 150 * layer, 64)
        for layer in range(24)
    )
    return Problem(groups, 24 * 4096 * 768 // 4)


def test_the_solvers_agree_at_scale() -> None:
    solution = search(wide(), 0.0)
    assert solution.value == as_printed(wide())
    assert solution.gap == 0.0


def test_a_wide_gap_is_kept() -> None:
    """What is proven must hold against a better answer."""
    near, exact = search(wide(), 1e-2), search(wide(), 0.0)
    assert is_feasible(wide(), near.choices)
    assert near.gap <= 1e-2
    assert near.value <= exact.value <= near.value / (1 - near.gap) * (1 + 1e-6)
