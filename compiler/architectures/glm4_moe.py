"""GLM-4.5: sigmoid routers with a correction, an expert that every token uses, and layers without experts at the start.

Its router is DeepSeek-V3's. The layers behind the last one, which predict further tokens, are left out, as transformers
leaves them out.
"""

from types import MappingProxyType
from typing import Any

from coldpress.compiler.architectures import _common, _experts
from coldpress.schemas.model import ModelSpec


class Plugin(_experts.Mixture):
    KEYS = _common.LLAMA_KEYS | {
        "head_dim",
        "attention_bias",
        "use_qk_norm",
        "moe_intermediate_size",
        "num_experts_per_tok",
        "n_routed_experts",
        "n_shared_experts",
        "routed_scaling_factor",
        "n_group",
        "topk_group",
        "first_k_dense_replace",
        "norm_topk_prob",
        "num_nextn_predict_layers",
    }
    DEFAULTS = MappingProxyType({"partial_rotary_factor": 0.5, "num_nextn_predict_layers": 1})
    NAMES = _experts.Names(correction="e_score_correction_bias", shared="shared_experts")
    NUM_EXPERTS = "n_routed_experts"
    MODULES = _experts.modules("Glm4Moe", NAMES, "sigmoid", partial_rotary=True)

    def own(self, config: Any) -> dict[str, Any]:
        return {
            "intermediate_size": config.moe_intermediate_size,
            "shared_intermediate_size": config.moe_intermediate_size * config.n_shared_experts,
            **_experts.layers_without(config, range(config.first_k_dense_replace)),
        }

    def qk_norm(self, config: Any) -> bool:
        return config.use_qk_norm

    def biases(self, config: Any, spec: ModelSpec) -> tuple[str, ...]:
        return ("q_proj", "k_proj", "v_proj") if config.attention_bias else ()

    def ignored(self, config: Any, spec: ModelSpec) -> str:
        first = spec.num_hidden_layers
        numbers = "|".join(str(first + at) for at in range(config.num_nextn_predict_layers))
        return rf"model\.layers\.({numbers})\..*" if numbers else ""
