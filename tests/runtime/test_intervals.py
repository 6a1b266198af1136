"""Choices that know where units lie, against all choices there are."""

import itertools
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from coldpress.runtime import _native
from coldpress.runtime.kernels.intervals import STEPS, Times, best_intervals
from tests.support import reference_kernels


def reads_of(read: tuple[bool, ...]) -> int:
    """How many intervals there are, one unit after another."""
    return sum(now and not before for before, now in itertools.pairwise((False, *read)))


def at(gain: np.ndarray, unit_cost: float, read_cost: float) -> np.ndarray:
    return reference_kernels.intervals_at(
        gain, np.full(len(gain), float(unit_cost)), np.full(len(gain), float(read_cost))
    )


@settings(deadline=None)
@given(st.data())
def test_no_choice_is_worth_more_where_costs_add_up(data: st.DataObject) -> None:
    units = data.draw(st.integers(1, 9))
    rows = data.draw(st.lists(st.lists(st.integers(0, 8), min_size=units, max_size=units), min_size=1, max_size=3))
    unit_cost, read_cost = data.draw(st.integers(0, 6)), data.draw(st.integers(0, 12))
    gain = np.array(rows, np.float32)

    def worth(row: np.ndarray, read: tuple[bool, ...]) -> float:
        return float(row[list(read)].sum()) - unit_cost * sum(read) - read_cost * reads_of(read)

    found = at(gain, unit_cost, read_cost)
    assert found.shape == gain.shape
    for row, read in zip(gain, found, strict=True):
        best = max(worth(row, choice) for choice in itertools.product((False, True), repeat=units))
        assert worth(row, tuple(read.tolist())) == best


def test_what_costs_nothing_more_is_read_along() -> None:
    gain = np.array([[5, 0, 5, 0, 0, 0, 5]], np.float32)
    assert at(gain, 1, 2).tolist() == [[True, True, True, False, False, False, True]]
    assert at(gain, 1, 100).tolist() == [[False] * 7]
    assert at(gain, 0.0, 4.9).tolist() == [[True] * 7]


def test_without_a_cost_of_reads_units_stand_alone() -> None:
    gain = np.random.default_rng(0).random((4, 50)).astype(np.float32)
    np.testing.assert_array_equal(at(gain, 0.4, 0), gain > 0.4)


def test_the_larger_bound_counts() -> None:
    """Nine units, three of which matter. A read takes as long as three units: three reads of one are no faster than
    the nine, so all nine are read; with seven units a read of each, one read of all is the fastest by far."""
    gain = np.array([[8, 0, 0, 0, 8, 0, 0, 0, 8]], np.float32)
    assert best_intervals(gain, 1, Times(3, 0, 0)).sum() in (3, 9)
    assert best_intervals(gain, 1, Times(7, 0, 0)).all()
    assert best_intervals(gain, 1, Times(0.5, 0, 0)).tolist() == (gain > 0).tolist()
    assert not best_intervals(gain, 9, Times(7, 0, 0)).any()


def test_what_the_first_byte_takes_is_used_up() -> None:
    """A request takes as long as six units at least: two reads of one and then a third and a fourth cost nothing more,
    a fifth what it takes; without that time only the two are worth their price."""
    gain = np.array([[9, 0, 0, 1.0, 0, 0, 8, 0, 0, 1.2, 0, 0, 0.9]], np.float32)
    assert np.flatnonzero(best_intervals(gain, 4, Times(1.5, 0, 0))).tolist() == [0, 6]
    assert np.flatnonzero(best_intervals(gain, 4, Times(1.5, 0, 6))).tolist() == [0, 3, 6, 9]
    assert np.flatnonzero(best_intervals(gain, 100, Times(1.5, 0, 1.6))).tolist() == [0], "it is paid anyway"


@pytest.mark.parametrize("overlap", [0.0, 0.3, 0.75, 1.0])
@pytest.mark.parametrize("most_least", [0.0, 8.0])
def test_choices_under_all_bounds_are_nearly_the_best(most_least: float, overlap: float) -> None:
    """The dual closes in on the best but for what one read more or less is worth."""
    random = np.random.default_rng(5)
    choices = list(itertools.product((False, True), repeat=10))
    masks = np.array(choices)
    reads = np.array([reads_of(choice) for choice in choices])
    found_worth, best_worth = 0.0, 0.0
    for _ in range(60):
        gain = random.exponential(size=(1, 10)).astype(np.float32)
        price, own, edge = random.uniform(0.1, 1), random.uniform(0, 5), random.uniform(0, 1)
        least = random.uniform(0, most_least)
        bounds = np.stack([np.full(len(masks), least), reads * own, masks.sum(axis=1) + reads * edge])
        time = bounds.max(axis=0) if overlap == 1 else (bounds ** (1 / (1 - overlap))).sum(axis=0) ** (1 - overlap)
        worths = masks @ gain[0] - price * (time - least)
        found = tuple(best_intervals(gain, price, Times(own, edge, least, overlap))[0].tolist())
        worth = worths[choices.index(found)]
        assert worth >= -1e-9
        found_worth, best_worth = found_worth + worth, best_worth + worths.max()
    assert found_worth > 0.95 * best_worth


