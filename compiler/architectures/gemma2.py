"""Gemma 2: norms before and after each block, soft caps, windows in every second layer, scaled embeddings (Gemma Team
2024, section 2).

RMS norms have 1 added to their weights. Attention scores are divided by the root of `query_pre_attn_scalar`.
"""

from typing import Any

from coldpress.compiler.architectures import _common
from coldpress.schemas.errors import CheckpointError

KEYS = (_common.LLAMA_KEYS - {"hidden_act"}) | {
    "hidden_activation",
    "head_dim",
    "attention_bias",
    "query_pre_attn_scalar",
    "sliding_window",
    "layer_types",
    "final_logit_softcapping",
    "attn_logit_softcapping",
    "use_bidirectional_attention",
}


def gemma_modules(prefix: str, **own: Any) -> _common.Modules:
    keys = {"activation": "gelu_pytorch_tanh", "activation_key": "hidden_activation"}
    return _common.llama_modules(prefix, **keys, **own)


def gemma_fields(config: Any) -> dict[str, Any]:
    """The fields of a Gemma from the second generation on; refuses bidirectional attention with a CheckpointError."""
    if config.use_bidirectional_attention:
        raise CheckpointError("config.json: use_bidirectional_attention is not supported, expected false")
    scalar, softcap = config.query_pre_attn_scalar, config.final_logit_softcapping
    head_dim = config.head_dim or config.hidden_size // config.num_attention_heads
    return {
        **_common.windows(config),
        "norm": "rms_norm_1p",
        "norm_placement": "around",
        "attention_scale": None if scalar == head_dim else scalar**-0.5,
        "logits_softcap": None if softcap is None else float(softcap),
        "embedding_multiplier": config.hidden_size**0.5,
    }


class Plugin(_common.Llama):
    KEYS = KEYS
    MODULES = gemma_modules("Gemma2", attention="eager")

    def complete(self, config: Any) -> None:
        if config.layer_types is None:
            kinds = ("sliding_attention", "full_attention")
            config.layer_types = [kinds[layer % 2] for layer in range(config.num_hidden_layers)]

    def own(self, config: Any) -> dict[str, Any]:
        softcap = config.attn_logit_softcapping
        return gemma_fields(config) | {"attention_softcap": None if softcap is None else float(softcap)}
