"""Reads a checkpoint's tensors by role, as float32, one tensor in memory at a time.

Reads only the wanted rows of the files that a `Model` record names: safetensors as F32, F16 or BF16, and GGUF in any of
its types that the package gguf decodes; a fused tensor (Phi-3's qkv_proj) is read through the rows that the record
gives. Of a tensor of all experts it reads the entry of one, and keeps it until it reads another, as callers ask for it
in parts. The MXFP4 of safetensors is read as BF16, without loss, and GGUF's blocks as F32. All readers raise a
CheckpointError if the model has no such tensor, or its file has changed since `ingest`.
"""

import functools
import math
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from coldpress.compiler.checkpoint import mxfp4
from coldpress.compiler.checkpoint.headers import read_header
from coldpress.compiler.checkpoint.private import checked_weights, private_folder
from coldpress.compiler.checkpoint.source_json import read_object
from coldpress.compiler.llama_cpp.types import QUANTIZED, decode
from coldpress.runtime.artifact.tensor_files import ITEM_BYTES, TensorEntry
from coldpress.schemas.errors import CheckpointError
from coldpress.schemas.model import Model, RotaryKind, TensorSource

if TYPE_CHECKING:
    from torch import Tensor

FLOAT_DTYPES = ("F32", "F16", "BF16")
READABLE = (*FLOAT_DTYPES, *sorted(QUANTIZED))
PACKED_DTYPE = "U8"
"""The dtype of the blocks and the scales of MXFP4."""
MAX_CONFIG_BYTES = 1 << 20


@dataclass(frozen=True)
class _Place:
    source: TensorSource
    entry: TensorEntry
    scales: TensorEntry | None

    @property
    def dtype(self) -> str:
        if self.is_converted:
            return "F32"
        return self.entry.dtype if self.scales is None else "BF16"

    @property
    def is_converted(self) -> bool:
        """True if the file has other values than the role, or has them in blocks or in another order."""
        return self.entry.dtype in QUANTIZED or self.source.paired_heads > 0 or self.source.added != 0


def read_role(model: Model, role: str) -> np.ndarray:
    """Reads one tensor, float32, of the shape in the record; only its own rows."""
    place = _locate(model, role)
    return _read(place, 0, place.source.shape[0])


def stored_dtype(model: Model, role: str) -> str:
    """The stored dtype of a role's tensor, one of `FLOAT_DTYPES`; BF16 for MXFP4."""
    return _locate(model, role).dtype


def fits_bfloat16(model: Model, role: str) -> bool:
    """Tells whether bfloat16 loses no more of a tensor than its file has: it is stored so, or in quantized blocks."""
    place = _locate(model, role)
    return place.dtype == "BF16" or place.entry.dtype in ("BF16", *QUANTIZED)  # heads are permuted in float32


def read_stored(model: Model, role: str, into: np.ndarray) -> None:
    """Fills contiguous uint8 `into` with a tensor's values in its `stored_dtype`."""
    place = _locate(model, role)
    source, entry = place.source, place.entry
    if place.is_converted:
        into[:] = np.ascontiguousarray(_read(place, 0, source.shape[0]), np.float32).reshape(-1).view(np.uint8)
        return
    if source.index is not None:
        into[:] = _rows_of_expert(place, 0, source.shape[0]).reshape(-1).view(np.uint8)
        return
    row_bytes, done = math.prod(entry.shape[1:]) * ITEM_BYTES[entry.dtype], 0
    for start, stop in source.runs():
        size = (stop - start) * row_bytes
        _read_bytes(Path(source.file), entry.start_bytes + start * row_bytes, into[done : done + size])
        done += size


def read_rows(model: Model, role: str, start: int, stop: int) -> np.ndarray:
    """Reads rows `start` to `stop` of a tensor, float32 [stop - start, …]."""
    place = _locate(model, role)
    return _read(place, start, stop)


def codes_type(model: Model, role: str) -> str | None:
    """GGUF's type of a matrix's rows; None if not quantized, or stored otherwise than used. Reads no file."""
    source = model.tensors[role]
    return None if source.added or source.transposed else source.quantized


