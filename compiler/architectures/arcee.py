"""Arcee (AFM): Llama's attention and norms, an MLP of two matrices with relu(x)**2 between them."""

from typing import Any

from coldpress.compiler.architectures import _common
from coldpress.schemas.model import ModelSpec


class Plugin(_common.Llama):
    KEYS = _common.LLAMA_KEYS | {"head_dim", "attention_bias", "mlp_bias"}
    MODULES = _common.llama_modules("Arcee", gated=False, activation="relu2")

    def spec(self, config: Any) -> ModelSpec:
        return _common.llama_spec(self.MODULES, config, gated_mlp=False)
