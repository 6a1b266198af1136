"""flash.img, section by section: units gathered from natural order into flash order, densely packed, zeros behind.

Units are copied once, from the page cache into the block that will be written; while a section is gathered, the next
one is read. Every page's CRC32C is taken on the way, from the bytes that are written.
"""

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from compiler.package._hashing import HashingFile
from compiler.package._mapped import MappedArray
from runtime import _native
from schemas.errors import ColdpressError
from schemas.layout import SECTION_ALIGN_BYTES, Layout, Section

logger = logging.getLogger(__name__)


class PageChecksums:
    """CRC32C of every page of a file whose blocks it sees."""

    def __init__(self, page_bytes: int) -> None:
        """`page_bytes` divides every block but the last."""
        self._page_bytes = page_bytes
        self._parts: list[np.ndarray] = []

    def __call__(self, block: np.ndarray) -> None:
        """The next block, uint8 [n]."""
        self._parts.append(_native.crc32c_pages(block, self._page_bytes))

    @property
    def values(self) -> np.ndarray:
        """uint32 [num_pages]."""
        return np.concatenate(self._parts)


def write_flash(
    file: HashingFile,
    layout: Layout,
    units_of: Callable[[Section], MappedArray],
    order_of: Callable[[Section], np.ndarray],
) -> None:
    """Writes all sections.

    Args:
        file: The new image.
        layout: Its sections, ascending and disjoint.
        units_of: Codes of a section in natural order, uint8 [num_units, unit_bytes].
        order_of: Unit id at each flash position, int32 [num_units].

    Raises:
        ColdpressError: if codes or order do not fit their section.
    """
    with ThreadPoolExecutor(1) as ahead:
        asked = ahead.submit(_ask, units_of, layout.sections[0])
        for section, following in zip(layout.sections, (*layout.sections[1:], None), strict=True):
            units = asked.result()
            logger.info("package: layer %d of %d, %s", section.layer + 1, layout.sections[-1].layer + 1, section.family)
            if following:
                asked = ahead.submit(_ask, units_of, following)
            order = order_of(section)
            _check(section, units.values, order)
            _append_units(file, units, order)
            file.write(np.zeros(-section.length_bytes % SECTION_ALIGN_BYTES, np.uint8))
    if file.size_bytes != layout.flash_bytes:
        raise ColdpressError(
            f"flash.img has {file.size_bytes} bytes, the layout says {layout.flash_bytes}; run layout again"
        )


def _ask(units_of: Callable[[Section], MappedArray], section: Section) -> MappedArray:
    """A section's codes, held against their record and asked for: reading them twice is done beside the writing."""
    units = units_of(section)
    units.ask()
    return units


def _append_units(file: HashingFile, units: MappedArray, order: np.ndarray) -> None:
    """Units in the sequence `order`; one that a block's end would cut is copied in two parts."""
    unit_bytes = units.values.shape[1]
    done = 0
    while done < order.size:
        room = file.room()
        count = min(room.size // unit_bytes, order.size - done)
        if count:
            whole = room[: count * unit_bytes].reshape(count, unit_bytes)
            np.take(units.values, order[done : done + count], axis=0, out=whole, mode="clip")  # `raise` would buffer
            units.copied(count * unit_bytes)
            file.advance(count * unit_bytes)
            done += count
        else:
            file.write(units.values[order[done]])
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
