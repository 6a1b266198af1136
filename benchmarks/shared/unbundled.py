"""Reads units whose slices lie apart: the layout that row-column bundling is measured against (LLM in a flash, 3.2).

A section of flash.img is `[unit][slice]`; the image that `write` makes of it is `[slice][unit]`, of the same length at
the same place. `Flash` is a device with that image: asked for units it gives the same bytes, by reads for each of their
slices, and everything above it is the same code. It puts slices together to units; kernels that take each slice from
its own place would not need that, so those seconds are counted apart.
"""

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from coldpress.runtime import _native, plugins
from coldpress.runtime.artifact.reader import Artifact, open_artifact
from coldpress.runtime.extents import Extents
from coldpress.runtime.flash import Landing, direct, serial
from coldpress.runtime.quantization import Format
from coldpress.runtime.store import planner
from coldpress.runtime.store.planner import MAX_READ_BYTES
from coldpress.schemas.families import slice_shape
from coldpress.schemas.layout import Section
from coldpress.schemas.manifest import FLASH_FILE, Manifest


def write(artifact: Path, image: Path) -> None:
    """Writes the image of an artifact's units, and beside it the checksums of its pages."""
    manifest = open_artifact(artifact).manifest
    found = np.fromfile(artifact / FLASH_FILE, np.uint8)
    sizes = slice_sizes(manifest)
    for section in manifest.flash.sections:
        own = found[section.offset_bytes : section.offset_bytes + section.length_bytes]
        units = own.reshape(section.num_units, section.unit_bytes)
        parts = np.split(units, np.cumsum(sizes[section.family])[:-1], axis=1)
        own[:] = np.concatenate([part.ravel() for part in parts])
    checksums = _native.crc32c_pages(found, manifest.flash.page_bytes)
    np.save(checksums_of(image), checksums)
    found.tofile(image)


def checksums_of(image: Path) -> Path:
    """Returns the path of an image's checksums, uint32 [pages]."""
    return image.with_suffix(".npy")


def slice_sizes(manifest: Manifest) -> Mapping[str, list[int]]:
    """Returns family -> bytes of each slice of a unit."""
    return {
        entry.family: [
            plugins.load("coldpress.runtime.quantization", Format, entry.format).nbytes(
                slice_shape(piece, manifest.model)[1]
            )
            for piece in entry.slices
        ]
        for entry in manifest.families
    }


def file_as_artifact(path: Path, manifest: Any, page_crc32c: np.ndarray) -> Artifact:
    """Returns the part of an open artifact that a reader of flash uses, with a file in place of its flash.img."""

    def opened(name: str, flags: int = 0) -> int:
        return os.open(path, os.O_RDONLY | flags)

    return cast(Artifact, SimpleNamespace(manifest=manifest, page_crc32c=page_crc32c, open=opened))


class Flash(serial.Plugin):
    """The image of an artifact, on its device; a request waits until all is in memory."""

    def __init__(self, artifact: Artifact, queue_depth: int, image: Path, is_counted: Callable[[], bool]) -> None:
        """Opens the image; `is_counted` says whether the next reads count."""
        super().__init__(file_as_artifact(image, artifact.manifest, np.load(checksums_of(image))), queue_depth)
        self._is_counted, self._sizes = is_counted, slice_sizes(artifact.manifest)
        self._sections = artifact.manifest.flash.sections
        self._starts = np.array([section.offset_bytes for section in self._sections])
        self._scratch = _native.aligned_buffer(1)
        self.forget()

    def forget(self) -> None:
        """Restarts the counts of reads, their bytes, and the seconds in which slices were put together."""
        self.reads, self.read_bytes, self.moved_s = 0, 0, 0.0

    def submit(self, extents: Extents, into: np.ndarray, landing: Landing | None = None) -> direct.DirectReads:
        """Reads from the image the units that lie whole in `extents`; see `coldpress.runtime.flash.Flash`."""
        if not len(extents):
            return super().submit(extents, into, landing)
        section = self._sections[int(np.searchsorted(self._starts, extents.offsets[0], side="right")) - 1]
        whole = joined(extents)
        units = planner.Strided(section.offset_bytes, section.unit_bytes, section.stride_bytes)
        positions = planner.brought(units, section.num_units, whole)
        plans = self._plans(section, positions)
        reading = self._read([plan.extents for plan in plans])
        start = time.perf_counter()
        self._put_together(section, plans, whole, planner.inside(units, positions, whole), into)
        if landing:
            rows = np.lib.stride_tricks.sliding_window_view(into, section.unit_bytes)
            landing.rows[landing.slots] = rows[landing.offsets]
        if self._is_counted():
            self.moved_s += time.perf_counter() - start
        return reading

    def _plans(self, section: Section, positions: np.ndarray) -> list[planner.ReadPlan]:
        """Returns the reads of each slice of the units at `positions`."""
        found, first = list[planner.ReadPlan](), section.offset_bytes
        for size in self._sizes[section.family]:
            units = planner.Strided(first, size, size)
            found.append(planner.plan_reads(units, positions, self._page_bytes, 0, MAX_READ_BYTES))
            first += section.num_units * size
        return found

    def _read(self, parts: list[Extents]) -> direct.DirectReads:
        """Reads all parts into the scratch memory."""
        offsets, lengths = (np.concatenate([getattr(part, name) for part in parts]) for name in ("offsets", "lengths"))
        together = Extents(offsets, lengths)
        if self._scratch.size < together.num_bytes:
            self._scratch = _native.aligned_buffer(together.num_bytes)
        if self._is_counted():
            self.reads += len(together)
            self.read_bytes += together.num_bytes
        return super().submit(together, self._scratch)

    def _put_together(
        self,
        section: Section,
        plans: list[planner.ReadPlan],
        whole: Extents,
        wanted: planner.ReadPlan,
        into: np.ndarray,
    ) -> None:
        """Copies slices from the scratch memory to the places of their units."""
        places = whole.buffer_offsets[wanted.unit_extent] + wanted.unit_offset
        rows = np.lib.stride_tricks.sliding_window_view(into, section.unit_bytes, writeable=True)
        before = within = 0
        for size, plan in zip(self._sizes[section.family], plans, strict=True):
            starts = before + plan.extents.buffer_offsets[plan.unit_extent] + plan.unit_offset
            rows[places, within : within + size] = np.lib.stride_tricks.sliding_window_view(self._scratch, size)[starts]
            before += plan.extents.num_bytes
            within += size


def joined(extents: Extents) -> Extents:
    """Joins reads that follow each other, in the file as in memory."""
    opens = np.ones(len(extents), bool)
    opens[1:] = extents.offsets[1:] != extents.offsets[:-1] + extents.lengths[:-1]
    first = np.flatnonzero(opens)
    return Extents(extents.offsets[first], np.add.reduceat(extents.lengths, first))
