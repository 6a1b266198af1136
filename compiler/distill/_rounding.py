"""Weights as a format holds them while a model trains: rounding to nearest, which gradients pass."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from compiler.distill._source import Source
from runtime._plugins import load
from schemas.families import slices
from schemas.sparsity import Sparsity


@dataclass(frozen=True)
class _Part:
    """Rows of a tensor that hold one role, and whether its slices are columns."""

    parameter: nn.Parameter
    start: int
    stop: int
    by_columns: bool


@dataclass(frozen=True)
class Rounding:
    """The matrices of all layers as a format holds them, each along the slices that it is stored in."""

    parts: tuple[_Part, ...]
    format: str

    @staticmethod
    def of(student: nn.Module, source: Source, sparsity: Sparsity) -> "Rounding":
        """Of a student whose names are those of `source`."""
        columns = {
            piece.role
            for family in sparsity.families
            for piece in slices(family, source.model.spec)
            if piece.axis == "column"
        }
        parts: list[_Part] = []
        for name, roles in source.names.items():
            parameter = student.get_parameter(name)
            if parameter.ndim < 2 or not roles[0].startswith("layers."):
                continue
            start = 0
            for role in roles:
                stop = start + source.model.tensors[role].shape[0]
                parts.append(_Part(parameter, start, stop, role.split(".")[-2] in columns))
                start = stop
        return Rounding(tuple(parts), sparsity.format)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Weights are rounded inside, and themselves again after it."""
        parameters = {id(part.parameter): part.parameter for part in self.parts}.values()
        exact = [parameter.data for parameter in parameters]
        try:
            for parameter in parameters:
                parameter.data = parameter.data.clone()
            for part in self.parts:
                part.parameter.data[part.start : part.stop] = self._rounded(part)
            yield
        finally:
            for parameter, values in zip(parameters, exact, strict=True):
                parameter.data = values

    def _rounded(self, part: _Part) -> torch.Tensor:
        kept = load("runtime.quantization", self.format)
        values = part.parameter.data[part.start : part.stop]
        rows = np.ascontiguousarray((values.T if part.by_columns else values).cpu().numpy())
        found = torch.from_numpy(kept.decode(kept.encode(rows), rows.shape[1]))
        return (found.T if part.by_columns else found).to(values.device)
