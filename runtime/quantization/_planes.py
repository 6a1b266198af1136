"""Formats in two planes: the high bits of codes with the scales, and the low bits (design, section 1).

A number of a plain format is hi * 2 ** LOW_BITS + lo. The coarse plane alone stands for MIDDLE in place of lo, and the
refinement for the difference: (hi * 2 ** LOW_BITS + MIDDLE - zero) d and (lo - MIDDLE) d, where zero is the number that
means 0. Both are exact in float32, and so is their sum, which is the plain format's value bit for bit. The middle is
better than the mean of the weights there, which makes every output too small (docs/experiments/planes.md).

In an artifact the coarse planes of all units are resident, and units on flash hold refinements. So a file of a format
in planes encodes and decodes coarse planes; `join` gives the codes of the plain format.
"""

from itertools import groupby
from typing import ClassVar

import numpy as np

from coldpress.runtime.plugins import load
from coldpress.runtime.quantization import Format
from coldpress.runtime.quantization._bits import pack, unpack
from coldpress.runtime.quantization._groups import GROUP, SCALE_BYTES, GroupFormat, groups, inverse
from coldpress.schemas.families import FormatName, Formats


class PlanesFormat(GroupFormat):
    """The coarse plane of a plain format with groups; a file says which format, and how its bits are divided."""

    WHOLE: ClassVar[FormatName]
    """The plain format of both planes together."""
    HIGH_BITS: ClassVar[int]
    """Bits of the coarse plane."""
    LOW_BITS: ClassVar[int]
    """Bits of the refinement."""
    MIDDLE: ClassVar[float]
    """The low bits that the coarse plane alone stands for."""

    @property
    def whole(self) -> GroupFormat:
        """The plain format."""
        found = load("coldpress.runtime.quantization", Format, self.WHOLE)
        assert isinstance(found, GroupFormat)
        return found

    @property
    def zero(self) -> int:
        """The number of the plain format that means 0."""
        return 1 << self.HIGH_BITS + self.LOW_BITS - 1

    def unit_nbytes(self, length: int) -> int:
        """Returns the bytes of the refinement of one slice of `length` values."""
        return groups(length) * self.LOW_BITS * GROUP // 8

    def split(self, codes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Splits codes of the plain format, uint8 [n, its bytes]: (coarse plane, refinement), uint8 [n, each's bytes].

        A row may be a slice, or a unit of several slices.
        """
        group = codes.reshape(len(codes), -1, self.whole.nbytes(GROUP))
        numbers = self._numbers(self.whole.unpack_bits(np.ascontiguousarray(group[..., SCALE_BYTES:])))
        high = np.concatenate([group[..., :SCALE_BYTES], self.pack_bits(numbers >> self.LOW_BITS)], axis=-1)
        low = pack(numbers & (1 << self.LOW_BITS) - 1, self.LOW_BITS)
        return high.reshape(len(codes), -1), low.reshape(len(codes), -1)

    def join(self, coarse: np.ndarray, refinement: np.ndarray) -> np.ndarray:
        """The inverse of `split`."""
        group = coarse.reshape(len(coarse), -1, self.nbytes(GROUP))
        high = self.unpack_bits(group[..., SCALE_BYTES:])
        low = unpack(refinement.reshape(len(refinement), -1, self.unit_nbytes(GROUP)), self.LOW_BITS)
        numbers = (high << self.LOW_BITS | low).astype(np.float32)
        joined = self.whole.pack_bits(self.whole.stored(numbers - np.float32(self.zero)))
        return np.concatenate([group[..., :SCALE_BYTES], joined], axis=-1).reshape(len(coarse), -1)

    def pack_bits(self, q: np.ndarray) -> np.ndarray:
        """Packs the high bits of 32 values."""
        return pack(q, self.HIGH_BITS)

    def unpack_bits(self, codes: np.ndarray) -> np.ndarray:
        """The inverse of `pack_bits`."""
        return unpack(codes, self.HIGH_BITS)

    def group_scale(self, values: np.ndarray) -> np.ndarray:
        """Computes the scale of the plain format."""
        return self.whole.group_scale(values)

    def rounded(self, ratios: np.ndarray) -> np.ndarray:
        """Returns the high bits of the plain format's numbers."""
        return self._numbers(self.whole.rounded(ratios)) >> self.LOW_BITS

    def stored(self, levels: np.ndarray) -> np.ndarray:
        """Returns the high bits whose middles are `levels`."""
        return ((levels + np.float32(self.zero - self.MIDDLE)) / (1 << self.LOW_BITS)).astype(np.uint8)

    def levels(self, q: np.ndarray) -> np.ndarray:
        """Returns the middle of the numbers that share high bits: uint8 [...] -> float32 [...]."""
        return q.astype(np.float32) * (1 << self.LOW_BITS) + np.float32(self.MIDDLE - self.zero)

    def nearest_level(self, values: np.ndarray, scales: np.ndarray) -> np.ndarray:
        """Returns the middles that are nearest; for a scale of 0, one of them."""
        places = (values * inverse(scales) + np.float32(self.zero - self.MIDDLE)) / (1 << self.LOW_BITS)
        return self.levels(np.clip(np.rint(places), 0, (1 << self.HIGH_BITS) - 1))

    def _numbers(self, stored: np.ndarray) -> np.ndarray:
        """Converts the plain format's stored numbers to those whose high and low bits are split: uint8 [...]."""
        return (self.whole.levels(stored) + np.float32(self.zero)).astype(np.uint8)


def planes_of(format_name: FormatName) -> PlanesFormat | None:
    """Returns the format if it is one in planes."""
    found = load("coldpress.runtime.quantization", Format, format_name)
    return found if isinstance(found, PlanesFormat) else None


def coarsest(formats: Formats) -> FormatName:
    """Returns the format of all layers, or of several formats in planes the one whose units on flash have the most
    bits: that of the artifact's families."""
    if isinstance(formats, str):
        return formats
    return min(formats, key=lambda name: -1 if (planes := planes_of(name)) is None else planes.HIGH_BITS)


def finer_layers(formats: Formats) -> tuple[int, ...]:
    """Returns the layers whose format is not the coarsest one."""
    base = coarsest(formats)
    return () if isinstance(formats, str) else tuple(layer for layer, name in enumerate(formats) if name != base)


def in_words(formats: Formats) -> str:
    """Returns a format's name, and for a mixture which layers have the finer one."""
    if isinstance(formats, str):
        return formats
    layers = finer_layers(formats)
    (finer,) = {formats[layer] for layer in layers}
    runs = [[layer for _, layer in run] for _, run in groupby(enumerate(layers), key=lambda one: one[1] - one[0])]
    named = ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
    plural = "s" if len(layers) > 1 else ""
    return f"{coarsest(formats)} with {finer} in layer{plural} {named}"


def whole_format(format_name: FormatName) -> FormatName:
    """Returns the plain format of a format in planes; a plain format itself."""
    planes = planes_of(format_name)
    return format_name if planes is None else planes.WHOLE
