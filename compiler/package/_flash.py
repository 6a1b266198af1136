"""flash.img, section by section: units gathered from natural order into flash order, densely packed, zeros behind.

Holds one section's codes and two blocks. Every page's CRC32C is taken on the way, from the bytes that are written.
"""

from collections.abc import Callable

import numpy as np

from compiler.package._files import HashingFile
from runtime import _native
from schemas.errors import ColdpressError
from schemas.layout import SECTION_ALIGN_BYTES, Layout, Section

BLOCK_BYTES = 8 << 20
"""Bytes per write, a multiple of every page size."""


class _Pages:
    """Turns pieces of any size into whole blocks that are checksummed and written."""

    def __init__(self, file: HashingFile, page_bytes: int) -> None:
        self.checksums: list[np.ndarray] = []
        self._file, self._page_bytes = file, page_bytes
        self._blocks = [np.empty(BLOCK_BYTES, np.uint8) for _ in range(2)]  # one is written while one is filled
        self._filled = 0

    def room(self) -> np.ndarray:
        """The unfilled part of the current block, never empty."""
        return self._blocks[0][self._filled :]

    def advance(self, num_bytes: int) -> None:
        """Says that so many bytes of `room` have been filled."""
        self._filled += num_bytes
        if self._filled == BLOCK_BYTES:
            self.flush()

    def add(self, data: np.ndarray) -> None:
        """Appends uint8 [n]."""
        while data.size:
            part = data[: self.room().size]
            self.room()[: part.size] = part
            self.advance(part.size)
            data = data[part.size :]

    def flush(self) -> None:
        """Writes what is there: whole pages."""
        block = self._blocks[0][: self._filled]
        if block.size:
            self.checksums.append(_native.crc32c_pages(block, self._page_bytes))
            self._file.write(block)
        self._blocks.reverse()
        self._filled = 0


def write_flash(
    file: HashingFile,
    layout: Layout,
    units_of: Callable[[Section], np.ndarray],
    order_of: Callable[[Section], np.ndarray],
) -> np.ndarray:
    """Writes all sections; gives the pages' checksums, uint32 [flash_bytes / page_bytes].

    Args:
        file: The new image.
        layout: Its sections, ascending and disjoint.
        units_of: Codes of a section in natural order, uint8 [num_units, unit_bytes].
        order_of: Unit id at each flash position, int32 [num_units].

    Raises:
        ColdpressError: if codes or order do not fit their section.
    """
    pages = _Pages(file, layout.page_bytes)
    for section in layout.sections:
        units, order = units_of(section), order_of(section)
        _check(section, units, order)
        _append_units(pages, units, order)
        pages.add(np.zeros(-section.length_bytes % SECTION_ALIGN_BYTES, np.uint8))
    pages.flush()
    if file.size_bytes != layout.flash_bytes:
        raise ColdpressError(
            f"flash.img has {file.size_bytes} bytes, the layout says {layout.flash_bytes}; run layout again"
        )
    return np.concatenate(pages.checksums)


def _append_units(pages: _Pages, units: np.ndarray, order: np.ndarray) -> None:
    """Rows of `units` in the sequence `order`; a row that a block's end would cut is copied in two parts."""
    unit_bytes = units.shape[1]
    done = 0
    while done < order.size:
        room = pages.room()
        count = min(room.size // unit_bytes, order.size - done)
        if count:
            whole = room[: count * unit_bytes].reshape(count, unit_bytes)
            np.take(units, order[done : done + count], axis=0, out=whole, mode="clip")  # `raise` would buffer `out`
            pages.advance(count * unit_bytes)
            done += count
        else:
            pages.add(units[order[done]])
            done += 1


def _check(section: Section, units: np.ndarray, order: np.ndarray) -> None:
    where = f"layer {section.layer}, family {section.family}"
    if units.dtype != np.uint8 or units.shape != (section.num_units, section.unit_bytes):
        raise ColdpressError(
            f"{where}: the codes are {units.dtype} {list(units.shape)}, the layout says uint8 "
            f"[{section.num_units}, {section.unit_bytes}]; run quantize and layout again"
        )
    in_range = order.shape == (section.num_units,) and order.min() >= 0 and order.max() < section.num_units
    if not in_range or np.bincount(order, minlength=section.num_units).max() != 1:
        raise ColdpressError(f"{where}: the order is no permutation of {section.num_units} units; run order again")
