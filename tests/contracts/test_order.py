"""Every heuristic in compiler/order gives a permutation, the same one each time, whatever the activations."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from runtime._plugins import load, names
from tests.support.statistics import problem_of

HEURISTICS = names("compiler.order")
ACTIVE = st.tuples(st.integers(1, 24), st.integers(1, 70)).flatmap(lambda shape: arrays(bool, shape))


def test_the_known_heuristics_are_found() -> None:
    assert {"ripple", "collapse", "frequency", "structural"} <= set(HEURISTICS)


@pytest.mark.parametrize("heuristic", HEURISTICS)
@settings(max_examples=40, deadline=None)
@given(active=ACTIVE)
def test_gives_a_permutation(heuristic: str, active: np.ndarray) -> None:
    order = load("compiler.order", heuristic).arrange(problem_of(active))
    assert order.dtype == np.int32
    assert sorted(order.tolist()) == list(range(len(active)))


@pytest.mark.parametrize("heuristic", HEURISTICS)
def test_is_deterministic_and_leaves_its_input_alone(heuristic: str) -> None:
    active = np.random.default_rng(3).random((200, 500)) < 0.2
    problem = problem_of(active)
    before = problem.bits.copy()
    arrange = load("compiler.order", heuristic).arrange
    assert arrange(problem).tobytes() == arrange(problem).tobytes()
    assert (problem.bits == before).all()
