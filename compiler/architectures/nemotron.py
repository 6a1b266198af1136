"""Nemotron: LayerNorm whose weights count from 1, partial rotary, relu(x)**2 between the MLP's two matrices."""

from typing import Any

from coldpress.compiler.architectures import _common
from coldpress.schemas.model import ModelSpec

KEYS = (_common.LLAMA_KEYS - {"rms_norm_eps"}) | {"norm_eps", "head_dim", "attention_bias", "mlp_bias"}
MODULES = _common.llama_modules("Nemotron", gated=False, activation="relu2", partial_rotary=True)


def spec(config: Any) -> ModelSpec:
    """The model's shape."""
    return _common.llama_spec(MODULES, config, gated_mlp=False, norm="layer_norm_1p", norm_eps=config.norm_eps)


def parameters(config: Any, spec: ModelSpec) -> dict[str, tuple[str, ...]]:
    """Tensor names and the roles they hold."""
    return _common.llama_parameters(spec, _common.llama_biases(config, spec))
