"""Phi-3 and Phi-4-mini: Llama with q, k, v and gate, up fused into one tensor each, partial rotary, longrope.

longrope's short factors are right as long as the context is no longer than the original one, and the spec's
`max_position_embeddings` guarantees that. A build with the long factors (`ingest`) has them for every context.
"""

from typing import Any

from coldpress.compiler.architectures import _common
from coldpress.schemas.model import ModelSpec


class Plugin(_common.Llama):
    KEYS = _common.LLAMA_KEYS | {"sliding_window"}
    MODULES = _common.llama_modules(
        "Phi3",
        "mlp.activation_fn",
        up=_common.Tap("mlp.gate_up_proj", "output", part=1, num_parts=2),
        partial_rotary=True,
    )

    def own(self, config: Any) -> dict[str, Any]:
        return {"sliding_window": config.sliding_window}

    def parameters(self, config: Any, spec: ModelSpec) -> dict[str, tuple[str, ...]]:
        layer = {
            "self_attn.qkv_proj.weight": ("q_proj.weight", "k_proj.weight", "v_proj.weight"),
            "self_attn.o_proj.weight": ("o_proj.weight",),
            "mlp.gate_up_proj.weight": ("gate_proj.weight", "up_proj.weight"),
            "mlp.down_proj.weight": ("down_proj.weight",),
            "input_layernorm.weight": ("input_layernorm.weight",),
            "post_attention_layernorm.weight": ("post_attention_layernorm.weight",),
        }
        return _common.outer(spec) | _common.all_layers(spec, "model", layer)
