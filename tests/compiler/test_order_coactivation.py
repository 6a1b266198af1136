"""Co-activation counts are exact, whichever way they are made and however many threads make them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from coldpress.compiler.stages.order import _coactivation
from coldpress.compiler.stages.order._coactivation import (
    dense_pair_counts,
    gpu_pair_counts,
    num_increments,
    pair_counts,
    sparse_pair_counts,
)
from coldpress.schemas.errors import ColdpressError
from tests.support.statistics import pack

WAYS = (pair_counts, dense_pair_counts, sparse_pair_counts)
ACTIVE = st.tuples(st.integers(1, 33), st.integers(1, 200)).flatmap(lambda shape: arrays(bool, shape))


def expected_counts(active: np.ndarray) -> np.ndarray:
    """Brute force above the diagonal."""
    return np.triu(active.astype(np.int64) @ active.T.astype(np.int64), 1)


@settings(max_examples=60, deadline=None)
@given(active=ACTIVE)
def test_all_ways_count_what_there_is(active: np.ndarray) -> None:
    for count in WAYS:
        assert (np.triu(count(pack(active), active.shape[1]), 1) == expected_counts(active)).all()


@pytest.mark.parametrize("count", WAYS)
def test_tiles_and_threads_change_nothing(count) -> None:
    """More than two tiles each way, none of them full, with more words than a tile looks at in one go."""
    num_units, num_tokens = 2 * _coactivation.TILE_UNITS + 7, 64 * _coactivation.TILE_WORDS + 100
    active = np.random.default_rng(1).random((num_units, num_tokens)) < 0.05
    found = [np.triu(count(pack(active), num_tokens, threads), 1) for threads in (1, 2, 5)]
    assert (found[0] == expected_counts(active.astype(np.float32))).all()
    assert all((other == found[0]).all() for other in found[1:])


@pytest.mark.slow
@pytest.mark.parametrize("count", WAYS)
def test_counts_that_sixteen_bits_do_not_hold(count) -> None:
    active = np.ones((6, 70000), bool)
    active[3, 100:] = False
    found = count(pack(active), 70000)
    assert found.dtype == np.uint32
    assert (np.triu(found, 1) == expected_counts(active)).all()
    assert found[0, 1] == 70000


@pytest.mark.parametrize("count", WAYS)
@pytest.mark.parametrize(("num_tokens", "kind"), [(65535, np.uint16), (65536, np.uint32)])
def test_the_greatest_count_fits(count, num_tokens: int, kind: type) -> None:
    """All tokens active, at the very limit of sixteen bits."""
    found = count(pack(np.ones((3, num_tokens), bool)), num_tokens)
    assert found.dtype == kind
    assert found[0, 1] == found[1, 2] == num_tokens


def test_the_cheaper_way_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[str] = []
    for name in ("dense_pair_counts", "sparse_pair_counts"):
        monkeypatch.setattr(_coactivation, name, lambda *_, name=name: taken.append(name))
    rng = np.random.default_rng(0)
    for density in (0.001, 0.5):
        pair_counts(pack(rng.random((200, 6400)) < density), 6400)
    assert taken == ["sparse_pair_counts", "dense_pair_counts"]


@settings(max_examples=30, deadline=None)
@given(active=ACTIVE)
def test_increments_are_pairs_of_a_token(active: np.ndarray) -> None:
    sizes = active.sum(axis=0)
    assert num_increments(pack(active)) == (sizes * (sizes - 1) // 2).sum()


def test_a_gpu_counts_the_same_or_is_asked_for_in_vain() -> None:
    torch = pytest.importorskip("torch")
    active = np.random.default_rng(2).random((2100, 5000)) < 0.3  # more than GPU_TOKENS of either
    if not torch.cuda.is_available():
        with pytest.raises(ColdpressError, match="counting=gpu needs a CUDA device and torch finds none; use"):
            gpu_pair_counts(pack(active), 5000)
        return
    assert (np.triu(gpu_pair_counts(pack(active), 5000), 1) == np.triu(pair_counts(pack(active), 5000), 1)).all()
