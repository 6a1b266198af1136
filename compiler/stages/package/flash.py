"""Writes flash.img, section by section: units gathered from natural order into flash order, dense, then zero padding.

Units are copied once, from the page cache into the block to write; while one section is gathered, the next one is read.
"""

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from coldpress.compiler.stages.package.hashing import HashingFile
from coldpress.compiler.stages.package.joined import Codes
from coldpress.compiler.stages.package.mapped import MappedArray
from coldpress.schemas.errors import ColdpressError
from coldpress.schemas.layout import SECTION_ALIGN_BYTES, Layout, Section

logger = logging.getLogger(__name__)


def write_flash(file: HashingFile, layout: Layout, codes: Codes, order_of: Callable[[Section], np.ndarray]) -> None:
    """Writes all sections, then the matrices that are read by row.

    Args:
        layout: The image's sections, ascending and disjoint.
        order_of: Unit id at each flash position, int32 [num_units].

    Raises:
        ColdpressError: if codes or order do not fit their section.
    """
    with ThreadPoolExecutor(1) as ahead:
        asked = ahead.submit(_ask, codes, layout.sections[0])
        for section, following in zip(layout.sections, (*layout.sections[1:], None), strict=True):
            layers = asked.result()
            logger.info("package: %s of %d layers", section.name, layout.sections[-1].last_layer + 1)
            if following:
                asked = ahead.submit(_ask, codes, following)
            for units in layers:
                _check_codes(section.name, units.values, (section.num_units, section.unit_bytes))
            order = order_of(section)
            _append_units(file, layers, order)
            file.write(np.zeros(-section.length_bytes % SECTION_ALIGN_BYTES, np.uint8))
    for table in layout.tables:
        rows = codes.rows(table)
        _check_codes(table.name, rows.values, (table.num_rows, table.row_bytes))
        _append_units(file, (rows,), np.arange(table.num_rows))
        file.write(np.zeros(-table.length_bytes % SECTION_ALIGN_BYTES, np.uint8))
    if file.size_bytes != layout.flash_bytes:
        raise ColdpressError(
            f"flash.img has {file.size_bytes} bytes, the layout says {layout.flash_bytes}; run layout again"
        )


def _ask(codes: Codes, section: Section) -> tuple[MappedArray, ...]:
    """Checks a section's codes against their record and starts reading them; runs beside the writing."""
    layers = codes.units(section)
    for units in layers:
        units.ask()
    return layers


def _append_units(file: HashingFile, layers: tuple[MappedArray, ...], order: np.ndarray) -> None:
    """Appends units in the sequence `order`, the layers' parts of each together; a unit may span two blocks."""
    unit_bytes = layers[0].values.shape[1]
    stride_bytes = len(layers) * unit_bytes
    done = 0
    while done < order.size:
        room = file.room()
        count = min(room.size // stride_bytes, order.size - done)
        if count:
            whole = room[: count * stride_bytes].reshape(count, len(layers), unit_bytes)
            for number, units in enumerate(layers):
                ids = order[done : done + count]
                np.take(units.values, ids, axis=0, out=whole[:, number], mode="clip")  # `raise` would buffer
                units.copied(count * unit_bytes)
            file.advance(count * stride_bytes)
            done += count
        else:
            for units in layers:
                file.write(units.values[order[done]])
            done += 1


def _check_codes(name: str, codes: np.ndarray, shape: tuple[int, int]) -> None:
    if codes.dtype != np.uint8 or codes.shape != shape:
        raise ColdpressError(
            f"{name}: the codes are {codes.dtype} {list(codes.shape)}, the layout says uint8 {list(shape)}; run "
            "quantize and layout again"
        )
