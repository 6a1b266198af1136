"""Granite: Llama with factors on embeddings, attention scores, what each block adds, and logits."""

from typing import Any

from coldpress.compiler.architectures import _common

MULTIPLIERS = frozenset(("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"))


def granite_fields(config: Any) -> dict[str, Any]:
    return {
        "embedding_multiplier": float(config.embedding_multiplier),
        "attention_scale": float(config.attention_multiplier),
        "residual_multiplier": float(config.residual_multiplier),
        "logits_scaling": float(config.logits_scaling),
    }


class Plugin(_common.Llama):
    KEYS = _common.LLAMA_KEYS | {"head_dim", "attention_bias", "mlp_bias"} | MULTIPLIERS
    MODULES = _common.llama_modules("Granite")

    def own(self, config: Any) -> dict[str, Any]:
        return granite_fields(config)
