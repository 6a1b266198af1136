"""Qwen2 and Qwen2.5: Llama with biases on q, k and v; the sliding window must hold for all layers or none."""

from typing import Any

from coldpress.compiler.architectures import _common
from coldpress.schemas.model import ModelSpec

KEYS = _common.LLAMA_KEYS | {"sliding_window", "use_sliding_window", "max_window_layers", "layer_types"}
MODULES = _common.llama_modules("Qwen2")


def spec(config: Any) -> ModelSpec:
    """The model's shape."""
    return _common.llama_spec(MODULES, config, _common.uniform_window(config))


def parameters(config: Any, spec: ModelSpec) -> dict[str, tuple[str, ...]]:
    """Tensor names and the roles they hold."""
    return _common.llama_parameters(spec, ("q_proj", "k_proj", "v_proj"))
