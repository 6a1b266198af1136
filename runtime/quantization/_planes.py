"""Formats in two planes: the high bits of codes with the scales, and the low bits (design, section 1).

A number of a plain format is hi * 2 ** LOW_BITS + lo. The coarse plane alone stands for MIDDLE in place of lo, and the
refinement for the difference: (hi * 2 ** LOW_BITS + MIDDLE - zero) d and (lo - MIDDLE) d, where zero is the number that
means 0. Both are exact in float32, and so is their sum, which is the plain format's value bit for bit. The middle is
better than the mean of the weights there, which makes every output too small (docs/experiments/planes.md).

In an artifact the coarse planes of all units are resident, and units on flash hold refinements. So a file of a format
in planes encodes and decodes coarse planes; `join` gives the codes of the plain format.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, ClassVar

import numpy as np

from coldpress.runtime.plugins import load
from coldpress.runtime.quantization import Format
from coldpress.runtime.quantization._bits import pack, unpack
from coldpress.runtime.quantization._groups import GROUP, SCALE_BYTES, GroupFormat, groups, inverse
from coldpress.schemas.families import (
    FormatName,
    Formats,
    OwnHead,
    UnitFormat,
    head_of,
    layer_formats,
    matrix_formats,
    of_layers,
    slice_formats,
)
from coldpress.schemas.model import MLP_ROLES, MatrixRole


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
        A row may be a slice, or a unit of several slices."""
        group = codes.reshape(len(codes), -1, self.whole.nbytes(GROUP))
        numbers = self._numbers(self.whole.unpack_bits(np.ascontiguousarray(group[..., SCALE_BYTES:])))
        high = np.concatenate([group[..., :SCALE_BYTES], self.pack_bits(numbers >> self.LOW_BITS)], axis=-1)
        low = pack(numbers & (1 << self.LOW_BITS) - 1, self.LOW_BITS)
        return high.reshape(len(codes), -1), low.reshape(len(codes), -1)

    def join(self, coarse: np.ndarray, refinement: np.ndarray) -> np.ndarray:
        group = coarse.reshape(len(coarse), -1, self.nbytes(GROUP))
        high = self.unpack_bits(group[..., SCALE_BYTES:])
        low = unpack(refinement.reshape(len(refinement), -1, self.unit_nbytes(GROUP)), self.LOW_BITS)
        numbers = (high << self.LOW_BITS | low).astype(np.float32)
        joined = self.whole.pack_bits(self.whole.stored(numbers - np.float32(self.zero)))
        return np.concatenate([group[..., :SCALE_BYTES], joined], axis=-1).reshape(len(coarse), -1)

    def pack_bits(self, q: np.ndarray) -> np.ndarray:
        return pack(q, self.HIGH_BITS)

    def unpack_bits(self, codes: np.ndarray) -> np.ndarray:
        return unpack(codes, self.HIGH_BITS)

    def group_scale(self, values: np.ndarray) -> np.ndarray:
        return self.whole.group_scale(values)

    def rounded(self, ratios: np.ndarray) -> np.ndarray:
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


