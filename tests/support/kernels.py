"""Makes operands for tests of the kernels, and compares float32 results with float64 references."""

import numpy as np

from coldpress.runtime.plugins import load
from coldpress.runtime.quantization import Format

SLOTS, OFFSET = 23, 5


def floats(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Returns standard normal float32 values."""
    return rng.standard_normal(shape).astype(np.float32)


def unit_store(rng: np.random.Generator, fmt: str, length: int, slots: int = SLOTS, slices: int = 1) -> np.ndarray:
    """Returns uint8 [slots, OFFSET + slices + 2]: random bytes around encoded slices, which begin at an odd byte."""
    codes = np.concatenate(
        [load("coldpress.runtime.quantization", Format, fmt).encode(floats(rng, slots, length)) for _ in range(slices)],
        axis=1,
    )
    store = rng.integers(0, 256, (slots, OFFSET + codes.shape[1] + 2), np.uint8)
    store[:, OFFSET:-2] = codes
    return store


def assert_close(found: np.ndarray, expected: np.ndarray, terms: int) -> None:
    """Checks a float32 sum of `terms` terms against its float64 reference."""
    # Terms have random signs: rounding errors of their sum grow with its root.
    assert found.dtype == np.float32
    assert expected.dtype == np.float64
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=2e-6 * (1 + terms**0.5))
