"""DeepSeek-V2: latent attention, softmax routers that may keep to groups of experts, experts that every token uses.

The checkpoint's projections to latents are the roles k_proj and q_proj, since they take attention's input; `q_b_proj`
and `kv_b_proj` expand latents (runtime/decoder/attention.py).
"""

import math
from typing import Any

from coldpress.compiler.architectures import _common, _experts
from coldpress.schemas.errors import CheckpointError
from coldpress.schemas.model import ModelSpec, block_norms

METHODS = ("greedy", "group_limited_greedy")
EXPECTED = {"norm_topk_prob": False, "mlp_bias": False}
"""Keys with the only value that is supported: transformers ignores the first, and no published model has the second."""


class Plugin(_experts.Mixture):
    KEYS = (_common.LLAMA_KEYS - {"num_key_value_heads"}) | {  # each head has its own part of the latents' matrix
        "attention_bias",
        "mlp_bias",
        "kv_lora_rank",
        "q_lora_rank",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "v_head_dim",
        "moe_intermediate_size",
        "num_experts_per_tok",
        "n_routed_experts",
        "n_shared_experts",
        "routed_scaling_factor",
        "topk_method",
        "n_group",
        "topk_group",
        "first_k_dense_replace",
        "norm_topk_prob",
    }
    NAMES = _experts.Names(shared="shared_experts")
    NUM_EXPERTS = "n_routed_experts"
    MODULES = _experts.modules("DeepseekV2", NAMES)

    def complete(self, config: Any) -> None:
        """Adds the rotated part of a head, from which transformers makes the frequencies."""
        config.head_dim = config.qk_rope_head_dim

    def own(self, config: Any) -> dict[str, Any]:
        _check(config)
        whole = {} if config.topk_method == METHODS[1] else {"num_expert_groups": 1, "num_expert_groups_per_tok": 1}
        return {
            "intermediate_size": config.moe_intermediate_size,
            "num_key_value_heads": 1,
            "head_dim": config.kv_lora_rank + config.qk_rope_head_dim,
            "kv_lora_rank": config.kv_lora_rank,
            "q_lora_rank": config.q_lora_rank or 0,
            "qk_nope_head_dim": config.qk_nope_head_dim,
            "v_head_dim": config.v_head_dim,
            "attention_scale": _scale(config),
            "rotary_pairs": "neighbours",
            "router_normed": False,
            "shared_intermediate_size": config.moe_intermediate_size * config.n_shared_experts,
            **whole,
            **_experts.layers_without(config, range(config.first_k_dense_replace)),
        }

    def attention(self, config: Any, spec: ModelSpec) -> dict[str, str]:
        roles = {
            "kv_a_proj_with_mqa": "k_proj",
            "kv_b_proj": "kv_b_proj",
            "o_proj": "o_proj",
            "kv_a_layernorm": "k_norm",
        }
        if spec.q_lora_rank:
            roles |= {"q_a_proj": "q_proj", "q_b_proj": "q_b_proj", "q_a_layernorm": "q_norm"}
        else:
            roles["q_proj"] = "q_proj"
        biased = ("kv_a_proj_with_mqa", "o_proj", "q_a_proj") if config.attention_bias else ()
        found = {f"self_attn.{name}.weight": f"{role}.weight" for name, role in roles.items()}
        found |= {f"self_attn.{name}.bias": f"{role}.bias" for name, role in roles.items() if name in biased}
        return found | {f"{name}.weight": f"{name}.weight" for name in block_norms(spec)}


def _scale(config: Any) -> float:
    """Returns the factor on scores: that of the whole query, times the square of YaRN's factor for all dimensions."""
    scaling = config.rope_parameters
    scale = (config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5
    if scaling.get("rope_type", "default") == "default" or not scaling.get("mscale_all_dim"):
        return scale
    return scale * (0.1 * scaling["mscale_all_dim"] * math.log(max(1.0, scaling["factor"])) + 1.0) ** 2


def _check(config: Any) -> None:
    for key, expected in EXPECTED.items():
        if (getattr(config, key) or False) != expected:
            raise CheckpointError(
                f"config.json: {key} is true in a model of type deepseek_v2, which is not supported, expected false"
            )
    if config.topk_method not in METHODS:
        raise CheckpointError(
            f"config.json: topk_method is {config.topk_method!r}, expected {' or '.join(METHODS)} in a model of type "
            "deepseek_v2"
        )
    if config.topk_method == METHODS[1] and None in (config.n_group, config.topk_group):
        raise CheckpointError(
            f"config.json: n_group is {config.n_group} and topk_group {config.topk_group}, expected numbers of groups "
            f"with topk_method {METHODS[1]}"
        )