@dataclass(frozen=True)
class UnitPlanes:
    """The planes of units: of all slices in one format, or of each slice, all of one length, in its own."""

    slices: tuple[PlanesFormat, ...]

    @property
    def whole(self) -> GroupFormat:
        return self.slices[0].whole

    @property
    def joined_share(self) -> float:
        """Bytes of a unit in the plain format over those of its refinement."""
        refined = sum(planes.unit_nbytes(GROUP) for planes in self.slices)
        return len(self.slices) * self.whole.nbytes(GROUP) / refined

    def split(self, codes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Splits units of the plain format, uint8 [n, bytes]: (coarse planes, refinements), uint8 [n, each's bytes]."""
        parts = np.split(codes, len(self.slices), axis=1)
        both = [planes.split(part) for planes, part in zip(self.slices, parts, strict=True)]
        coarse, refinement = (np.concatenate(planes, axis=1) for planes in zip(*both, strict=True))
        return coarse, refinement

    def join(self, coarse: np.ndarray, refinement: np.ndarray) -> np.ndarray:
        high = _divided(coarse, [planes.nbytes(GROUP) for planes in self.slices])
        low = _divided(refinement, [planes.unit_nbytes(GROUP) for planes in self.slices])
        joined = [planes.join(*both) for planes, *both in zip(self.slices, high, low, strict=True)]
        return np.concatenate(joined, axis=1)


def _divided(codes: np.ndarray, sizes: Sequence[int]) -> list[np.ndarray]:
    """Divides rows among slices in proportion to `sizes`, the bytes of a group of each."""
    ends = np.cumsum(sizes) * (codes.shape[1] // sum(sizes))
    return np.split(codes, ends[:-1], axis=1)


def planes_of(format_name: FormatName) -> PlanesFormat | None:
    """Returns the format if it is one in planes; None else."""
    found = load("coldpress.runtime.quantization", Format, format_name)
    return found if isinstance(found, PlanesFormat) else None


def unit_planes(name: UnitFormat) -> UnitPlanes | None:
    found = tuple(planes for one in slice_formats(name) if (planes := planes_of(one)) is not None)
    return UnitPlanes(found) if found else None


def coarsest(formats: Formats) -> FormatName:
    """Returns the format of the artifact's families: that whose units on flash have the most bits."""
    return min(_formats_of(formats), key=_high_bits)


def format_fields(formats: Formats) -> dict[str, Any]:
    return {"format": coarsest(formats), "layer_formats": layer_formats(formats), "head": head_of(formats)}


def finest(formats: Formats) -> FormatName:
    return max(_formats_of(formats), key=_high_bits)


def _formats_of(formats: Formats) -> list[FormatName]:
    found = of_layers(formats)
    return sorted({name for one in ((found,) if isinstance(found, str) else found) for name in slice_formats(one)})


def _high_bits(name: FormatName) -> int:
    return -1 if (planes := planes_of(name)) is None else planes.HIGH_BITS


def finer_matrices(formats: Formats, roles: Sequence[MatrixRole]) -> list[tuple[int, MatrixRole]]:
    """Returns the layers and matrices among `roles` whose format is not the coarsest one."""
    base, known = coarsest(formats), map(matrix_formats, layer_formats(formats))
    return [(layer, role) for layer, of_role in enumerate(known) for role in roles if of_role[role] != base]


def in_words(formats: Formats) -> str:
    """Returns a format's name, for a mixture which layers or matrices have the finer one, and that of a head's own."""
    if isinstance(formats, str):
        return formats
    if isinstance(formats, OwnHead):
        return f"{in_words(formats.layers)}, the head in {formats.head.format}"
    roles = MLP_ROLES[-max(len(slice_formats(name)) for name in formats) :]
    finer, names = finer_matrices(formats, roles), f"{coarsest(formats)} with {finest(formats)}"
    layers = {role: [layer for layer, other in finer if other == role] for role in roles}
    if len(roles) == 1:
        return f"{names} in {_layers(layers[roles[0]])}"
    named = ", ".join(f"{role} of {_layers(found)}" for role, found in layers.items() if found)
    return f"{names} in {len(finer)} of {len(roles) * len(formats)} matrices: {named}"


def _layers(layers: Sequence[int]) -> str:
    runs = [[layer for _, layer in run] for _, run in groupby(enumerate(layers), key=lambda one: one[1] - one[0])]
    named = ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
    return f"layer{'s' if len(layers) > 1 else ''} {named}"


def whole_format(format_name: UnitFormat) -> FormatName:
    """Returns the plain format of a format in planes; a plain format itself."""
    planes = unit_planes(format_name)
    return format_name if planes is None else planes.whole.name()