def test_time_is_linear_in_the_units() -> None:
    def seconds(units: int) -> float:
        gain = np.random.default_rng(2).exponential(size=(8, units)).astype(np.float32)
        taken = []
        for _ in range(3):
            start = time.process_time()
            best_intervals(gain, 1, Times(2, 0, 0))
            taken.append(time.process_time() - start)
        return min(taken)

    assert seconds(40000) < 16 * seconds(5000), "eight times as many units, not sixty-four times the time"


@settings(deadline=None)
@given(st.data())
def test_the_native_choice_is_the_one_in_numpy(data: st.DataObject) -> None:
    shape = data.draw(st.tuples(st.integers(1, 4), st.integers(1, 70)))
    gain = data.draw(arrays(np.float32, shape, elements=st.floats(0, 9, width=32)))
    price, own, edge = data.draw(st.floats(0, 9)), data.draw(st.floats(0, 30)), data.draw(st.floats(-3, 3))
    times = Times(own, edge, data.draw(st.sampled_from([0, 0.5, 4, 30])), data.draw(st.sampled_from([0.0, 1.0])))
    expected = reference_kernels.best_intervals(gain, price, times)
    np.testing.assert_array_equal(best_intervals(gain, price, times), expected)


@settings(deadline=None)
@given(st.data())
def test_between_maximum_and_sum_the_native_choice_is_worth_as_much(data: st.DataObject) -> None:
    """Powers may differ in their last bit, and so may the choice among equals."""
    gain = data.draw(arrays(np.float32, (3, 40), elements=st.floats(0, 9, width=32)))
    price, own, edge = data.draw(st.floats(0.01, 9)), data.draw(st.floats(0, 30)), data.draw(st.floats(0, 3))
    times = Times(own, edge, 0, data.draw(st.floats(0.05, 0.95)))
    power = 1 / (1 - times.overlap)

    def worth(row: np.ndarray, read: np.ndarray) -> float:
        reads = reads_of(tuple(read.tolist()))
        bounds = (reads * own, read.sum() + reads * edge)
        return float(row[read].sum()) - price * float(sum(bound**power for bound in bounds)) ** (1 / power)

    both = zip(
        gain, best_intervals(gain, price, times), reference_kernels.best_intervals(gain, price, times), strict=True
    )
    for row, native, reference in both:
        assert worth(row, native) == pytest.approx(worth(row, reference), abs=1e-3)


@pytest.mark.parametrize("price", [5e-324, 2.2e-311, 1e-200])
def test_a_price_of_next_to_nothing_is_one(price: float) -> None:
    gain, times = np.array([[1, 0, 2]], np.float32), Times(0, 0, 4)
    expected = reference_kernels.best_intervals(gain, price, times)
    np.testing.assert_array_equal(best_intervals(gain, price, times), expected)
    assert expected[0, [0, 2]].all()


def test_nothing_is_chosen_of_no_units_or_tokens() -> None:
    assert best_intervals(np.zeros((0, 7), np.float32), 1, Times(1, 0, 1)).shape == (0, 7)
    assert best_intervals(np.zeros((2, 0), np.float32), 1, Times(1, 0, 1)).shape == (2, 0)


def test_arguments_of_another_kind_are_refused() -> None:
    with pytest.raises(TypeError):
        best_intervals(np.zeros((2, 7)), 1, Times(1, 0, 0))
    gain = np.zeros((2, 7), np.float32)
    with pytest.raises(ValueError, match="gain and chosen differ in shape at axis 1"):
        _native.best_intervals(gain, 1, 1, 0, 1, STEPS, np.zeros((2, 8), bool))
    with pytest.raises(ValueError, match="steps is 0, expected 1 to 64"):
        _native.best_intervals(gain, 1, 1, 0, 1, 0, np.zeros((2, 7), bool))
    with pytest.raises(ValueError, match="overlap is 2"):
        _native.best_intervals(gain, 1, 1, 0, 2, STEPS, np.zeros((2, 7), bool))
