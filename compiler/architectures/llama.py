"""Llama 1, 2 and 3, and everything saved as LlamaForCausalLM: GQA, optional biases, tied embeddings, rope variants."""

from typing import Any

from coldpress.compiler.architectures import _common
from coldpress.schemas.model import ModelSpec

KEYS = _common.LLAMA_KEYS | {"head_dim", "attention_bias", "mlp_bias"}
MODULES = _common.llama_modules("Llama")


def spec(config: Any) -> ModelSpec:
    """The model's shape."""
    return _common.llama_spec(MODULES, config)


def parameters(config: Any, spec: ModelSpec) -> dict[str, tuple[str, ...]]:
    """Tensor names and the roles they hold."""
    return _common.llama_parameters(spec, _common.llama_biases(config, spec))
