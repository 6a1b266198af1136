"""The loops that count signals, against plain numpy and the runtime's own selector."""

import numpy as np
import pytest

from coldpress.compiler.activity.packed_bits import population
from coldpress.compiler.activity.signals import magnitude_edges, magnitude_histogram, pack_nonzero, shared_top
from coldpress.runtime.sparsity import topk
from tests.support.methods import nothing_cached


def signals(tokens: int, units: int, zeros: float, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    values = rng.normal(size=(tokens, units)).astype(np.float32)
    return np.where(rng.random((tokens, units)) < zeros, np.float32(-0.0), values)


def as_bfloat16(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(bits uint16, the same values as float32)."""
    bits = (values.view(np.uint32) >> 16).astype(np.uint16)
    return bits, (bits.astype(np.uint32) << 16).view(np.float32)


def test_histogram_bins_are_what_the_edges_say() -> None:
    edges = magnitude_edges()
    assert edges.dtype == np.float32
    assert (np.diff(edges.astype(np.float64)) > 0).all()
    assert edges[1] == 2.0**-24
    assert edges[-2] == 2.0**16
    rng = np.random.default_rng(0)
    values = (rng.normal(size=5000) * 10.0 ** rng.uniform(-9, 6, 5000)).astype(np.float32)
    values = np.concatenate([values, [0, -0.0, 2**-24, -(2**16), 3e38], edges[1:-1]]).astype(np.float32)
    expected = np.histogram(np.abs(values), edges)[0]
    assert np.array_equal(magnitude_histogram(values.view(np.uint32)), expected)
    ratio = edges[2:-1] / edges[1:-2]
    assert ratio.max() <= 1 + 1 / 32


def test_bfloat16_falls_into_the_same_bins() -> None:
    bits, values = as_bfloat16(signals(40, 50, 0.5) * np.float32(1e-5))
    assert np.array_equal(magnitude_histogram(bits), magnitude_histogram(values.view(np.uint32)))
    assert magnitude_histogram(bits)[0] > 900  # the zeros, and what is below 2**-24


@pytest.mark.parametrize("tokens", [1, 8, 21, 64])
def test_bits_of_what_is_not_zero(tokens: int) -> None:
    values = signals(tokens, 37, 0.8)
    expected = np.packbits((values != 0).T, axis=1, bitorder="little")
    packed = pack_nonzero(values.view(np.uint32))
    assert np.array_equal(packed, expected)
    assert np.array_equal(pack_nonzero(as_bfloat16(values)[0]), expected)
    assert np.array_equal(population(packed), (values != 0).sum(axis=0))


def test_shared_top_units() -> None:
    rng = np.random.default_rng(3)
    one = np.round(rng.normal(size=(25, 60)), 1).astype(np.float16)
    two = np.round(one + 0.5 * rng.normal(size=(25, 60)), 1).astype(np.float16)
    selected = (1, 6, 30, 60)
    expected = [
        sum(
            len(
                np.intersect1d(
                    *(
                        topk.Plugin().select(row.astype(np.float32), {"num_selected": [k]}, nothing_cached(60))
                        for row in (a, b)
                    )
                )
            )
            for a, b in zip(one, two, strict=True)
        )
        for k in selected
    ]
    found = shared_top(one.view(np.uint16), two.view(np.uint16), selected)
    assert list(found) == expected
    assert expected[-1] == 25 * 60
    assert expected[0] < 25
