"""Rounds the matrices of a model's layers, or its keys and values, to nearest in a format."""

from typing import TYPE_CHECKING, Any

import numpy as np

from coldpress.compiler.activity.forward import LayerStream
from coldpress.compiler.cost_model import stored_format
from coldpress.runtime import plugins
from coldpress.runtime.plan.kv_cache import STORED
from coldpress.runtime.quantization import Format
from coldpress.schemas.families import FormatName
from coldpress.schemas.layout import KvCacheFormat

if TYPE_CHECKING:
    from torch import Tensor


class _Like(LayerStream):
    """A model that computes as another stream of it."""

    def __init__(self, source: LayerStream) -> None:
        dtype: Any = str(source.dtype).removeprefix("torch.")
        super().__init__(source.model, source.threads, str(source.device), dtype=dtype)


class Rounded(_Like):
    """A model whose layers' matrices are rounded to nearest in a format, row by row."""

    def __init__(self, source: LayerStream, format_name: FormatName) -> None:
        super().__init__(source)
        self._format = format_name

    def _of_role(self, role: str) -> "Tensor":
        tensor = super()._of_role(role)
        stored = stored_format(role, self._format)
        if stored is None:
            return tensor
        return rounded_rows(tensor, plugins.load("coldpress.runtime.quantization", Format, stored))


class RoundedKeys(_Like):
    """A model whose attention sees keys and values as a KV cache in a format holds them, each head for itself."""

    def __init__(self, source: LayerStream, kind: KvCacheFormat) -> None:
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.integrations.sdpa_attention import sdpa_attention_forward
        from transformers.masking_utils import sdpa_mask

        super().__init__(source)
        codec, name = STORED[kind], f"keys-in-{kind}"

        def attend(
            module: Any, query: "Tensor", key: "Tensor", value: "Tensor", *arguments: Any, **keywords: Any
        ) -> tuple["Tensor", None]:
            rounded = rounded_rows(key, codec), rounded_rows(value, codec)
            return sdpa_attention_forward(module, query, *rounded, *arguments, **keywords)

        AttentionInterface.register(name, attend)
        AttentionMaskInterface.register(name, sdpa_mask)
        self._config._attn_implementation = name


def rounded_rows(tensor: "Tensor", codec: Format) -> "Tensor":
    """Returns a tensor as `codec` stores it, each row along the last axis for itself."""
    import torch

    values = np.ascontiguousarray(tensor.float().cpu().numpy())
    rows = values.reshape(-1, values.shape[-1])
    stored = codec.decode(codec.encode(rows), rows.shape[1]).reshape(values.shape)
    return torch.from_numpy(stored).to(tensor.device, tensor.dtype)
