"""Rounds the matrices of a model's layers to nearest in a format, row by row, as they are read."""

from typing import TYPE_CHECKING, Any

import numpy as np

from coldpress.compiler.activity.forward import LayerStream
from coldpress.compiler.cost_model import stored_format
from coldpress.runtime import plugins
from coldpress.runtime.quantization import Format
from coldpress.schemas.families import FormatName

if TYPE_CHECKING:
    from torch import Tensor


class Rounded(LayerStream):
    """A model whose layers' matrices are rounded to nearest in a format, row by row."""

    def __init__(self, source: LayerStream, format_name: FormatName) -> None:
        """Computes as `source` does."""
        dtype: Any = str(source.dtype).removeprefix("torch.")
        super().__init__(source.model, source.threads, str(source.device), dtype=dtype)
        self._format = format_name

    def _of_role(self, role: str) -> "Tensor":
        import torch

        tensor = super()._of_role(role)
        stored = stored_format(role, self._format)
        if stored is None:
            return tensor
        codec = plugins.load("coldpress.runtime.quantization", Format, stored)
        values = np.ascontiguousarray(tensor.float().numpy())
        return torch.from_numpy(codec.decode(codec.encode(values), values.shape[1])).to(tensor.dtype)
