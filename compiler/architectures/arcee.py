"""Arcee (AFM): Llama's attention and norms, an MLP of two matrices with relu(x)**2 between them."""

from typing import Any

from coldpress.compiler.architectures import _common
from coldpress.schemas.model import ModelSpec

KEYS = _common.LLAMA_KEYS | {"head_dim", "attention_bias", "mlp_bias"}
MODULES = _common.llama_modules("Arcee", gated=False, activation="relu2")


def spec(config: Any) -> ModelSpec:
    """The model's shape."""
    return _common.llama_spec(MODULES, config, gated_mlp=False)


def parameters(config: Any, spec: ModelSpec) -> dict[str, tuple[str, ...]]:
    """Tensor names and the roles they hold."""
    return _common.llama_parameters(spec, _common.llama_biases(config, spec))
