"""Rounds weights to a format while a model trains: rounding to nearest, with gradients that pass through."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from coldpress.compiler.training.source import Source
from coldpress.runtime.plugins import load
from coldpress.runtime.quantization import Format
from coldpress.schemas.families import slices
from coldpress.schemas.sparsity import Sparsity


@dataclass(frozen=True)
class Stored:
    """One of transformers' matrices as the build stores it: for each role in it, slices along rows or along columns."""

    parts: tuple[tuple[int, int, bool], ...]
    """(first row, row after the last, whether its slices are columns)."""
    format: str

    def encode(self, values: torch.Tensor) -> list[np.ndarray]:
        """Returns the codes of each part, from float32 [rows, columns]."""
        kept = load("coldpress.runtime.quantization", Format, self.format)
        found = values.detach().cpu().numpy()
        return [
            kept.encode(np.ascontiguousarray(found[start:stop].T if by_columns else found[start:stop]))
            for start, stop, by_columns in self.parts
        ]

    def decode(self, codes: list[np.ndarray], num_columns: int, device: torch.device) -> torch.Tensor:
        """Returns the weights that the codes hold, float32 [rows, num_columns]."""
        kept = load("coldpress.runtime.quantization", Format, self.format)
        found = []
        for (start, stop, by_columns), part in zip(self.parts, codes, strict=True):
            values = kept.decode(part, stop - start if by_columns else num_columns)
            found.append(torch.from_numpy(values.T if by_columns else values))
        return torch.cat(found).to(device)


def stored_matrices(source: Source, sparsity: Sparsity) -> dict[str, Stored]:
    """Returns the matrices of all layers by transformers' names, without embeddings and head."""
    columns = {
        piece.role
        for family in sparsity.families
        for piece in slices(family, source.model.spec)
        if piece.axis == "column"
    }
    found: dict[str, Stored] = {}
    for name, roles in source.names.items():
        shapes = [source.model.tensors[role].shape for role in roles]
        if len(shapes[0]) < 2 or not roles[0].startswith("layers."):
            continue
        stops = np.cumsum([shape[0] for shape in shapes]).tolist()
        parts = tuple(
            (stop - shape[0], stop, role.split(".")[-2] in columns)
            for role, shape, stop in zip(roles, shapes, stops, strict=True)
        )
        found[name] = Stored(parts, sparsity.format)
    return found


@contextmanager
def rounded_weights(student: nn.Module, stored: Mapping[str, Stored]) -> Iterator[None]:
    """Rounds the weights inside, and restores the exact ones afterwards."""
    matrices = [(student.get_parameter(name), how) for name, how in stored.items()]
    exact = [parameter.data for parameter, _ in matrices]
    try:
        for parameter, how in matrices:
            parameter.data = how.decode(how.encode(parameter), parameter.shape[1], parameter.device)
        yield
    finally:
        for (parameter, _), values in zip(matrices, exact, strict=True):
            parameter.data = values
