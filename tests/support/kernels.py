"""Makes operands for tests of the kernels, and compares float32 results with float64 references."""

from collections.abc import Iterable

import numpy as np

from coldpress.runtime.plugins import load, names
from coldpress.runtime.quantization import Format
from tests.support.block_formats import BLOCK_FORMATS, block_bytes, block_codes, block_of, block_values

SLOTS, OFFSET = 23, 5
FORMATS = sorted({*names("coldpress.runtime.quantization"), *BLOCK_FORMATS})
"""Formats that have kernels."""


def formats_of(length: int) -> list[str]:
    """Returns the formats in which a slice may have this length."""
    found = {name: load("coldpress.runtime.quantization", Format, name) for name in FORMATS}
    return [name for name, plugin in found.items() if length % plugin.MULTIPLE == 0]


def cases(lengths: Iterable[int], formats: Iterable[str] = FORMATS) -> list[tuple[str, int]]:
    """Pairs each format with each length, rounded up to whole blocks where a block has more than 32 values."""
    return [(fmt, length) for fmt in formats for length in sorted({whole(fmt, length) for length in lengths})]


def whole(fmt: str, length: int) -> int:
    """Rounds a length up to one that a row of the format may have."""
    size = block_of(fmt)[0] if fmt in BLOCK_FORMATS else 1
    return length if size <= 32 else -(-length // size) * size


def nbytes(fmt: str, length: int) -> int:
    """Returns the bytes of a row of `length` values."""
    if fmt in BLOCK_FORMATS:
        return block_bytes(fmt, length)
    return load("coldpress.runtime.quantization", Format, fmt).nbytes(length)


def decode(codes: np.ndarray, fmt: str, length: int) -> np.ndarray:
    """Decodes uint8 [rows, at least nbytes(fmt, length)]: float32 [rows, length]."""
    own = codes[:, : nbytes(fmt, length)]
    if fmt in BLOCK_FORMATS:
        return block_values(own, fmt, length)
    return load("coldpress.runtime.quantization", Format, fmt).decode(own, length)


def floats(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Returns standard normal float32 values."""
    return rng.standard_normal(shape).astype(np.float32)


def unit_store(rng: np.random.Generator, fmt: str, length: int, slots: int = SLOTS, slices: int = 1) -> np.ndarray:
    """Returns uint8 [slots, OFFSET + slices + 2]: random bytes around encoded slices, which begin at an odd byte."""
    codes = np.concatenate([some_codes(rng, fmt, slots, length) for _ in range(slices)], axis=1)
    store = rng.integers(0, 256, (slots, OFFSET + codes.shape[1] + 2), np.uint8)
    store[:, OFFSET:-2] = codes
    return store


def some_codes(rng: np.random.Generator, fmt: str, count: int, length: int) -> np.ndarray:
    """Returns rows of random values in a format, uint8 [count, nbytes(fmt, length)]."""
    if fmt in BLOCK_FORMATS:
        return block_codes(rng, fmt, count, length)
    return load("coldpress.runtime.quantization", Format, fmt).encode(floats(rng, count, length))


def assert_close(found: np.ndarray, expected: np.ndarray, terms: int) -> None:
    """Checks a float32 sum of `terms` terms against its float64 reference."""
    # Terms have random signs: rounding errors of their sum grow with its root.
    assert found.dtype == np.float32
    assert expected.dtype == np.float64
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=2e-6 * (1 + terms**0.5))
