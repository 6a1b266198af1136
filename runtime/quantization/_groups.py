"""Shared code of the formats: groups of 32 values with a scale, and work in blocks of bounded memory.

A slice of `length` values is stored as ceil(length / 32) groups, each a float16 scale and its codes. The last group is
padded with zeros, so that every group begins with a scale and a kernel needs no other code path for a slice's end.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import ClassVar

import numpy as np

from coldpress.runtime import _native
from coldpress.runtime.quantization import Format
from coldpress.schemas.errors import ColdpressError

GROUP = 32
"""Values that share a scale."""
SCALE_BYTES = 2
BLOCK_VALUES = 1 << 18
"""Values encoded or decoded at a time, which bounds memory."""
FLOAT16_MAX = 65504.0


class GroupFormat(Format):
    """Groups of 32 whole numbers, called levels, and a float16 scale each; value = level * scale.

    A subclass defines the levels and how a group's bytes are packed. By default there is one more negative level than
    positive ones: the value of largest magnitude, of either sign, becomes LOWEST, so the scale may be negative. Every
    level is stored as the unsigned number level - LOWEST.
    """

    LOWEST: ClassVar[int]
    HIGHEST: ClassVar[int]
    CODE_BYTES: ClassVar[int]
    """Bytes of a group without its scale."""
    IS_SEARCHED: ClassVar[bool] = True
    """True if levels are so few that a search for scales with given prices gains anything."""

    @abstractmethod
    def pack_bits(self, q: np.ndarray) -> np.ndarray:
        """Packs stored numbers uint8 [..., 32] into bytes uint8 [..., CODE_BYTES]."""

    @abstractmethod
    def unpack_bits(self, codes: np.ndarray) -> np.ndarray:
        """The inverse of `pack_bits`: uint8 [..., CODE_BYTES] -> uint8 [..., 32]."""

    def group_scale(self, values: np.ndarray) -> np.ndarray:
        """Computes each group's scale before it is rounded to float16: float32 [..., n] -> float32 [..., 1]."""
        peak = np.abs(values).argmax(axis=-1)[..., None]  # the first of equal ones, as in llama.cpp
        return np.take_along_axis(values, peak, axis=-1) / np.float32(self.LOWEST)

    def rounded(self, ratios: np.ndarray) -> np.ndarray:
        """Rounds values divided by their scale, float32 [...], to levels as stored: uint8 [...]."""
        return np.minimum((ratios + np.float32(0.5 - self.LOWEST)).astype(np.uint8), self.HIGHEST - self.LOWEST)

    def stored(self, levels: np.ndarray) -> np.ndarray:
        """Converts levels, whole float32 [...], to stored numbers uint8 [...]."""
        return (levels - np.float32(self.LOWEST)).astype(np.uint8)

    def levels(self, q: np.ndarray) -> np.ndarray:
        return q.astype(np.float32) + np.float32(self.LOWEST)

    def nbytes(self, length: int) -> int:
        return groups(length) * self._group_bytes

    def encode(self, values: np.ndarray, prices: np.ndarray | None = None) -> np.ndarray:
        if prices is None or not self.IS_SEARCHED:
            return encode_blocks(values, self.nbytes(values.shape[1]), self._encode)
        each = padded(prices[None])[0]

        def fill(part: np.ndarray, codes: np.ndarray) -> None:
            scales = self.scales(padded(part).reshape(-1, GROUP), each)
            codes[...] = self.pack(part, scales.reshape(len(part), -1))

        return encode_blocks(values, self.nbytes(values.shape[1]), fill)

    def decode(self, codes: np.ndarray, length: int) -> np.ndarray:
        return decode_blocks(codes, length, self.nbytes(length), self._decode)

    def finite(self, codes: np.ndarray) -> bool:
        """Tells whether all scales are finite: no upper byte of a float16 has all bits of the exponent set. Codes are
        whole numbers, so it is enough to look at the scales, which takes a tenth of the time of decoding."""
        return bool(((codes[:, 1 :: self._group_bytes] & 0x7C) != 0x7C).all())

    def scales(self, values: np.ndarray, prices: np.ndarray | None = None) -> np.ndarray:
        found = np.empty(len(values), np.float32)
        if prices is not None and self.IS_SEARCHED:
            levels = self.levels(np.arange(1 << 8 * self.CODE_BYTES // GROUP, dtype=np.uint8))
            _native.fit_scales(np.ascontiguousarray(values), np.ascontiguousarray(prices), levels, found)
        else:
            found = self.group_scale(values)[..., 0]
        return float16(found, self.name()).astype(np.float32)

    def nearest(self, values: np.ndarray, scales: np.ndarray) -> np.ndarray:
        return self.nearest_level(values, scales) * scales

    def pack(self, values: np.ndarray, scales: np.ndarray) -> np.ndarray:
        q = self.stored(self.nearest_level(padded(values), scales[:, :, None]))
        return self._joined(q, scales.astype("<f2")).reshape(len(values), -1)

    @property
    def _group_bytes(self) -> int:
        return SCALE_BYTES + self.CODE_BYTES

    def nearest_level(self, values: np.ndarray, scales: np.ndarray) -> np.ndarray:
        """Returns the levels, float32 like `values`, whose products with the scales are nearest; 0 for a scale of 0."""
        return np.clip(np.rint(values * inverse(scales)), self.LOWEST, self.HIGHEST)

    def _encode(self, values: np.ndarray, codes: np.ndarray) -> None:
        x = padded(values)
        scale = self.group_scale(x)
        stored = float16(scale[..., 0], self.name())
        codes[...] = self._joined(self.rounded(x * inverse(scale)), stored).reshape(codes.shape)

    def _joined(self, q: np.ndarray, scales: np.ndarray) -> np.ndarray:
        """Joins stored numbers uint8 [n, groups, 32] and scales float16 [n, groups]: uint8 [n, groups, bytes]."""
        out = np.empty((*scales.shape, self._group_bytes), np.uint8)
        out[:, :, :SCALE_BYTES] = scales[:, :, None].view(np.uint8)
        out[:, :, SCALE_BYTES:] = self.pack_bits(q)
        return out

    def _decode(self, codes: np.ndarray, values: np.ndarray) -> None:
        count, length = values.shape
        packed = codes.reshape(count, groups(length), self._group_bytes)
        scale = np.ascontiguousarray(packed[:, :, :SCALE_BYTES]).view("<f2").astype(np.float32)
        whole = self.levels(self.unpack_bits(packed[:, :, SCALE_BYTES:])) * scale
        values[...] = whole.reshape(count, -1)[:, :length]


def pack(numbers: np.ndarray, bits: int) -> np.ndarray:
    """Packs numbers below 2 ** bits, uint8 [..., n]: uint8 [..., n * bits / 8]; bits is 1, 2, 4 or 8.

    Value i lies in bits b (i // m) of byte i mod m, where m = n b / 8; a kernel so shifts whole vectors of bytes."""
    num_bytes = numbers.shape[-1] * bits // 8
    packed = numbers[..., :num_bytes].copy()
    for index in range(1, 8 // bits):
        packed |= numbers[..., index * num_bytes : (index + 1) * num_bytes] << (index * bits)
    return packed


def unpack(packed: np.ndarray, bits: int) -> np.ndarray:
    """The inverse of `pack`: uint8 [..., m] -> uint8 [..., 8 m / bits]."""
    mask = (1 << bits) - 1
    return np.concatenate([packed >> (index * bits) & mask for index in range(8 // bits)], axis=-1)


def groups(length: int) -> int:
    return -(-length // GROUP)


def blocks(count: int, length: int) -> Iterator[slice]:
    """Consecutive ranges over `count` slices of `length` values, each of at most BLOCK_VALUES values (or one slice)."""
    step = max(1, BLOCK_VALUES // max(1, length))
    return (slice(start, min(count, start + step)) for start in range(0, count, step))


def padded(values: np.ndarray) -> np.ndarray:
    """Splits float32[n, length] into groups float32[n, groups, 32], padded with zeros."""
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
    """float32[n, length], filled by `fill(uint8[m, nbytes], float32[m, length])` over blocks of slices. Raises
    `ColdpressError` if a slice of `codes` is not of exactly `nbytes` bytes."""
    if codes.shape[1] != nbytes:
        raise ColdpressError(f"found {codes.shape[1]} bytes per slice where {length} values take {nbytes}")
    values = np.empty((codes.shape[0], length), np.float32)
    for rows in blocks(codes.shape[0], length):
        fill(codes[rows], values[rows])
    return values


def float16(scales: np.ndarray, name: str) -> np.ndarray:
    """Rounds to float16 of the same shape, to nearest even. Raises `ColdpressError` if a number is beyond float16 (its
    largest is 65504); `name` is the format's."""
    peak = float(np.abs(scales).max(initial=0.0))
    if not peak < FLOAT16_MAX + 16:  # the smallest number that rounds to infinity; `not <` also refuses NaN
        raise ColdpressError(
            f"cannot encode in {name}: found a value or scale of magnitude {peak:g}, float16 holds at most "
            f"{FLOAT16_MAX:.0f}; check the checkpoint's weights"
        )
    return scales.astype("<f2")


def inverse(scale: np.ndarray) -> np.ndarray:
    """Returns 1 / scale, float32, or 0 if it overflows: such a scale is 0 in float16, so its group decodes to zeros."""
    with np.errstate(divide="ignore", over="ignore"):
        quotient = np.float32(1) / scale
    return np.where(np.isfinite(quotient), quotient, np.float32(0))
