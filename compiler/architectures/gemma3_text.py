"""Gemma 3, text only: Gemma 2 with norms of q and k in place of the soft cap of scores, and five layers with a window
to one without, which rotate with a smaller base (Gemma Team 2025, section 2).
"""

from typing import Any

from coldpress.compiler.architectures import _common, gemma2
from coldpress.schemas.errors import CheckpointError
from coldpress.schemas.model import RotaryKind

DEFAULT_PATTERN = 6
ROTARY: dict[RotaryKind, str] = {"main": "full_attention", "local": "sliding_attention"}


class Plugin(_common.Llama):
    KEYS = gemma2.KEYS | {"sliding_window_pattern"}
    MODULES = gemma2.gemma_modules("Gemma3", package="gemma3", rotary=ROTARY)

    def complete(self, config: Any) -> None:
        """Adds the windows of all layers but every sixth, or as `sliding_window_pattern` says."""
        if config.layer_types is None:
            pattern = getattr(config, "sliding_window_pattern", DEFAULT_PATTERN)
            kinds = ("full_attention", "sliding_attention")
            config.layer_types = [kinds[(layer + 1) % pattern > 0] for layer in range(config.num_hidden_layers)]

    def own(self, config: Any) -> dict[str, Any]:
        if config.attn_logit_softcapping is not None:
            raise CheckpointError(
                f"config.json: attn_logit_softcapping is {config.attn_logit_softcapping} in a model of type "
                "gemma3_text, expected null: transformers ignores it"
            )
        of_type = {layers: kind for kind, layers in ROTARY.items()}
        kinds = tuple(of_type[layers] for layers in config.layer_types)
        return gemma2.gemma_fields(config) | {"layer_rotary": kinds if "local" in kinds else ()}

    def qk_norm(self, config: Any) -> bool:
        return True
