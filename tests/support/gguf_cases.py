"""Models whose arithmetic has more than a plain Llama, each with an architecture of llama.cpp's."""

from typing import Any

LATENTS = {"rms_norm_eps": 1e-6}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "original_max_position_embeddings": 4096}
WITH_MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "granite": ("granite", {"attention_bias": True}),
    "granite plain": ("granite", {"attention_multiplier": 0.25, "embedding_multiplier": 1.0}),
    "granitemoe": ("granitemoe", {"num_local_experts": 11, "num_experts_per_tok": 3}),
    "granitemoe biases": (
        "granitemoe",
        {
            "attention_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "smollm3": ("smollm3", {"tie_word_embeddings": True}),
    "gemma2": ("gemma2", {"query_pre_attn_scalar": 32, "tie_word_embeddings": True, "attn_logit_softcapping": 4.0}),
    "gemma3": ("gemma3_text", {"query_pre_attn_scalar": 32}),
    "gemma3 every third": ("gemma3_text", {"query_pre_attn_scalar": 32, "sliding_window_pattern": 3}),
    "phi": ("phi", {"hidden_act": "gelu_new"}),
    "gpt_neox": ("gpt_neox", {}),
    "gpt_neox one after the other": ("gpt_neox", {"use_parallel_residual": False}),
    "falcon": ("falcon", {"tie_word_embeddings": True}),
    "falcon new": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "stablelm": ("stablelm", {"use_qkv_bias": True}),
    "stablelm parallel": ("stablelm", {"use_parallel_residual": True}),
    "glm4": ("glm4", {}),
    "olmo2": ("olmo2", {}),
    "phi3": ("phi3", {"partial_rotary_factor": 0.5}),
    "phi3 longrope": (
        "phi3",
        {
            "partial_rotary_factor": 0.5,
            "original_max_position_embeddings": 64,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.5, 1.0, 2.5, 4.0],
                "long_factor": [2.0, 3.0, 5.0, 9.0],
            },
        },
    ),
    "glm4_moe": (
        "glm4_moe",
        {"use_qk_norm": True, "attention_bias": True, "n_routed_experts": 11, "num_experts_per_tok": 3},
    ),
    "glm4_moe groups": (
        "glm4_moe",
        {
            "first_k_dense_replace": 3,
            "n_routed_experts": 12,
            "n_group": 4,
            "topk_group": 2,
            "num_experts_per_tok": 3,
            "n_shared_experts": 2,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.5,
        },
    ),
    "deepseek_v2": ("deepseek_v2", LATENTS),
    "deepseek_v2 latents of queries": (
        "deepseek_v2",
        LATENTS
        | {
            "q_lora_rank": 32,
            "n_routed_experts": 11,
            "num_experts_per_tok": 3,
            "first_k_dense_replace": 3,
            "n_shared_experts": 1,
            "tie_word_embeddings": True,
            "rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
        },
    ),
    "deepseek_v2 other factors": (
        "deepseek_v2",
        LATENTS
        | {
            "first_k_dense_replace": 0,
            "rope_parameters": YARN
            | {"original_max_position_embeddings": 64, "rope_theta": 50000.0, "mscale": 1.5, "mscale_all_dim": 0.8},
        },
    ),
    "deepseek_v2 no factor for all": ("deepseek_v2", LATENTS | {"rope_parameters": YARN | {"factor": 4.0}}),
    "deepseek_v2 linear": (
        "deepseek_v2",
        LATENTS | {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}},
    ),
}
