"""Gives the source model the values of an artifact's codes as weights, to measure the loss of quantization alone."""

from typing import Any

import numpy as np

from coldpress.runtime import plugins
from coldpress.runtime.artifact.reader import Artifact
from coldpress.runtime.generate.session import Session
from coldpress.runtime.quantization import Format
from coldpress.runtime.quantization._planes import planes_of, whole_format
from coldpress.schemas.families import num_units, slice_length, slices
from coldpress.schemas.layout import placed_parts
from coldpress.schemas.model import Model, matrices


def decode(codes: np.ndarray, format_name: str, length: int) -> np.ndarray:
    """Returns the values of codes in a format, float32 [rows, length]."""
    return plugins.load("coldpress.runtime.quantization", Format, format_name).decode(codes, length)


def resident_values(artifact: Artifact) -> dict[str, np.ndarray]:
    """Returns every resident tensor as float32, by role."""
    values = {}
    for tensor in artifact.manifest.resident:
        if tensor.role.endswith(".coarse"):
            continue  # part of the units
        stored = artifact.resident[tensor.role]
        values[tensor.role] = stored if tensor.format is None else decode(stored, tensor.format, tensor.shape[-1])
    return values


def flash_values(session: Session) -> dict[str, np.ndarray]:
    """Reads every MLP matrix through the store; returns role -> float32 in Hugging Face's orientation."""
    manifest, values = session.artifact.manifest, {}
    formats = manifest.unit_formats
    for part, section in placed_parts(session.plan, manifest.flash.sections):
        spec, family = manifest.model, part.family
        units = np.empty((num_units(family, spec), section.unit_bytes), np.uint8)
        for ids, rows in session.store.stream((part.layer, family)):
            units[ids] = rows
        planes, stored_in = planes_of(formats[part.layer, family]), whole_format(formats[part.layer, family])
        if planes is not None:
            units = planes.join(session.artifact.resident[f"layers.{part.layer}.{family}.coarse"], units)
        start = 0
        for piece in slices(family, spec):
            length = slice_length(piece, spec)
            size = plugins.load("coldpress.runtime.quantization", Format, stored_in).nbytes(length)
            matrix = decode(np.ascontiguousarray(units[:, start : start + size]), stored_in, length)
            names = matrices(piece.role, spec)
            for name, own in zip(names, np.split(matrix, len(names)), strict=True):
                values[f"layers.{part.layer}.{name}.weight"] = own if piece.axis == "row" else own.T
            start += size
    return values


def with_codes(session: Session, model: Model) -> Any:
    """Returns transformers' model of the checkpoint in float32, with the artifact's values as weights."""
    import torch
    from transformers import AutoModelForCausalLM

    source = AutoModelForCausalLM.from_pretrained(_weights_folder(model), dtype=torch.float32).eval()
    values = resident_values(session.artifact) | flash_values(session)
    with torch.no_grad():
        for role, place in model.tensors.items():
            if role in values:  # a tied head is not stored again
                rows = [row for start, stop in place.runs() for row in range(start, stop)]
                source.get_parameter(place.tensor)[rows] = torch.from_numpy(
                    np.ascontiguousarray(values[role], np.float32)
                ).view(place.shape)
    return source


def _weights_folder(model: Model) -> str:
    return next(iter(model.tensors.values())).file.rpartition("/")[0]


def perplexity(source: Any, token_blocks: np.ndarray) -> float:
    """Returns exp of the mean negative log likelihood of every token but each block's first."""
    import torch

    with torch.no_grad():
        tokens = torch.from_numpy(token_blocks.astype(np.int64))
        losses = [float(source(block[None], labels=block[None]).loss) for block in tokens]
    return float(np.exp(np.mean(losses)))
