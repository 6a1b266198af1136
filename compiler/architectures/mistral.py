"""Mistral 7B and its kin: Llama with a sliding window in every layer (v0.1) or in none (since v0.2)."""

from typing import Any

from coldpress.compiler.architectures import _common
from coldpress.schemas.model import ModelSpec

KEYS = _common.LLAMA_KEYS | {"head_dim", "sliding_window"}
MODULES = _common.llama_modules("Mistral")


def spec(config: Any) -> ModelSpec:
    """The model's shape."""
    return _common.llama_spec(MODULES, config, config.sliding_window)


def parameters(config: Any, spec: ModelSpec) -> dict[str, tuple[str, ...]]:
    """Tensor names and the roles they hold."""
    return _common.llama_parameters(spec)