def read_codes(model: Model, role: str) -> np.ndarray:
    """Reads the rows of a matrix that has a `codes_type` as the file has them, uint8 [rows, row_bytes]."""
    place = _locate(model, role)
    source, entry = place.source, place.entry
    num_rows, first = math.prod(entry.shape[:-1]), (source.index or 0) * entry.shape[-2]
    runs = [(first + start, first + stop) for start, stop in source.runs()]
    return _unpaired(np.concatenate([_raw_rows(Path(source.file), entry, num_rows, *run) for run in runs]), source)


def rotary_inv_freq(model: Model, kind: RotaryKind = "main") -> np.ndarray:
    """The frequencies of a kind of rotation, float32 [rotary_dim / 2], as transformers initializes them from
    config.json. Raises CheckpointError if no layer rotates that way."""
    from coldpress.compiler.architectures import _common
    from coldpress.runtime.plugins import load

    if kind not in model.spec.frequencies:
        raise CheckpointError(f"no layer of model {model.name} has rotary frequencies of the kind {kind}")
    modules = load("coldpress.compiler.architectures", _common.Architecture, model.spec.model_type).MODULES
    raw = read_object(private_folder(model) / "config.json", MAX_CONFIG_BYTES)
    return _common.rope(modules, _common.source_config(modules, raw))[kind][0]


def fused(roles: tuple[str, ...], of_role: "Callable[[str], Tensor]") -> "Tensor":
    """Returns the stacked rows of `roles`, [rows, ...] each by `of_role`; a role that appears n times gives the next
    nth of its rows at each place."""
    import torch

    if len(roles) == 1:
        return of_role(roles[0])
    parts = {role: iter(of_role(role).chunk(count)) for role, count in Counter(roles).items()}
    return torch.cat([next(parts[role]) for role in roles])


def decode_floats(data: np.ndarray, dtype: str) -> np.ndarray:
    """Converts stored bytes uint8 [n * item] to float32 [n]; `dtype` is one of `FLOAT_DTYPES`."""
    if dtype == "BF16":
        values = data.view("<u2").astype(np.uint32)
        values <<= 16  # in place: the largest matrix of a layer is one of the largest things in memory
        return values.view(np.float32)
    return data.view("<f2" if dtype == "F16" else "<f4").astype(np.float32)


def _locate(model: Model, role: str) -> _Place:
    if role not in model.tensors:
        raise CheckpointError(f"model {model.name} has no tensor with the role {role}")
    source = model.tensors[role]
    entry = read_header(checked_weights(model, Path(source.file))).get(source.tensor)
    scales = None if source.scales is None else read_header(Path(source.scales.file)).get(source.scales.tensor)
    shape = () if entry is None else _whole_shape(source, entry, scales)
    size = source.row_stop - source.row_start
    rows, stop = source.num_parts * size, source.row_stop + (source.num_parts - 1) * source.stride_rows
    if (
        entry is None
        or not shape
        or not 0 <= source.row_start < source.row_stop <= stop <= shape[0]
        or (rows, *shape[1:]) != source.shape
    ):
        raise CheckpointError(
            f"{Path(source.file).name}: tensor {source.tensor} is no longer what ingest found; rebuild from ingest on"
        )
    return _Place(source, entry, scales)


def _whole_shape(source: TensorSource, entry: TensorEntry, scales: TensorEntry | None) -> tuple[int, ...]:
    """The shape of the matrix or vector that a role's rows are taken from; empty if the file has none."""
    if entry.dtype not in (READABLE if source.scales is None else (PACKED_DTYPE,)):
        return ()
    if source.index is None:
        return entry.shape
    shape = entry.shape[1:] if source.index < (entry.shape or (0,))[0] else ()
    if source.scales is not None:
        fits = scales is not None and scales.dtype == PACKED_DTYPE and entry.shape == (*scales.shape, mxfp4.GROUP_BYTES)
        shape = (shape[0], mxfp4.GROUP * shape[1]) if fits and len(shape) == 3 else ()
    return shape[::-1] if source.transposed else shape


def _read(place: _Place, start: int, stop: int) -> np.ndarray:
    source = place.source
    width = source.shape[0] // source.paired_heads if source.paired_heads else 1
    first, last = start // width * width, -(-stop // width) * width
    rows = _in_stored_order(place, first, last)
    if source.added:
        rows = rows - np.float32(source.added)
    return _unpaired(rows, source)[start - first : stop - first]


