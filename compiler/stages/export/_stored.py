"""Reads an artifact's weights by role, one at a time: the stored codes, in natural order.

On flash, units lie in the order that `order` found, several slices in each, several layers in a group, and an expert's
units among those of others. The files are mapped, not loaded; their digests are checked before anything is read.
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from coldpress.compiler.io import checked_file
from coldpress.runtime import plugins
from coldpress.runtime.artifact import contents, tensor_files
from coldpress.runtime.artifact.reader import Artifact
from coldpress.runtime.quantization import Format
from coldpress.schemas.families import FormatName, Slice, slice_formats, slice_shape
from coldpress.schemas.layout import Section
from coldpress.schemas.manifest import FLASH_FILE, MANIFEST_FILE, RESIDENT_FILE
from coldpress.schemas.model import matrices, role_shape

AT_A_TIME = 1024
"""Units that are copied at a time."""


@dataclass(frozen=True)
class StoredTensor:
    role: str
    shape: tuple[int, ...]
    """As in the checkpoint."""
    format: FormatName | None
    """None: float32."""
    by_column: bool = False
    """True if slices are columns of the matrix, not rows."""


@dataclass(frozen=True)
class _Place:
    section: Section
    layer: int
    piece: Slice
    units: range
    """The units that hold the slices: all of the family's, or those of one expert."""
    start_bytes: int
    """Start of the slice in its unit."""
    stop_bytes: int


class StoredModel:
    def __init__(self, artifact: Artifact) -> None:
        """Checks the files.

        Raises:
            ColdpressError: if a file's content does not match the manifest.
        """
        self.artifact, self.spec = artifact, artifact.manifest.model
        self._files = {name: self._mapped(name) for name in (FLASH_FILE, RESIDENT_FILE)}
        self._places: dict[str, _Place] = {}
        self.tensors = {
            tensor.role: StoredTensor(tensor.role, tuple(tensor.shape), tensor.format)
            for tensor in artifact.manifest.resident
        }
        for section in artifact.manifest.flash.sections:
            self._find(section)
        self._tables = {table.role: table for table in artifact.manifest.flash.tables}
        for role, table in self._tables.items():
            self.tensors[role] = StoredTensor(role, role_shape(self.spec, role), table.format)

    def _mapped(self, name: str) -> np.ndarray:
        path = Path(self.artifact.path) / name
        checked_file(path, self.artifact.entry(name).sha256, f"{self.artifact.path}/{MANIFEST_FILE}")
        return np.memmap(path, np.uint8, "r")

    def _find(self, section: Section) -> None:
        family = next(entry for entry in self.artifact.manifest.families if entry.family == section.family)
        formats = slice_formats(section.format or family.format, len(family.slices))
        for layer in section.layers:
            start = 0
            for piece, form in zip(family.slices, formats, strict=True):
                count, length = slice_shape(piece, self.spec)
                stop = start + count * contents.nbytes(form, length)
                names = matrices(piece.role, self.spec)
                each = section.num_units // len(names)
                for expert, name in enumerate(names):
                    role, units = f"layers.{layer}.{name}.weight", range(expert * each, (expert + 1) * each)
                    shape = role_shape(self.spec, role)
                    self.tensors[role] = StoredTensor(role, shape, form, piece.axis == "column")
                    self._places[role] = _Place(section, layer, piece, units, start, stop)
                start = stop

    @cached_property
    def _resident(self) -> dict[str, np.ndarray]:
        entry, opened = self.artifact.entry(RESIDENT_FILE), self.artifact.open(RESIDENT_FILE)
        with open(opened, "rb") as file:
            header = tensor_files.read_header(file.fileno(), RESIDENT_FILE, entry.size_bytes)
        buffer = self._files[RESIDENT_FILE]
        return {
            tensor.name: np.ndarray(tensor.shape, tensor_files.numpy_dtype(tensor), buffer, tensor.start_bytes)
            for tensor in header.tensors
        }

    def codes(self, role: str) -> np.ndarray:
        """Returns a tensor as stored: codes uint8 [slices, slice_bytes], slice i being row or column i, or float32."""
        if role in self._tables:
            table = self._tables[role]
            shape = table.num_rows, table.row_bytes
            return np.ndarray(shape, np.uint8, self._files[FLASH_FILE], table.offset_bytes)
        if role not in self._places:
            return self._resident[role]
        place = self._places[role]
        section, wanted = place.section, place.units
        units = np.ndarray(
            (section.num_units, section.unit_bytes),
            np.uint8,
            self._files[FLASH_FILE],
            section.part_offset_bytes(place.layer),
            (section.stride_bytes, 1),
        )
        order = self.artifact.order(section)
        (lying,) = np.nonzero((order >= wanted.start) & (order < wanted.stop))
        found = np.empty((len(wanted), place.stop_bytes - place.start_bytes), np.uint8)
        for start in range(0, lying.size, AT_A_TIME):
            part = lying[start : start + AT_A_TIME]
            found[order[part] - wanted.start] = units[part, place.start_bytes : place.stop_bytes]
        return contents.out_of_units(found, place.piece, self.tensors[role].shape[0])

    def values(self, role: str) -> np.ndarray:
        """Returns the values of a tensor, float32 in the checkpoint's shape."""
        tensor, codes = self.tensors[role], self.codes(role)
        if tensor.format is None:
            return codes
        length = tensor.shape[0] if tensor.by_column else tensor.shape[-1]
        found = plugins.load("coldpress.runtime.quantization", Format, tensor.format).decode(
            np.ascontiguousarray(codes), length
        )
        return found.T if tensor.by_column else found
