"""Qwen3 (dense): Llama with an RMS norm on each head of q and k, and heads wider than hidden_size / heads."""

from typing import Any

from coldpress.compiler.architectures import _common
from coldpress.schemas.model import ModelSpec


class Plugin(_common.Llama):
    KEYS = _common.LLAMA_KEYS | {
        "head_dim",
        "attention_bias",
        "sliding_window",
        "use_sliding_window",
        "max_window_layers",
        "layer_types",
    }
    MODULES = _common.llama_modules("Qwen3")

    def spec(self, config: Any) -> ModelSpec:
        return _common.llama_spec(self.MODULES, config, **_common.windows(config))

    def parameters(self, config: Any, spec: ModelSpec) -> dict[str, tuple[str, ...]]:
        return _common.llama_parameters(spec, _common.attention_biases(config), qk_norm=True)