def _unpaired(rows: np.ndarray, source: TensorSource) -> np.ndarray:
    """Returns whole heads of rows [n, …] with each head's halves one after the other, where the file pairs them."""
    if not source.paired_heads:
        return rows
    width = source.shape[0] // source.paired_heads
    return rows.reshape(-1, width // 2, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def _in_stored_order(place: _Place, start: int, stop: int) -> np.ndarray:
    source = place.source
    if source.index is not None:
        rows = _rows_of_expert(place, start, stop)
        kept = "F32" if place.entry.dtype in QUANTIZED else place.dtype
        return decode_floats(rows.reshape(-1).view(np.uint8), kept).reshape(rows.shape)
    found = [read_entry(Path(source.file), place.entry, *run) for run in source.runs(start, stop)]
    return found[0] if len(found) == 1 else np.concatenate(found)


def _rows_of_expert(place: _Place, start: int, stop: int) -> np.ndarray:
    """Rows of a role in a tensor of all experts as stored, unsigned integers [stop - start, …], contiguous."""
    source = place.source
    files = tuple(Path(one.file) for one in (source, source.scales) if one is not None)
    changed_ns = tuple(file.stat().st_mtime_ns for file in files)
    of_expert = _of_expert if len(source.shape) > 1 else _of_expert.__wrapped__  # a bias takes no matrix's place
    stored = of_expert(files, changed_ns, place.entry, place.scales, source.index or 0)
    parts, rows = np.divmod(np.arange(start, stop), source.row_stop - source.row_start)
    chosen = source.row_start + parts * source.stride_rows + rows
    return np.ascontiguousarray(stored[:, chosen].T if source.transposed else stored[chosen])


@functools.lru_cache(maxsize=1)
def _of_expert(
    files: tuple[Path, ...], changed_ns: tuple[int, ...], entry: TensorEntry, scales: TensorEntry | None, index: int
) -> np.ndarray:
    """Returns an expert's entry as stored, unsigned integers; BF16 of MXFP4, whose scales are in the second file."""
    stored = _stored_entry(files[0], entry, index)
    return stored if scales is None else mxfp4.decode_bfloat16(stored, _stored_entry(files[1], scales, index))


def _stored_entry(path: Path, entry: TensorEntry, index: int) -> np.ndarray:
    """Returns an entry of a tensor, unsigned integers: as stored, or float32's bits of what GGUF's blocks stand for."""
    each = math.prod(entry.shape[1:-1])
    rows = _raw_rows(path, entry, each * entry.shape[0], index * each, (index + 1) * each)
    if entry.dtype in QUANTIZED:
        return decode(rows, entry.dtype).view(np.uint32).reshape(entry.shape[1:])
    return rows.view(f"<u{ITEM_BYTES[entry.dtype]}").reshape(entry.shape[1:])


def read_entry(path: Path, entry: TensorEntry, start: int, stop: int) -> np.ndarray:
    """Returns rows `start` to `stop` of a tensor in a file, float32 [stop - start, …]."""
    rows = _raw_rows(path, entry, entry.shape[0], start, stop)
    if entry.dtype in QUANTIZED:
        return decode(rows, entry.dtype)
    return decode_floats(rows.reshape(-1), entry.dtype).reshape(stop - start, *entry.shape[1:])


def _raw_rows(path: Path, entry: TensorEntry, num_rows: int, start: int, stop: int) -> np.ndarray:
    """Returns rows of a tensor that has `num_rows`, as the file has them, uint8 [stop - start, row_bytes]."""
    row_bytes = (entry.stop_bytes - entry.start_bytes) // num_rows
    rows = np.empty((stop - start, row_bytes), np.uint8)
    _read_bytes(path, entry.start_bytes + start * row_bytes, rows.reshape(-1))
    return rows


def _read_bytes(path: Path, offset: int, into: np.ndarray) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        done = 0
        while done < into.size:
            count = os.preadv(descriptor, [into.data[done:]], offset + done)
            if count == 0:
                raise CheckpointError(f"{path.name}: truncated while it was read; download it again")
            done += count
    finally:
        os.close(descriptor)
