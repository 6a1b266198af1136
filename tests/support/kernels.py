"""Operands of the kernels for tests, and how near a result in float32 is to one in float64."""

import numpy as np

from coldpress.runtime.plugins import load
from coldpress.runtime.quantization import Format

SLOTS, OFFSET = 23, 5


def floats(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Standard normal float32."""
    return rng.standard_normal(shape).astype(np.float32)


def unit_store(rng: np.random.Generator, fmt: str, length: int, slots: int = SLOTS, slices: int = 1) -> np.ndarray:
    """uint8[slots, OFFSET + slices + 2]: random bytes around the slices, which begin at an odd byte."""
    codes = np.concatenate(
        [load("coldpress.runtime.quantization", Format, fmt).encode(floats(rng, slots, length)) for _ in range(slices)],
        axis=1,
    )
    store = rng.integers(0, 256, (slots, OFFSET + codes.shape[1] + 2), np.uint8)
    store[:, OFFSET:-2] = codes
    return store


def assert_close(found: np.ndarray, expected: np.ndarray, terms: int) -> None:
    """Of a sum of `terms`, whose reference is computed in float64."""
    # Terms have random signs: rounding errors of their sum grow with its root.
    assert found.dtype == np.float32
    assert expected.dtype == np.float64
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=2e-6 * (1 + terms**0.5))
