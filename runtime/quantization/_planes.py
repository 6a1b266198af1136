"""Splits a format's codes into two planes: the high bits with the scales, and the low bits (design, section 1).

A number of n bits is hi * 2 ** low_bits + lo. The coarse plane alone stands for the middle of the numbers that share
hi, and the refinement for the difference: (hi * 2 ** low_bits + middle - zero) d and (lo - middle) d, with middle half
of 2 ** low_bits - 1, and zero the number that means 0. Both are exact in float32, and so is their sum, which is the
plain format's value bit for bit. The middle is better than the mean of the weights there, which makes every output too
small (EXPERIMENTS.md).

The coarse plane of int8_group32 has 16 levels as int4_group32 has, but each 0.47 of a step higher: with int4's own
levels, an int8 of 120 or more would be beyond the highest.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from coldpress.runtime.plugins import load
from coldpress.runtime.quantization import Format
from coldpress.runtime.quantization._bits import pack, unpack
from coldpress.runtime.quantization._groups import GROUP, SCALE_BYTES, GroupFormat, groups
from coldpress.schemas.families import FormatName


@dataclass(frozen=True)
class Planes:
    """A format with groups whose codes are stored in two planes."""

    format: FormatName
    low_bits: int
    """Bits of the refinement; the coarse plane has the others."""

    @cached_property
    def whole(self) -> GroupFormat:
        """The format of both planes together."""
        found = load("coldpress.runtime.quantization", Format, self.format)
        assert isinstance(found, GroupFormat)
        return found

    @property
    def bits(self) -> int:
        """Returns the bits of a code."""
        return 8 * self.whole.CODE_BYTES // GROUP

    @property
    def middle(self) -> float:
        """Returns the low bits that the coarse plane alone stands for."""
        return ((1 << self.low_bits) - 1) / 2

    def coarse_nbytes(self, length: int) -> int:
        """Returns the bytes of the coarse plane of one slice of `length` values."""
        return groups(length) * (SCALE_BYTES + (self.bits - self.low_bits) * GROUP // 8)

    def refinement_nbytes(self, length: int) -> int:
        """Returns the bytes of the refinement of one slice of `length` values."""
        return groups(length) * self.low_bits * GROUP // 8

    def split(self, codes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Splits codes of the plain format, uint8 [n, nbytes]: (coarse plane, refinement), uint8 [n, each's bytes]."""
        group = codes.reshape(len(codes), -1, self.whole.nbytes(GROUP))
        levels = self.whole.levels(self.whole.unpack_bits(np.ascontiguousarray(group[..., SCALE_BYTES:])))
        numbers = (levels + (1 << self.bits - 1)).astype(np.uint8)
        high = pack(numbers >> self.low_bits, self.bits - self.low_bits)
        low = pack(numbers & (1 << self.low_bits) - 1, self.low_bits)
        return (
            np.concatenate([group[..., :SCALE_BYTES], high], axis=-1).reshape(len(codes), -1),
            low.reshape(len(codes), -1),
        )

    def join(self, coarse: np.ndarray, refinement: np.ndarray) -> np.ndarray:
        """The inverse of `split`."""
        group = self._grouped(coarse)
        numbers = self._high(group) << self.low_bits | self._low(refinement)
        q = self.whole.stored(numbers.astype(np.float32) - np.float32(1 << self.bits - 1))
        joined = np.concatenate([group[..., :SCALE_BYTES], self.whole.pack_bits(q)], axis=-1)
        return joined.reshape(len(coarse), -1)

    def coarse_values(self, coarse: np.ndarray, length: int) -> np.ndarray:
        """Decodes the coarse plane alone, uint8 [n, coarse_nbytes(length)]: float32 [n, length]."""
        group = self._grouped(coarse)
        numbers = (self._high(group) << self.low_bits).astype(np.float32)
        values = (numbers + np.float32(self.middle - (1 << self.bits - 1))) * _scales(group)
        return values.reshape(len(coarse), -1)[:, :length]

    def refinement_values(self, coarse: np.ndarray, refinement: np.ndarray, length: int) -> np.ndarray:
        """Decodes what the refinement, uint8 [n, refinement_nbytes(length)], adds to the coarse plane: float32
        [n, length]."""
        numbers = self._low(refinement).astype(np.float32)
        values = (numbers - np.float32(self.middle)) * _scales(self._grouped(coarse))
        return values.reshape(len(coarse), -1)[:, :length]

    def _grouped(self, coarse: np.ndarray) -> np.ndarray:
        return coarse.reshape(len(coarse), -1, self.coarse_nbytes(GROUP))

    def _high(self, group: np.ndarray) -> np.ndarray:
        return unpack(group[..., SCALE_BYTES:], self.bits - self.low_bits)

    def _low(self, refinement: np.ndarray) -> np.ndarray:
        return unpack(refinement.reshape(len(refinement), -1, self.refinement_nbytes(GROUP)), self.low_bits)


def _scales(group: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(group[..., :SCALE_BYTES]).view("<f2").astype(np.float32)


PLANES: Mapping[str, Planes] = {
    "int4_2_2": Planes("int4_group32", 2),
    "int4_3_1": Planes("int4_group32", 1),
    "int8_4_4": Planes("int8_group32", 4),
}
"""By name: the format, then the bits of both planes."""
