"""Qwen2-MoE and Qwen1.5-MoE: experts, and one beside them that every token uses, weighted by a gate of its own."""

from typing import Any

from coldpress.compiler.architectures import _common, _experts
from coldpress.schemas.errors import CheckpointError
from coldpress.schemas.model import ModelSpec


class Plugin(_experts.Mixture):
    KEYS = _common.LLAMA_KEYS | {
        "head_dim",
        "qkv_bias",
        "sliding_window",
        "use_sliding_window",
        "max_window_layers",
        "layer_types",
        "decoder_sparse_step",
        "mlp_only_layers",
        "moe_intermediate_size",
        "shared_expert_intermediate_size",
        "num_experts",
        "num_experts_per_tok",
        "norm_topk_prob",
    }
    NAMES = _experts.Names(shared="shared_expert", shared_gate="shared_expert_gate")
    MODULES = _experts.modules("Qwen2Moe", NAMES)

    def complete(self, config: Any) -> None:
        if not config.use_sliding_window:
            config.sliding_window = None

    def own(self, config: Any) -> dict[str, Any]:
        types = getattr(config, "layer_types", None) or _usual_types(config)
        if "sliding_attention" in types and not config.use_sliding_window:
            raise CheckpointError(
                "config.json: layer_types names sliding_attention and use_sliding_window is false, expected true"
            )
        return {
            "intermediate_size": config.moe_intermediate_size,
            "shared_intermediate_size": config.shared_expert_intermediate_size,
            **_common.windows(config, types),
            **_experts.stepped_layers(config),
        }

    def biases(self, config: Any, spec: ModelSpec) -> tuple[str, ...]:
        return ("q_proj", "k_proj", "v_proj") if config.qkv_bias else ()


def _usual_types(config: Any) -> list[str]:
    """The attention of each layer by default: transformers gives every other of the first layers a window."""
    kinds = ("full_attention", "sliding_attention")
    limit = config.max_window_layers if config.use_sliding_window else 0
    return [kinds[layer < limit and layer % 2 == 0] for layer in range(config.num_hidden_layers)]
