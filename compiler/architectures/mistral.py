"""Mistral 7B and its kin: Llama with a sliding window in every layer (v0.1) or in none (since v0.2)."""

from typing import Any

from coldpress.compiler.architectures import _common
from coldpress.schemas.model import ModelSpec


class Plugin(_common.Llama):
    KEYS = _common.LLAMA_KEYS | {"head_dim", "sliding_window"}
    MODULES = _common.llama_modules("Mistral")

    def spec(self, config: Any) -> ModelSpec:
        return _common.llama_spec(self.MODULES, config, config.sliding_window)
