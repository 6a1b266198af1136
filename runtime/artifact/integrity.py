"""Checks every byte of an artifact against manifest and tables: slow and thorough, before shipping.

Opening an artifact checks only what a run depends on. This module also checks the digest of every file, the checksum
of every page, zeros between sections, that no unlisted file is present, and finite scales in all quantized weights.
"""

import hashlib
import os
from bisect import bisect_right
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import PurePosixPath

import numpy as np

from coldpress.runtime import _native, plugins
from coldpress.runtime.artifact import safe_files
from coldpress.runtime.artifact.contents import nbytes
from coldpress.runtime.artifact.errors import DAMAGED, DigestError, HiddenDataError, NonFiniteError, short
from coldpress.runtime.artifact.reader import Artifact
from coldpress.runtime.quantization import Format
from coldpress.schemas.errors import CorruptPageError
from coldpress.schemas.families import slice_formats, slice_shape
from coldpress.schemas.layout import Section
from coldpress.schemas.manifest import FLASH_FILE, MANIFEST_FILE, PREDICTORS_FILE, RESIDENT_FILE, FamilyFormat

BLOCK_BYTES = 4 << 20
"""Bytes per read; a multiple of every page size."""
MAX_THREADS = 4


def verify_artifact(artifact: Artifact) -> int:
    """Reads and checks the whole artifact; returns the number of bytes checked. Raises `ArtifactError` naming the first
    file and place that is wrong."""
    _check_unlisted(artifact)
    # Digests take longest, so they run beside the other checks. Their errors come last: the others say where the
    # damage is, a digest only that there is damage.
    with ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1)) as pool:
        digests = [pool.submit(_check_digest, artifact, entry.path) for entry in artifact.manifest.files]
        _check_flash(artifact)
        for file, name, codes, format_name in _matrices(artifact):
            step = max(1, BLOCK_BYTES // codes.shape[1])
            for start in range(0, len(codes), step):
                _check_codes(file, f"tensor '{name}'", codes[start : start + step], format_name)
        for digest in digests:
            digest.result()
    return sum(entry.size_bytes for entry in artifact.manifest.files)


def _check_unlisted(artifact: Artifact) -> None:
    """Refuses files that the manifest does not list, and folders without listed files, before entering them."""
    listed = {entry.path for entry in artifact.manifest.files} | {MANIFEST_FILE}
    used = {str(parent) for path in listed for parent in PurePosixPath(path).parents}

    def unreadable(error: OSError) -> None:
        raise safe_files.refused(artifact.path, f"listing the folder {short(error.filename)}", error)

    for parent, folders, files, _ in os.fwalk(".", onerror=unreadable, dir_fd=artifact.folder.descriptor):
        for kind, names, known in (("file", files, listed), ("folder", folders, used)):
            paths = [os.path.normpath(os.path.join(parent, name)) for name in names]
            for path in paths:
                if path not in known:
                    expected = "only files of the manifest and their folders"
                    raise HiddenDataError(artifact.path, f"the {kind} {short(path)}", "present", expected)


def _check_flash(artifact: Artifact) -> None:
    for offset, block in _blocks(artifact, FLASH_FILE):
        _check_pages(artifact, offset, block)
        _check_padding(artifact, offset, block)
    formats = {entry.family: entry for entry in artifact.manifest.families}
    for section in artifact.manifest.flash.sections:
        _check_units(artifact, section, formats[section.family])
    for table in artifact.manifest.flash.tables:
        for rows in _slices_of(artifact, table.offset_bytes, table.length_bytes, table.row_bytes):
            _check_codes(FLASH_FILE, f"tensor '{table.role}'", rows, table.format)


def _check_digest(artifact: Artifact, name: str) -> None:
    entry, digest = artifact.entry(name), hashlib.sha256()
    for _, block in _blocks(artifact, name):
        digest.update(block.data)
    if digest.hexdigest() != entry.sha256:
        raise DigestError(name, "the sha256", digest.hexdigest(), f"{entry.sha256}, as the manifest says")


def _blocks(artifact: Artifact, name: str, start: int = 0, stop: int | None = None) -> Iterator[tuple[int, np.ndarray]]:
    """Yields (offset, bytes) for a range of a file; the next step overwrites the bytes, since blocks share a buffer."""
    stop = artifact.entry(name).size_bytes if stop is None else stop
    buffer, opened = np.empty(min(BLOCK_BYTES, stop - start), np.uint8), artifact.open(name)
    try:
        for offset in range(start, stop, BLOCK_BYTES):
            block = buffer[: min(BLOCK_BYTES, stop - offset)]
            safe_files.read_exactly(opened, name, block.data, offset)
            yield offset, block
    finally:
        os.close(opened)


def _check_pages(artifact: Artifact, offset: int, block: np.ndarray) -> None:
    page_bytes = artifact.manifest.flash.page_bytes
    found, first = _native.crc32c_pages(block, page_bytes), offset // page_bytes
    wrong = np.flatnonzero(found != artifact.page_crc32c[first : first + found.size])
    if wrong.size:
        page = first + int(wrong[0])
        raise CorruptPageError(
            f"{FLASH_FILE}: page {page} at byte {page * page_bytes} has the checksum {int(found[wrong[0]]):08x}, "
            f"expected {int(artifact.page_crc32c[page]):08x}; {DAMAGED}"
        )


def _check_padding(artifact: Artifact, offset: int, block: np.ndarray) -> None:
    """Requires zeros behind each section and table, so that nothing can hide there."""
    flash = artifact.manifest.flash
    sections = (*flash.sections, *flash.tables)
    first = bisect_right(sections, offset, key=lambda section: section.offset_bytes) - 1
    for number in range(first, len(sections)):
        if sections[number].offset_bytes >= offset + block.size:
            break
        start = sections[number].offset_bytes + sections[number].length_bytes
        following = [section.offset_bytes for section in sections[number + 1 : number + 2]]
        stop = following[0] if following else flash.size_bytes
        gap = block[max(start - offset, 0) : max(stop - offset, 0)]
        if gap.any():
            where = offset + max(start - offset, 0) + int(np.flatnonzero(gap)[0])
            raise HiddenDataError(FLASH_FILE, f"byte {where}, behind a section,", "not 0", "zeros between sections")


def _check_units(artifact: Artifact, section: Section, family: FamilyFormat) -> None:
    """Requires that every unit decodes to finite numbers. A section of several layers interleaves their units, all
    `unit_bytes` long, so that they split like one layer's."""
    names = slice_formats(section.format or family.format, len(family.slices))
    shapes = [slice_shape(piece, artifact.manifest.model) for piece in family.slices]
    for units in _slices_of(artifact, section.offset_bytes, section.length_bytes, section.unit_bytes):
        stop = 0
        for name, (count, length) in zip(names, shapes, strict=True):
            start, stop = stop, stop + count * nbytes(name, length)
            _check_codes(FLASH_FILE, section.name, units[:, start:stop].reshape(-1, nbytes(name, length)), name)


def _slices_of(artifact: Artifact, start: int, length: int, size: int) -> Iterator[np.ndarray]:
    """Yields consecutive slices of `size` bytes of a range of flash.img, uint8 [n, size]; valid until the next step."""
    step = max(1, BLOCK_BYTES // size) * size
    for first in range(start, start + length, step):
        read = [block for _, block in _blocks(artifact, FLASH_FILE, first, min(first + step, start + length))]
        yield (read[0] if len(read) == 1 else np.concatenate(read)).reshape(-1, size)


def _matrices(artifact: Artifact) -> Iterator[tuple[str, str, np.ndarray, str]]:
    """Yields (file, tensor, codes uint8 [rows, row_bytes], format) of the quantized matrices that are not units."""
    for tensor in artifact.manifest.resident:
        if tensor.format is not None:
            yield RESIDENT_FILE, tensor.role, artifact.resident[tensor.role], tensor.format
    for layer, found in artifact.predictors.items():
        yield PREDICTORS_FILE, f"{layer}.fc1", found.fc1, found.format
        yield PREDICTORS_FILE, f"{layer}.fc2", found.fc2, found.format


def _check_codes(file: str, place: str, codes: np.ndarray, format_name: str) -> None:
    if not plugins.load("coldpress.runtime.quantization", Format, format_name).finite(codes):
        raise NonFiniteError(file, place, "holding values of NaN or infinity", "finite numbers")
