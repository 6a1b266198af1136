"""SmolLM3: Llama in which every fourth layer, or those that `no_rope_layers` names, has no positions."""

from typing import Any

from coldpress.compiler.architectures import _common
from coldpress.schemas.model import RotaryKind


class Plugin(_common.Llama):
    KEYS = _common.LLAMA_KEYS | {
        "head_dim",
        "attention_bias",
        "mlp_bias",
        "no_rope_layers",
        "no_rope_layer_interval",
        "sliding_window",
        "use_sliding_window",
        "layer_types",
    }
    MODULES = _common.llama_modules("SmolLM3")

    def complete(self, config: Any) -> None:
        count, interval = config.num_hidden_layers, config.no_rope_layer_interval
        if config.no_rope_layers is None:
            config.no_rope_layers = [int((layer + 1) % interval != 0) for layer in range(count)]
        if config.layer_types is None:
            windowed = config.use_sliding_window and config.sliding_window is not None
            kinds = ("full_attention", "sliding_attention")
            config.layer_types = [kinds[windowed and not rotates] for rotates in config.no_rope_layers[:count]]

    def own(self, config: Any) -> dict[str, Any]:
        flags = config.no_rope_layers[: config.num_hidden_layers]
        kinds = tuple[RotaryKind, ...]("main" if rotates else "none" for rotates in flags)
        return _common.windows(config) | {"layer_rotary": kinds if "none" in kinds else ()}
