"""Qwen2 and Qwen2.5: Llama with biases on q, k and v, and a sliding window in all layers, some or none."""

from typing import Any

from coldpress.compiler.architectures import _common
from coldpress.schemas.model import ModelSpec


class Plugin(_common.Llama):
    KEYS = _common.LLAMA_KEYS | {"sliding_window", "use_sliding_window", "max_window_layers", "layer_types"}
    MODULES = _common.llama_modules("Qwen2")

    def complete(self, config: Any) -> None:
        if not config.use_sliding_window:
            config.sliding_window = None
        if config.layer_types is None:
            first = config.num_hidden_layers if config.sliding_window is None else config.max_window_layers
            kinds = ("full_attention", "sliding_attention")
            config.layer_types = [kinds[layer >= first] for layer in range(config.num_hidden_layers)]

    def own(self, config: Any) -> dict[str, Any]:
        return _common.windows(config)

    def biases(self, config: Any, spec: ModelSpec) -> tuple[str, ...]:
        return ("q_proj", "k_proj", "v_proj")
