"""OLMoE: Llama with experts, and a norm over all heads of q together, and of k (Muennighoff et al. 2024)."""

from typing import Any

from coldpress.compiler.architectures import _common, _experts
from coldpress.schemas.errors import CheckpointError


class Plugin(_experts.Mixture):
    KEYS = _common.LLAMA_KEYS | {"attention_bias", "clip_qkv", "num_experts", "num_experts_per_tok", "norm_topk_prob"}
    NAMES = _experts.Names()
    MODULES = _experts.modules("Olmoe", NAMES)

    def own(self, config: Any) -> dict[str, Any]:
        if config.clip_qkv is not None:
            raise CheckpointError(f"config.json: clip_qkv is {config.clip_qkv}, which is not supported, expected null")
        return {"qk_norm": "width"}

    def qk_norm(self, config: Any) -> bool:
        return True
