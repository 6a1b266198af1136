"""Qwen3 with experts: norms on each head of q and k; the router's weights may be the softmax over all experts."""

from typing import Any

from coldpress.compiler.architectures import _common, _experts


class Plugin(_experts.Mixture):
    KEYS = _common.LLAMA_KEYS | {
        "head_dim",
        "attention_bias",
        "sliding_window",
        "use_sliding_window",
        "decoder_sparse_step",
        "mlp_only_layers",
        "moe_intermediate_size",
        "num_experts",
        "num_experts_per_tok",
        "norm_topk_prob",
    }
    NAMES = _experts.Names()
    MODULES = _experts.modules("Qwen3Moe", NAMES)

    def complete(self, config: Any) -> None:
        if not config.use_sliding_window:
            config.sliding_window = None

    def own(self, config: Any) -> dict[str, Any]:
        return {
            "sliding_window": config.sliding_window,
            "intermediate_size": config.moe_intermediate_size,
            **_experts.stepped_layers(config),
        }

    def qk_norm(self, config: Any) -> bool:
        return True
