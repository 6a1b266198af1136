"""Qwen3 (dense): Llama with an RMS norm on the heads of q and k, and heads wider than hidden_size / heads."""

from typing import Any

from coldpress.compiler.architectures import _common
from coldpress.schemas.model import ModelSpec

KEYS = _common.LLAMA_KEYS | {
    "head_dim",
    "attention_bias",
    "sliding_window",
    "use_sliding_window",
    "max_window_layers",
    "layer_types",
}
MODULES = _common.llama_modules("Qwen3")


def spec(config: Any) -> ModelSpec:
    """The model's shape."""
    return _common.llama_spec(MODULES, config, _common.uniform_window(config))


def parameters(config: Any, spec: ModelSpec) -> dict[str, tuple[str, ...]]:
    """Tensor names and the roles they hold."""
    biased = ("q_proj", "k_proj", "v_proj", "o_proj") if config.attention_bias else ()
    return _common.llama_parameters(spec, biased, qk_norm=True)
