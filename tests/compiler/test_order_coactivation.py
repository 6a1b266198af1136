"""Co-activation counts are exact, however many threads make them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from coldpress.compiler.stages.order._task import pair_counts
from tests.support.statistics import pack

ACTIVE = st.tuples(st.integers(1, 33), st.integers(1, 200)).flatmap(lambda shape: arrays(bool, shape))


def expected_counts(active: np.ndarray) -> np.ndarray:
    """Brute force above the diagonal."""
    return np.triu(active.astype(np.int64) @ active.T.astype(np.int64), 1)


@settings(max_examples=60, deadline=None)
@given(active=ACTIVE)
def test_counts_are_what_there_is(active: np.ndarray) -> None:
    assert (np.triu(pair_counts(pack(active), active.shape[1]), 1) == expected_counts(active)).all()


@pytest.mark.slow
@pytest.mark.usefixtures("cpu")
def test_tiles_and_threads_change_nothing() -> None:
    """More than two tiles each way, none of them full, with more words than a tile looks at in one go."""
    num_units, num_tokens = 2 * 64 + 7, 64 * 512 + 100
    active = np.random.default_rng(1).random((num_units, num_tokens)) < 0.05
    found = [np.triu(pair_counts(pack(active), num_tokens, threads), 1) for threads in (1, 2, 5)]
    assert (found[0] == expected_counts(active.astype(np.float32))).all()
    assert all((other == found[0]).all() for other in found[1:])


def test_counts_that_sixteen_bits_do_not_hold() -> None:
    active = np.ones((6, 70000), bool)
    active[3, 100:] = False
    found = pair_counts(pack(active), 70000)
    assert found.dtype == np.uint32
    assert (np.triu(found, 1) == expected_counts(active)).all()
    assert found[0, 1] == 70000


@pytest.mark.parametrize(("num_tokens", "kind"), [(65535, np.uint16), (65536, np.uint32)])
def test_the_greatest_count_fits(num_tokens: int, kind: type) -> None:
    """All tokens active, at the very limit of sixteen bits."""
    found = pair_counts(pack(np.ones((3, num_tokens), bool)), num_tokens)
    assert found.dtype == kind
    assert found[0, 1] == found[1, 2] == num_tokens
