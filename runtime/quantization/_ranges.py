"""Shared code of llama.cpp's blocks: groups of values that have a step and a start, value = step * number + start.

A block stores the numbers of its groups and, in a header, their steps and starts: as float16, or as small whole numbers
times a float16 of the block. A slice that does not fill its last block is padded with zeros.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from coldpress.runtime import _native
from coldpress.runtime.quantization import Format
from coldpress.runtime.quantization._groups import decode_blocks, encode_blocks, float16, inverse

FREE = -1
"""In place of the number that stands for 0, where a group has a start of its own."""


@dataclass(frozen=True)
class Ranges:
    """Steps and starts of groups as a header says them, float32 [..., groups], and the header, uint8 [..., n]."""

    steps: np.ndarray
    starts: np.ndarray
    header: np.ndarray


class RangeFormat(Format):
    """Blocks of numbers from 0 to HIGHEST. A subclass defines the layout of a block and what its header can say."""

    IS_FINAL = False
    BLOCK: ClassVar[int]
    """Values of a block."""
    GROUP: ClassVar[int] = 32
    """Values that share a step and a start."""
    HIGHEST: ClassVar[int]
    ZERO: ClassVar[int] = FREE
    """The number of value 0, or FREE."""
    BLOCK_BYTES: ClassVar[int]

    @abstractmethod
    def held(self, steps: np.ndarray, starts: np.ndarray) -> Ranges:
        """Rounds steps and starts, which are at most 0, float32 [..., groups of a block], to what a header can say.
        Raises `ColdpressError` if one is beyond float16."""

    @abstractmethod
    def join(self, numbers: np.ndarray, header: np.ndarray) -> np.ndarray:
        """Joins numbers uint8 [..., BLOCK] and headers uint8 [..., n] to blocks uint8 [..., BLOCK_BYTES]."""

    @abstractmethod
    def split(self, blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns blocks' numbers, uint8 [..., BLOCK], and steps and starts of their groups, float32 [..., groups]."""

    def nbytes(self, length: int) -> int:
        return -(-length // self.BLOCK) * self.BLOCK_BYTES

    def encode(self, values: np.ndarray, prices: np.ndarray | None = None) -> np.ndarray:
        """Encodes values in the ranges that lose least; `prices` are those of a squared error along a slice. Raises
        `ColdpressError` if a step or a start is beyond float16."""
        count, length = values.shape
        padded = -(-length // self.BLOCK) * self.BLOCK
        each = np.zeros((1, padded), np.float32)
        each[0, : None if prices is None else length] = 1 if prices is None else prices

        def fill(part: np.ndarray, codes: np.ndarray) -> None:
            whole = np.zeros((len(part), padded), np.float32)
            whole[:, :length] = part
            blocks = whole.reshape(-1, self.BLOCK)
            ranges = self.ranges(blocks, each)
            codes[...] = self.join(self.numbers(blocks, ranges), ranges.header).reshape(codes.shape)

        return encode_blocks(values, self.nbytes(length), fill) if length else np.empty((count, 0), np.uint8)

    def ranges(self, values: np.ndarray, prices: np.ndarray) -> Ranges:
        """Searches the ranges of blocks, float32 [n, BLOCK], that lose least; `prices` are those of a squared error of
        each value, float32 [1, a number of values that divides n * BLOCK], repeated. Raises `ColdpressError` if a step
        or a start is beyond float16."""
        groups, per_block = values.reshape(-1, self.GROUP), (-1, self.BLOCK // self.GROUP)
        steps, starts = (np.empty(len(groups), np.float32) for _ in range(2))
        _native.fit_ranges(groups, prices.reshape(-1, self.GROUP), self.HIGHEST, self.ZERO, steps, starts)
        return self.held(steps.reshape(per_block), starts.reshape(per_block))

    def numbers(self, values: np.ndarray, ranges: Ranges) -> np.ndarray:
        """Returns the numbers of the nearest values in given ranges: float32 [n, BLOCK] -> uint8 of the same shape."""
        groups = values.reshape(-1, self.GROUP)
        found = np.empty(groups.shape, np.uint8)
        steps, starts = (np.ascontiguousarray(one.reshape(-1)) for one in (ranges.steps, ranges.starts))
        _native.nearest_numbers(groups, steps, starts, self.HIGHEST, found)
        return found.reshape(values.shape)

    def decode(self, codes: np.ndarray, length: int) -> np.ndarray:
        def fill(part: np.ndarray, values: np.ndarray) -> None:
            numbers, steps, starts = self.split(part.reshape(-1, self.BLOCK_BYTES))
            grouped = numbers.reshape(*steps.shape, self.GROUP).astype(np.float32)
            whole = grouped * steps[..., None] + starts[..., None]
            values[...] = whole.reshape(len(part), -1)[:, :length]

        return decode_blocks(codes, length, self.nbytes(length), fill)

    def finite(self, codes: np.ndarray) -> bool:
        with np.errstate(invalid="ignore", over="ignore"):
            _, steps, starts = self.split(codes.reshape(-1, self.BLOCK_BYTES))
        return bool(np.isfinite(steps).all() and np.isfinite(starts).all())


def halves(blocks: np.ndarray, at: int) -> np.ndarray:
    """Returns the float16 at byte `at` of blocks uint8 [..., n]: float32 [..., 1]."""
    return np.ascontiguousarray(blocks[..., at : at + 2]).view("<f2").astype(np.float32)


def stored(values: np.ndarray) -> np.ndarray:
    """Returns the bytes of float16 [..., 1]: uint8 [..., 2]."""
    return np.ascontiguousarray(values.astype("<f2")).view(np.uint8)


def two_levels(values: np.ndarray, lowest: int, highest: int, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Writes values [..., n] as a float16 [..., 1] times whole numbers: (the float16, the numbers), both as float32.

    The value of largest magnitude gets the number of largest magnitude, so that the float16 may be negative. Raises
    `ColdpressError` if the float16 is beyond its range; `name` is the format's.
    """
    peak = np.take_along_axis(values, np.abs(values).argmax(axis=-1)[..., None], axis=-1)
    most = np.float32(highest if highest > -lowest else lowest)
    unit = float16(peak / most, name).astype(np.float32)
    return unit, np.clip(np.rint(values * inverse(unit)), lowest, highest)
