"""Gives the source model the values of an artifact's codes as weights, to measure the loss of quantization alone."""

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from coldpress.compiler.checkpoint.tensors import read_role
from coldpress.runtime import plugins
from coldpress.runtime.artifact.reader import Artifact
from coldpress.runtime.generate.session import Session
from coldpress.runtime.quantization import Format
from coldpress.schemas.families import num_units, slice_formats, slice_shape, slices
from coldpress.schemas.layout import placed_parts
from coldpress.schemas.model import Model, matrices, role_shape
from tests.support.hf import load_hf
from tests.support.models import encode, write_safetensors


def decode(codes: np.ndarray, format_name: str, length: int) -> np.ndarray:
    """Returns the values of codes in a format, float32 [rows, length]."""
    return plugins.load("coldpress.runtime.quantization", Format, format_name).decode(codes, length)


def resident_values(artifact: Artifact) -> dict[str, np.ndarray]:
    """Returns every resident tensor as float32, by role."""
    values = {}
    for tensor in artifact.manifest.resident:
        stored = artifact.resident[tensor.role]
        values[tensor.role] = stored if tensor.format is None else decode(stored, tensor.format, tensor.shape[-1])
    return values


def table_values(artifact: Artifact) -> dict[str, np.ndarray]:
    """Reads every matrix that tokens read by row from the image; returns role -> float32."""
    image, found = np.memmap(Path(artifact.path) / "flash.img", np.uint8, "r"), {}
    for table in artifact.manifest.flash.tables:
        codes = np.ndarray((table.num_rows, table.row_bytes), np.uint8, image, table.offset_bytes)
        length = role_shape(artifact.manifest.model, table.role)[1]
        found[table.role] = decode(np.ascontiguousarray(codes), table.format, length)
    return found


def flash_values(session: Session) -> dict[str, np.ndarray]:
    """Reads every MLP matrix through the store, and tables; returns role -> float32 in Hugging Face's orientation."""
    manifest, values = session.artifact.manifest, table_values(session.artifact)
    formats = manifest.unit_formats
    for part, section in placed_parts(session.plan, manifest.flash.sections):
        spec, family = manifest.model, part.family
        units = np.empty((num_units(family, spec), section.unit_bytes), np.uint8)
        for ids, rows in session.store.stream((part.layer, family)):
            units[ids] = rows
        start, pieces = 0, slices(family, spec)
        formats_of = slice_formats(formats[part.layer, family], len(pieces))
        for piece, stored_in in zip(pieces, formats_of, strict=True):
            count, length = slice_shape(piece, spec)
            size = count * plugins.load("coldpress.runtime.quantization", Format, stored_in).nbytes(length)
            codes = np.ascontiguousarray(units[:, start : start + size]).reshape(count * len(units), -1)
            matrix = decode(codes, stored_in, length)
            names = matrices(piece.role, spec)
            for name, own in zip(names, np.split(matrix, len(names)), strict=True):
                if piece.axis == "columns":
                    own = np.concatenate(np.split(own, len(units) // len(names)), axis=1)
                values[f"layers.{part.layer}.{name}.weight"] = own.T if piece.axis == "column" else own
            start += size
    return values


def as_stored(model: Model, values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the tensors of a checkpoint whose roles have these values, by the checkpoint's names."""
    entries: dict[str, dict[int, dict[int, np.ndarray]]] = {}
    turned = {place.tensor for place in model.tensors.values() if place.transposed}
    stacked = {place.tensor for place in model.tensors.values() if place.index is not None}
    for role, place in model.tensors.items():
        found = values[role] if role in values else read_role(model, role)  # a tied head is not stored again
        rows = (row for start, stop in place.runs() for row in range(start, stop))
        entry = entries.setdefault(place.tensor, {}).setdefault(place.index or 0, {})
        entry.update(zip(rows, found.reshape(place.shape), strict=True))
    tensors: dict[str, np.ndarray] = {}
    for name, each in entries.items():
        whole = [np.stack([rows[row] for row in range(len(rows))]) for _, rows in sorted(each.items())]
        whole = [matrix.T for matrix in whole] if name in turned else whole
        tensors[name] = np.stack(whole) if name in stacked else whole[0]
    return tensors


def write_as_stored(model: Model, values: Mapping[str, np.ndarray], path: Path) -> None:
    """Writes these tensors to a safetensors file, in float32."""
    tensors = as_stored(model, values)
    coded = {name: ("F32", array.shape, encode(array, "float32")) for name, array in tensors.items()}
    write_safetensors(path, coded)


def with_codes(session: Session, model: Model) -> Any:
    """Returns transformers' model of the checkpoint in float32, with the artifact's values as weights."""
    values = resident_values(session.artifact) | flash_values(session)
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(Path(next(iter(model.tensors.values())).file).resolve().parent / "config.json", folder)
        write_as_stored(model, values, Path(folder) / "model.safetensors")
        return load_hf(Path(folder))


def perplexity(source: Any, token_blocks: np.ndarray) -> float:
    """Returns exp of the mean negative log likelihood of every token but each block's first."""
    import torch

    with torch.no_grad():
        tokens = torch.from_numpy(token_blocks.astype(np.int64))
        losses = [float(source(block[None], labels=block[None]).loss) for block in tokens]
    return float(np.exp(np.mean(losses)))
