"""Reads an artifact's weights by role, one at a time: the stored codes, in natural order.

On flash, units lie in the order that `order` found, several slices in each, several layers in a group, and an expert's
units among those of others. flash.img is mapped, and resident tensors are read one at a time; the files' digests are
checked before anything is read.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import safe_open

from coldpress.compiler.io import checked_file
from coldpress.runtime import plugins
from coldpress.runtime.artifact import contents
from coldpress.runtime.artifact.reader import Artifact
from coldpress.runtime.quantization import Format
from coldpress.schemas.families import FormatName, Slice, slice_formats, slice_shape
from coldpress.schemas.layout import Section
from coldpress.schemas.manifest import FLASH_FILE, MANIFEST_FILE, RESIDENT_FILE
from coldpress.schemas.model import matrices, role_shape

UNITS_AT_A_TIME = 1024


@dataclass(frozen=True)
class StoredTensor:
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
        """Checks the files. Raises ColdpressError if a file's content does not match the manifest."""
        self.artifact, self.spec, folder = artifact, artifact.manifest.model, Path(artifact.path)
        for name in (FLASH_FILE, RESIDENT_FILE):
            checked_file(folder / name, artifact.entry(name).sha256, f"{folder}/{MANIFEST_FILE}")
        self._flash = np.memmap(folder / FLASH_FILE, np.uint8, "r")
        self._resident = safe_open(folder / RESIDENT_FILE, framework="numpy")
        self._places: dict[str, _Place] = {}
        self.tensors = {
            tensor.role: StoredTensor(tuple(tensor.shape), tensor.format) for tensor in artifact.manifest.resident
        }
        for section in artifact.manifest.flash.sections:
            self._find(section)
        self._tables = {table.role: table for table in artifact.manifest.flash.tables}
        for role, table in self._tables.items():
            self.tensors[role] = StoredTensor(role_shape(self.spec, role), table.format)

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
                    self.tensors[role] = StoredTensor(shape, form, piece.axis == "column")
                    self._places[role] = _Place(section, layer, piece, units, start, stop)
                start = stop

    def codes(self, role: str) -> np.ndarray:
        """Returns a tensor as stored: codes uint8 [slices, slice_bytes], slice i being row or column i, or float32."""
        if role in self._tables:
            table = self._tables[role]
            return np.ndarray((table.num_rows, table.row_bytes), np.uint8, self._flash, table.offset_bytes)
        if role not in self._places:
            return self._resident.get_tensor(role)
        place = self._places[role]
        section, wanted = place.section, place.units
        units = np.ndarray(
            (section.num_units, section.unit_bytes),
            np.uint8,
            self._flash,
            section.part_offset_bytes(place.layer),
            (section.stride_bytes, 1),
        )
        order = self.artifact.order(section)
        (lying,) = np.nonzero((order >= wanted.start) & (order < wanted.stop))
        found = np.empty((len(wanted), place.stop_bytes - place.start_bytes), np.uint8)
        for start in range(0, lying.size, UNITS_AT_A_TIME):
            part = lying[start : start + UNITS_AT_A_TIME]
            found[order[part] - wanted.start] = units[part, place.start_bytes : place.stop_bytes]
        return contents.out_of_units(found, place.piece, self.tensors[role].shape[0])

    def values(self, role: str) -> np.ndarray:
        """Returns the values of a tensor, float32 in the checkpoint's shape."""
        tensor, codes = self.tensors[role], self.codes(role)
        if tensor.format is None:
            return codes
        length = tensor.shape[0] if tensor.by_column else tensor.shape[-1]
        codec = plugins.load("coldpress.runtime.quantization", Format, tensor.format)
        found = codec.decode(np.ascontiguousarray(codes), length)
        return found.T if tensor.by_column else found
