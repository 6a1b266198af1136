"""What the formats share: whole groups of 32 values per slice, and work in blocks of bounded memory.

A slice of `length` values is stored as ceil(length / 32) groups; the last one is padded with zeros, so that a slice
always begins with a scale and a kernel never needs another code path for its end.
"""

from collections.abc import Callable, Iterator

import numpy as np

from coldpress.schemas.errors import ColdpressError

GROUP = 32
BLOCK_VALUES = 1 << 18
FLOAT16_MAX = 65504.0


def groups(length: int) -> int:
    """Number of groups in a slice of `length` values."""
    return -(-length // GROUP)


def blocks(count: int, length: int) -> Iterator[slice]:
    """Consecutive ranges over `count` slices of `length` values, each of at most BLOCK_VALUES values (or one slice)."""
    step = max(1, BLOCK_VALUES // max(1, length))
    return (slice(start, min(count, start + step)) for start in range(0, count, step))


def padded(values: np.ndarray) -> np.ndarray:
    """float32[n, length] -> float32[n, groups, 32], zeros behind the last value."""
    count, length = values.shape
    if length % GROUP == 0:
        return values.reshape(count, groups(length), GROUP)
    whole = np.zeros((count, groups(length) * GROUP), np.float32)
    whole[:, :length] = values
    return whole.reshape(count, groups(length), GROUP)


def encode_blocks(values: np.ndarray, nbytes: int, fill: Callable[[np.ndarray, np.ndarray], None]) -> np.ndarray:
    """uint8[n, nbytes], filled by `fill(float32[m, length], uint8[m, nbytes])` over blocks of slices."""
    codes = np.empty((values.shape[0], nbytes), np.uint8)
    for rows in blocks(*values.shape):
        fill(np.asarray(values[rows], np.float32), codes[rows])
    return codes


def decode_blocks(
    codes: np.ndarray, length: int, nbytes: int, fill: Callable[[np.ndarray, np.ndarray], None]
) -> np.ndarray:
    """float32[n, length], filled by `fill(uint8[m, nbytes], float32[m, length])` over blocks of slices.

    Raises:
        ColdpressError: if a slice of `codes` is not of exactly `nbytes` bytes.
    """
    if codes.shape[1] != nbytes:
        raise ColdpressError(f"found {codes.shape[1]} bytes per slice where {length} values take {nbytes}")
    values = np.empty((codes.shape[0], length), np.float32)
    for rows in blocks(codes.shape[0], length):
        fill(codes[rows], values[rows])
    return values


def finite_scales(codes: np.ndarray, group_bytes: int) -> bool:
    """Whether the scales of uint8[n, nbytes] are finite, a float16 at the begin of each group.

    The upper byte of infinities and NaNs has all bits of the exponent. Only scales are looked at, which takes a tenth
    of the time of decoding: codes are whole numbers, so a finite scale makes finite values and no other does.
    """
    return bool(((codes[:, 1::group_bytes] & 0x7C) != 0x7C).all())


def float16(scales: np.ndarray, name: str) -> np.ndarray:
    """float16 of the same shape, rounded to nearest even.

    Raises:
        ColdpressError: if a number is beyond float16 (its largest is 65504); `name` is the format's.
    """
    peak = float(np.abs(scales).max(initial=0.0))
    if not peak < FLOAT16_MAX + 16:  # the first number that rounds to infinity; also true of NaN
        raise ColdpressError(
            f"cannot encode in {name}: found a value or scale of magnitude {peak:g}, float16 holds at most "
            f"{FLOAT16_MAX:.0f}; check the checkpoint's weights"
        )
    return scales.astype("<f2")


def inverse(scale: np.ndarray) -> np.ndarray:
    """1 / scale, float32, and 0 where that overflows: such a scale is 0 in float16, so its group decodes to zeros."""
    with np.errstate(divide="ignore", over="ignore"):
        quotient = np.float32(1) / scale
    return np.where(np.isfinite(quotient), quotient, np.float32(0))


def nearest_level(values: np.ndarray, scales: np.ndarray, lowest: int, highest: int) -> np.ndarray:
    """Whole numbers q, float32 like `values`, for which q times its scale is nearest; 0 where a scale is 0."""
    return np.clip(np.rint(values * inverse(scales)), lowest, highest)
