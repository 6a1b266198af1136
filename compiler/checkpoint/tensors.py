"""Reads a checkpoint's tensors by role, as float32, one tensor in memory at a time.

Reads only the wanted rows of the safetensors files that a `Model` record names, stored as F32, F16 or BF16; a fused
tensor (Phi-3's qkv_proj) is read through the rows that the record gives.
"""

import math
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from coldpress.compiler.checkpoint.headers import read_header
from coldpress.compiler.checkpoint.private import checked_weights, private_folder
from coldpress.compiler.checkpoint.source_json import read_object
from coldpress.runtime.artifact.tensor_header import ITEM_BYTES, TensorEntry
from coldpress.schemas.errors import CheckpointError
from coldpress.schemas.model import Model, RotaryKind, TensorSource

FLOAT_DTYPES = ("F32", "F16", "BF16")
MAX_CONFIG_BYTES = 1 << 20


def read_role(model: Model, role: str) -> np.ndarray:
    """Returns one tensor, float32, of the shape in the record; reads only its own rows.

    Raises:
        CheckpointError: if the model has no such tensor, or its file has changed since `ingest`.
    """
    source, entry = _locate(model, role)
    return _read_runs(source, entry, source.runs())


def stored_dtype(model: Model, role: str) -> str:
    """Returns the stored dtype of a role's tensor, one of `FLOAT_DTYPES`.

    Raises:
        CheckpointError: as `read_role`.
    """
    return _locate(model, role)[1].dtype


def read_stored(model: Model, role: str, into: np.ndarray) -> None:
    """Fills contiguous uint8 `into` with a tensor's stored bytes.

    Raises:
        CheckpointError: as `read_role`.
    """
    source, entry = _locate(model, role)
    row_bytes, done = math.prod(entry.shape[1:]) * ITEM_BYTES[entry.dtype], 0
    for start, stop in source.runs():
        size = (stop - start) * row_bytes
        _read_bytes(Path(source.file), entry.start_bytes + start * row_bytes, into[done : done + size])
        done += size


def read_rows(model: Model, role: str, start: int, stop: int) -> np.ndarray:
    """Returns rows `start` to `stop` of a tensor, float32 [stop - start, …].

    Raises:
        CheckpointError: as `read_role`.
    """
    source, entry = _locate(model, role)
    return _read_runs(source, entry, source.runs(start, stop))


def rotary_inv_freq(model: Model, kind: RotaryKind = "main") -> np.ndarray:
    """Returns the frequencies of a kind of rotation, float32 [rotary_dim / 2], as transformers initializes them from
    the model's config.json.

    Raises:
        CheckpointError: if no layer of the model rotates that way.
    """
    from coldpress.compiler.architectures import _common
    from coldpress.runtime.plugins import load

    if kind not in model.spec.frequencies:
        raise CheckpointError(f"no layer of model {model.name} has rotary frequencies of the kind {kind}")
    modules = load("coldpress.compiler.architectures", _common.Architecture, model.spec.model_type).MODULES
    raw = read_object(private_folder(model) / "config.json", MAX_CONFIG_BYTES)
    return _common.rope(modules, _common.source_config(modules, raw))[kind][0]


def decode_floats(data: np.ndarray, dtype: str) -> np.ndarray:
    """Converts stored bytes uint8 [n * item] to float32 [n]; `dtype` is one of `FLOAT_DTYPES`."""
    if dtype == "BF16":
        values = data.view("<u2").astype(np.uint32)
        values <<= 16  # in place: the largest matrix of a layer is one of the largest things in memory
        return values.view(np.float32)
    return data.view("<f2" if dtype == "F16" else "<f4").astype(np.float32)


def _locate(model: Model, role: str) -> tuple[TensorSource, TensorEntry]:
    if role not in model.tensors:
        raise CheckpointError(f"model {model.name} has no tensor with the role {role}")
    source = model.tensors[role]
    entry = read_header(checked_weights(model, Path(source.file))).get(source.tensor)
    size = source.row_stop - source.row_start
    rows, stop = source.num_parts * size, source.row_stop + (source.num_parts - 1) * source.stride_rows
    if (
        entry is None
        or entry.dtype not in FLOAT_DTYPES
        or not 0 <= source.row_start < source.row_stop <= stop <= entry.shape[0]
        or (rows, *entry.shape[1:]) != source.shape
    ):
        raise CheckpointError(
            f"{Path(source.file).name}: tensor {source.tensor} is no longer what ingest found; rebuild from ingest on"
        )
    return source, entry


def _read_runs(source: TensorSource, entry: TensorEntry, runs: Iterable[tuple[int, int]]) -> np.ndarray:
    found = [read_entry(Path(source.file), entry, start, stop) for start, stop in runs]
    return found[0] if len(found) == 1 else np.concatenate(found)


def read_entry(path: Path, entry: TensorEntry, start: int, stop: int) -> np.ndarray:
    """Returns rows `start` to `stop` of a tensor in a file, float32 [stop - start, …]."""
    row_bytes = math.prod(entry.shape[1:]) * ITEM_BYTES[entry.dtype]
    data = np.empty((stop - start) * row_bytes, np.uint8)
    _read_bytes(path, entry.start_bytes + start * row_bytes, data)
    return decode_floats(data, entry.dtype).reshape(stop - start, *entry.shape[1:])


def _read_bytes(path: Path, offset: int, into: np.ndarray) -> None:
    """Fills uint8 `into` from byte `offset` of a file."""
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
