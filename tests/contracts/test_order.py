"""Every heuristic in compiler/stages/order gives a permutation, the same one each time, whatever the activations.

Of one layer or of a group, and it says whose order that is and how much memory it takes.
"""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from coldpress.compiler.stages.order._task import Heuristic
from coldpress.runtime.plugins import load, names
from tests.support.statistics import device_of, task_of

HEURISTICS = names("coldpress.compiler.stages.order")
ACTIVE = st.tuples(st.integers(1, 3), st.integers(1, 24), st.integers(1, 70)).flatmap(lambda shape: arrays(bool, shape))


def test_the_known_heuristics_are_found() -> None:
    assert {"ripple", "misses", "frequency", "structural"} <= set(HEURISTICS)


@pytest.mark.parametrize("heuristic", HEURISTICS)
@settings(max_examples=40, deadline=None)
@given(active=ACTIVE)
def test_gives_a_permutation(heuristic: str, active: np.ndarray) -> None:
    order, chosen = load("coldpress.compiler.stages.order", Heuristic, heuristic).arrange(task_of(active))
    assert order.dtype == np.int32
    assert sorted(order.tolist()) == list(range(active.shape[1]))
    assert chosen in HEURISTICS
    assert chosen == heuristic or heuristic == "auto"


@pytest.mark.parametrize("heuristic", HEURISTICS)
def test_holds_no_more_squares_than_it_says(heuristic: str) -> None:
    """Of pair counts or weights (2 bytes a pair); beside them a run of sorted pairs (8 bytes each), and a little."""
    num_units = 1200
    active = np.random.default_rng(0).random((num_units, 512)) < 0.1
    task = task_of(active, (5, 6), flash=device_of(latency_s=1e-6).flash)
    plugin = load("coldpress.compiler.stages.order", Heuristic, heuristic)
    tracemalloc.start()
    plugin.arrange(task)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    square_bytes = 2 * num_units**2
    sorted_bytes = 8 * num_units**2 // 2 if plugin.COUNT_SQUARES else 0
    assert peak_bytes <= (plugin.COUNT_SQUARES + 0.3) * square_bytes + sorted_bytes


@pytest.mark.parametrize("heuristic", HEURISTICS)
def test_is_deterministic_and_leaves_its_input_alone(heuristic: str) -> None:
    active = np.random.default_rng(3).random((200, 500)) < 0.2
    task = task_of(active)
    before = task.activity.bits.copy()
    arrange = load("coldpress.compiler.stages.order", Heuristic, heuristic).arrange
    assert arrange(task).order.tobytes() == arrange(task).order.tobytes()
    assert (task.activity.bits == before).all()
