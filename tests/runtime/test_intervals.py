"""Choices that know where units lie, against all choices there are."""

import itertools
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.sparsity._intervals import best_intervals, num_reads, with_gaps


def worth(gain: np.ndarray, read: tuple[bool, ...], unit_cost: float, read_cost: float) -> float:
    """By the definition: one unit after another."""
    total, before = 0.0, False
    for value, now in zip(gain, read, strict=True):
        total += (value - unit_cost) * now - read_cost * (now and not before)
        before = now
    return total


@settings(deadline=None)
@given(st.data())
def test_no_choice_is_worth_more(data: st.DataObject) -> None:
    units = data.draw(st.integers(1, 9))
    rows = data.draw(st.lists(st.lists(st.integers(0, 8), min_size=units, max_size=units), min_size=1, max_size=3))
    unit_cost, read_cost = data.draw(st.integers(0, 6)), data.draw(st.integers(0, 12))
    gain = np.array(rows, np.float32)
    found = best_intervals(gain, unit_cost, read_cost)
    assert found.shape == gain.shape
    for row, read in zip(gain, found, strict=True):
        choices = list(itertools.product((False, True), repeat=units))
        best = max(worth(row, choice, unit_cost, read_cost) for choice in choices)
        assert worth(row, tuple(read.tolist()), unit_cost, read_cost) == best


def test_what_costs_nothing_more_is_read_along() -> None:
    gain = np.array([[5, 0, 5, 0, 0, 0, 5]], np.float32)
    assert best_intervals(gain, 1, 2).tolist() == [[True, True, True, False, False, False, True]]
    assert best_intervals(gain, 1, 100).tolist() == [[False] * 7]
    assert best_intervals(gain, 0.0, 4.9).tolist() == [[True] * 7]


def test_without_a_cost_of_reads_units_stand_alone() -> None:
    gain = np.random.default_rng(0).random((4, 50))
    np.testing.assert_array_equal(best_intervals(gain, 0.4, 0), gain > 0.4)


def test_tokens_are_decided_one_by_one() -> None:
    gain = np.random.default_rng(1).exponential(size=(6, 80)).astype(np.float32)
    together = best_intervals(gain, 0.8, 1.5)
    alone = [best_intervals(row[None], 0.8, 1.5)[0] for row in gain]
    np.testing.assert_array_equal(together, alone)


def test_time_is_linear_in_the_units() -> None:
    def seconds(units: int) -> float:
        gain = np.random.default_rng(2).exponential(size=(8, units))
        taken = []
        for _ in range(3):
            start = time.process_time()
            best_intervals(gain, 1, 2)
            taken.append(time.process_time() - start)
        return min(taken)

    assert seconds(8000) < 16 * seconds(1000), "eight times as many units, not sixty-four times the time"


@pytest.mark.parametrize(
    ("gap", "expected"),
    [(0, "0100110001"), (1, "0100110001"), (2, "0111110001"), (3, "0111111111"), (9, "0111111111")],
)
def test_what_lies_between_two_reads_is_used(gap: int, expected: str) -> None:
    wanted = np.array([[char == "1" for char in "0100110001"]])
    assert "".join("01"[int(value)] for value in with_gaps(wanted, gap)[0]) == expected


@given(st.lists(st.booleans(), min_size=1, max_size=30), st.integers(0, 6))
def test_what_is_read_is_what_the_planner_reads(row: list[bool], gap: int) -> None:
    """Pages of one unit: then reads are runs of units."""
    from runtime.planner import Strided, plan_reads

    read = with_gaps(np.array([row]), gap)
    assert not read[0].any() or any(row)
    positions = np.flatnonzero(row)
    if positions.size:
        plan = plan_reads(Strided(0, 512, 512), positions, 512, 512 * gap, 1 << 20)
        assert plan.extents.num_bytes == 512 * np.count_nonzero(read)
        assert len(plan.extents) == num_reads(read)[0]


def test_nothing_wanted_is_nothing_read() -> None:
    assert not with_gaps(np.zeros((2, 7), bool), 100).any()
    assert num_reads(np.zeros((2, 7), bool)).tolist() == [0, 0]
