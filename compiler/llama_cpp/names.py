"""llama.cpp's names of a model's tensors, from the tables of the package `gguf`."""

from dataclasses import replace

import gguf

from coldpress.compiler.llama_cpp.architectures import (
    ARCHITECTURES,
    FALCON_TWO_NORMS,
    LATENT_QUERIES,
    TENSOR,
    LlamaCppArchitecture,
)
from coldpress.schemas.model import ModelSpec

MODULES = {
    "embed_tokens": TENSOR.TOKEN_EMBD,
    "norm": TENSOR.OUTPUT_NORM,
    "lm_head": TENSOR.OUTPUT,
    "input_layernorm": TENSOR.ATTN_NORM,
    "q_proj": TENSOR.ATTN_Q,
    "k_proj": TENSOR.ATTN_K,
    "v_proj": TENSOR.ATTN_V,
    "o_proj": TENSOR.ATTN_OUT,
    "q_norm": TENSOR.ATTN_Q_NORM,
    "k_norm": TENSOR.ATTN_K_NORM,
    "post_attention_layernorm": TENSOR.FFN_NORM,
    "qkv_proj": TENSOR.ATTN_QKV,
    "q_b_proj": TENSOR.ATTN_Q_B,
    "kv_b_proj": TENSOR.ATTN_KV_B,
    "gate_proj": TENSOR.FFN_GATE,
    "up_proj": TENSOR.FFN_UP,
    "down_proj": TENSOR.FFN_DOWN,
    "router": TENSOR.FFN_GATE_INP,
    "shared_expert_gate": TENSOR.FFN_GATE_INP_SHEXP,
}
"""Our names of modules, without the layer."""
STACKED = {"gate_proj": TENSOR.FFN_GATE_EXP, "up_proj": TENSOR.FFN_UP_EXP, "down_proj": TENSOR.FFN_DOWN_EXP}
"""Modules of experts: their matrices are stacked in one tensor."""
OF_SHARED = {"gate_proj": TENSOR.FFN_GATE_SHEXP, "up_proj": TENSOR.FFN_UP_SHEXP, "down_proj": TENSOR.FFN_DOWN_SHEXP}
AROUND = {
    "post_attention_layernorm": TENSOR.ATTN_POST_NORM,
    "pre_feedforward_layernorm": TENSOR.FFN_NORM,
    "post_feedforward_layernorm": TENSOR.FFN_POST_NORM,
}
"""Modules of models with norms before and after the blocks."""
SAME_NAME = {TENSOR.FFN_NORM: TENSOR.FFN_PRE_NORM}
"""Two tensors with the same name: the tables of `gguf` list the one for some architectures, the other for others."""
NORMS = ("norm", "input_layernorm", *AROUND)
QK_NORMS = ("q_norm", "k_norm")


def named(spec: ModelSpec) -> LlamaCppArchitecture | None:
    """Returns llama.cpp's architecture of that name, with the tensors that the model has; None if it has none."""
    found = ARCHITECTURES.get(spec.model_type)
    if found is None:
        return None
    two_norms = found.name == "falcon" and spec.residual == "parallel"
    others = (FALCON_TWO_NORMS if two_norms else {}) | (LATENT_QUERIES if spec.q_lora_rank else {})
    return replace(found, modules={**found.modules, **others})


def tensor_name(architecture: LlamaCppArchitecture, role: str) -> str | None:
    """Returns llama.cpp's name of a role's tensor; all experts share one tensor. None if there is no such tensor."""
    *before, module, kind = role.split(".")
    module = next((name for name, members in architecture.fused.items() if module in members), module)
    own = (AROUND if "norm_placement.around" in architecture.extensions else {}) | {**architecture.modules}
    of_part = {"experts": STACKED, "shared_expert": OF_SHARED}
    tensor = next((names for part, names in of_part.items() if part in before), MODULES | own).get(module)
    known = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture.name)
    if tensor not in gguf.MODEL_TENSORS[known]:
        tensor = SAME_NAME.get(tensor) if tensor else None
    has_bias = module in architecture.biases or (module in NORMS and architecture.layer_norm)
    if kind == "sinks":
        kind = "weight"
    if kind == "correction":
        tensor, kind, has_bias = TENSOR.FFN_EXP_PROBS_B, "bias", True
    if tensor is None or tensor not in gguf.MODEL_TENSORS[known] or (kind == "bias" and not has_bias):
        return None
    return f"{gguf.TENSOR_NAMES[tensor].format(bid=before[1] if before else 0)}.{kind}"


def counts_from_one(spec: ModelSpec, role: str) -> bool:
    """Returns whether a tensor is a norm's weight that the model stores as its difference from 1; llama.cpp adds it."""
    is_norm = role.split(".")[-2] in (*NORMS, *QK_NORMS) and role.endswith("weight")
    return spec.norm.endswith("_1p") and is_norm
