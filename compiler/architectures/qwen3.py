"""Qwen3 (dense): Llama with an RMS norm on each head of q and k, and heads wider than hidden_size / heads."""

from typing import Any

from coldpress.compiler.architectures import _common, qwen2
from coldpress.schemas.model import ModelSpec


class Plugin(qwen2.Plugin):
    KEYS = qwen2.Plugin.KEYS | {"head_dim", "attention_bias"}
    MODULES = _common.llama_modules("Qwen3")

    def parameters(self, config: Any, spec: ModelSpec) -> dict[str, tuple[str, ...]]:
        return _common.llama_parameters(spec, _common.Llama.biases(self, config, spec), qk_norm=True)
