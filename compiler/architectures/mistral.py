"""Mistral 7B and its kin: Llama with a sliding window in every layer (v0.1) or in none (since v0.2)."""

from typing import Any

from coldpress.compiler.architectures import _common


class Plugin(_common.Llama):
    KEYS = _common.LLAMA_KEYS | {"head_dim", "sliding_window"}
    MODULES = _common.llama_modules("Mistral")

    def own(self, config: Any) -> dict[str, Any]:
        return {"sliding_window": config.sliding_window}
