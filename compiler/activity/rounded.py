"""Runs a model with the values that its layers' matrices have in a format, or with rounded keys and values."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from coldpress.compiler.activity.forward import LayerStream
from coldpress.compiler.cost_model import stored_format
from coldpress.compiler.rounding._matrix import NEAREST, Rounding
from coldpress.compiler.rounding._weights import Axis, keeps_codes
from coldpress.runtime import plugins
from coldpress.runtime.dram.kv_cache import STORED
from coldpress.runtime.kernels.products import decode_rows
from coldpress.runtime.quantization import Format
from coldpress.schemas.families import FamilyName, FormatName, Formats, layer_format, matrix_formats, slices, unit_role
from coldpress.schemas.layout import KvCacheFormat
from coldpress.schemas.model import MatrixRole

if TYPE_CHECKING:
    from torch import Tensor


class Variation(LayerStream):
    """The model of another stream, with its arithmetic; a subclass changes what it computes."""

    def __init__(self, source: LayerStream) -> None:
        dtype: Any = str(source.dtype).removeprefix("torch.")
        super().__init__(source.model, source.threads, str(source.device), dtype=dtype)


class Rounded(Variation):
    """A model whose layers' matrices have the values that a build in a format gives them."""

    def __init__(
        self, source: LayerStream, formats: Formats, rounding: Rounding = NEAREST, families: Iterable[FamilyName] = ()
    ) -> None:
        """Matrices are rounded in slices: those of `families` in the slices of a unit, others row by row."""
        super().__init__(source)
        self._formats, self._rounding = formats, rounding
        self._axes: Mapping[MatrixRole, Axis] = {
            piece.role: "column" if piece.axis == "column" else "row"
            for family in families
            for piece in slices(family, source.spec)
        }

    @property
    def is_exact(self) -> bool:
        """Tells whether all matrices keep the source's own codes, so that nothing is rounded."""
        return all(self._keeps(role) for role in self.model.tensors if role.startswith("layers."))

    def _of_role(self, role: str) -> "Tensor":
        if self._keeps(role):
            return super()._of_role(role)
        import torch

        axis, name = self._axis(role) or "row", self._format_of(role)
        rows, columns = self.model.tensors[role].shape
        codes = self._rounding.codes(self.model, role, axis, name)
        decoded = decode_rows(codes, columns if axis == "row" else rows, name, num_threads=1)
        values = torch.from_numpy(decoded).to(self.device, self.dtype)
        return values if axis == "row" else values.T.contiguous()

    def _keeps(self, role: str) -> bool:
        if stored_format(role, self._formats) is None:
            return True
        return self._axis(role) != "column" and keeps_codes(self.model, role, _codec(self._format_of(role)))

    def _axis(self, role: str) -> Axis | None:
        matrix = unit_role(role, self.spec)
        return None if matrix is None else self._axes.get(matrix)

    def _format_of(self, role: str) -> FormatName:
        matrix, usual = unit_role(role, self.spec), stored_format(role, self._formats)
        if matrix is None or matrix not in self._axes:
            assert usual is not None
            return usual
        name = layer_format(self._formats, int(role.split(".")[1]))
        return matrix_formats(name).get(matrix, name)


def _codec(name: FormatName) -> Format:
    return plugins.load("coldpress.runtime.quantization", Format, name)


class RoundedHead(Variation):
    """A model whose head, and the embeddings where they are tied to it, have the values that a format gives them."""

    def __init__(self, source: LayerStream, format_name: FormatName) -> None:
        """Rounds to nearest, which every algorithm does outside the layers."""
        super().__init__(source)
        self._format = _codec(format_name)
        self.is_exact = keeps_codes(source.model, source.spec.head_role, self._format)
        """True if the head keeps the source's own codes."""

    def _rows(self, role: str, start: int, stop: int) -> np.ndarray:
        values = super()._rows(role, start, stop)
        if role != self.spec.head_role or self.is_exact:
            return values
        return decode_rows(self._format.encode(values), values.shape[1], self._format.name(), num_threads=1)


class RoundedKeys(Variation):
    """A model whose attention sees keys and values as a KV cache in a format holds them, each head for itself."""

    def __init__(self, source: LayerStream, kind: KvCacheFormat) -> None:
        super().__init__(source)
        self._cache = _RoundingCache(STORED[kind])

    def _context(self, layer: int, length: int) -> dict[str, Any]:
        return super()._context(layer, length) | {self._architecture.MODULES.cache_argument: self._cache}


@dataclass(frozen=True)
class _RoundingCache:
    """Stands for transformers' KV cache: attention reads keys and values back from it as it has written them."""

    codec: Format

    def update(self, key: "Tensor", value: "Tensor", *_: Any, **__: Any) -> "tuple[Tensor, Tensor]":
        """Returns keys and values as a cache of the codec stores them; keeps none, as a block is a whole text."""
        return rounded_rows(key, self.codec), rounded_rows(value, self.codec)


def rounded_rows(tensor: "Tensor", codec: Format) -> "Tensor":
    """Returns a tensor as `codec` stores it, each row along the last axis for itself."""
    import torch

    values = np.ascontiguousarray(tensor.float().cpu().numpy())
    rows = values.reshape(-1, values.shape[-1])
    stored = decode_rows(codec.encode(rows), rows.shape[1], codec.name(), num_threads=1).reshape(values.shape)
    return torch.from_numpy(stored).to(tensor.device, tensor.dtype)
