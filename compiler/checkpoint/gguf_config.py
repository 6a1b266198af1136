"""Writes the config.json of a model in GGUF, from the file's keys and the names of its tensors.

The keys are named in llama.cpp's own code (src/llama-arch.cpp). A key that config.json needs and the file lacks is
refused, or has the value that llama.cpp takes. `source_config` then checks all of it as it checks any config.json.
"""

import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

from coldpress.compiler.architectures import _common
from coldpress.compiler.checkpoint.gguf_files import GgufModel
from coldpress.compiler.checkpoint.gguf_tokenizer import special_ids
from coldpress.compiler.checkpoint.source_config import ARCHITECTURES as PLUGINS
from coldpress.compiler.checkpoint.source_config import EPSILONS
from coldpress.compiler.checkpoint.tensors import read_entry
from coldpress.compiler.llama_cpp.architectures import ARCHITECTURES, LARGEST_GEMMA, LlamaCppArchitecture
from coldpress.runtime.artifact.errors import short
from coldpress.runtime.plugins import load

log = logging.getLogger(__name__)

FACTORS = "rope_freqs.weight"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
USUAL_BASE = 10000.0
MAX_FACTORS = 1 << 12
MAX_LAYERS = 1000
GEMMA3_PATTERN = 6
"""Every how many layers Gemma 3 has no window, where the file does not say."""


def source_config_of(model: GgufModel) -> dict[str, Any]:
    """The values of config.json; raises CheckpointError naming key or tensor, what was found and what was expected."""
    kind = _model_type(model)
    theirs, ours = ARCHITECTURES[kind], load(PLUGINS, _common.Architecture, kind)
    found = _sizes(model, theirs) | _biases(model) | _experts(model, theirs) | _factors(model) | _layers(model, kind)
    keys = ours.KEYS | _common.KEYS
    config = {key: value for key, value in found.items() if key in keys}
    config["model_type"] = kind
    for key in EPSILONS & keys:
        config[key] = model.number(f"attention.layer_norm_{'' if theirs.layer_norm else 'rms_'}epsilon")
    if "rope_parameters" in keys:
        config["rope_parameters"] = _rotations(model, ours, config)
    return config | special_ids(model)


def _model_type(model: GgufModel) -> str:
    name = model.architecture
    found = [kind for kind, one in ARCHITECTURES.items() if one.name == name]
    if not found:
        known = ", ".join(sorted({one.name for one in ARCHITECTURES.values()}))
        raise model.refused(f"the architecture {short(name)} is not supported in GGUF; supported are {known}")
    if len(found) == 1:
        return found[0]
    return "mixtral" if model.count("expert_count", 0) else "llama"  # they share an architecture of llama.cpp's


def _rows(model: GgufModel, name: str) -> int:
    found = model.located.get(name)
    if found is None:
        raise model.refused(f"the tensor {name} is missing, expected it in every model")
    return found.entry.shape[0]


def _sizes(model: GgufModel, theirs: LlamaCppArchitecture) -> dict[str, Any]:
    heads, hidden = _heads(model), model.count("embedding_length")
    key_heads = model.count("attention.head_count_kv", heads)
    head_dim = model.count("attention.key_length", hidden // heads)
    if not head_dim > 0 or not 0 < model.count("block_count") < MAX_LAYERS:
        raise model.refused(
            f"it has {model.count('block_count')} layers with heads of {head_dim} dimensions, expected 1 to "
            f"{MAX_LAYERS - 1} layers, and a dimension or more"
        )
    if model.count("attention.value_length", head_dim) != head_dim and not model.get("attention.kv_lora_rank"):
        raise model.refused(
            f"keys are {head_dim} wide and values {model.count('attention.value_length')}, expected equal widths"
        )
    width = model.count("feed_forward_length")
    found: dict[str, Any] = {
        "vocab_size": _rows(model, "token_embd.weight"),
        "hidden_size": hidden,
        "intermediate_size": width,
        "ffn_hidden_size": width,
        "num_hidden_layers": model.count("block_count") - model.count("nextn_predict_layers", 0),
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "num_kv_heads": key_heads,
        "max_position_embeddings": model.count("context_length"),
        "head_dim": head_dim,
        "tie_word_embeddings": "output.weight" not in model.located,
    }
    if model.get("attention.sliding_window") is not None:
        found["sliding_window"] = model.count("attention.sliding_window") or None
    return found


def _heads(model: GgufModel) -> int:
    heads, hidden = model.count("attention.head_count"), model.count("embedding_length")
    if not 0 < heads <= hidden:
        raise model.refused(f"it has {heads} attention heads of an embedding of {hidden}, expected 1 to {hidden}")
    return heads


def _biases(model: GgufModel) -> dict[str, Any]:
    """Returns the keys that say which projections have a bias: GGUF has no such keys, but the tensors."""
    attention = any(f"blk.0.{name}.bias" in model.located for name in ("attn_q", "attn_qkv"))
    return {
        **dict.fromkeys(("attention_bias", "qkv_bias", "use_qkv_bias"), attention),
        "mlp_bias": "blk.0.ffn_down.bias" in model.located,
        "bias": attention,
        "use_qk_norm": any(name.endswith(".attn_q_norm.weight") for name in model.located),
    }


def _experts(model: GgufModel, theirs: LlamaCppArchitecture) -> dict[str, Any]:
    experts = model.count("expert_count", 0)
    if not experts:
        return {}
    width = model.count("expert_feed_forward_length", model.count("feed_forward_length"))
    shared = model.count("expert_shared_count", 0)
    found: dict[str, Any] = dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), experts)
    found |= {
        "num_experts_per_tok": model.count("expert_used_count"),
        "moe_intermediate_size": width,
        "shared_expert_intermediate_size": model.count("expert_shared_feed_forward_length", width * max(1, shared)),
        "norm_topk_prob": bool(model.get("expert_weights_norm")) if theirs.normed is None else theirs.normed,
        "first_k_dense_replace": model.count("leading_dense_block_count", 0),
        "routed_scaling_factor": model.number("expert_weights_scale", 1.0) or 1.0,
    }
    if shared:
        found["n_shared_experts"] = shared
    groups = model.count("expert_group_count", 1)
    found |= {"n_group": groups, "topk_group": model.count("expert_group_used_count", 1)}
    found["topk_method"] = "group_limited_greedy" if groups > 1 else "greedy"
    gate, expected = model.count("expert_gating_func", 0), 2 if theirs.name == "glm4moe" else 1
    if gate not in (0, expected, 3 if theirs.name == "gpt-oss" else expected):
        raise model.refused(
            f"expert_gating_func is {gate}, expected {expected} in a model of the architecture {theirs.name}"
        )
    return found


def _factors(model: GgufModel) -> dict[str, Any]:
    names = {
        "embedding_scale": "embedding_multiplier",
        "residual_scale": "residual_multiplier",
        "attention.scale": "attention_multiplier",
        "logit_scale": "logits_scaling",
        "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
    }
    found: dict[str, Any] = {ours: model.number(key) for key, ours in names.items() if model.get(key) is not None}
    parallel = model.get("use_parallel_residual")
    return found | ({} if parallel is None else {"use_parallel_residual": bool(parallel)})


def _layers(model: GgufModel, kind: str) -> dict[str, Any]:
    own: dict[str, Callable[[GgufModel], dict[str, Any]]] = {
        "falcon": _falcon,
        "stablelm": _stablelm,
        "gemma2": _gemma2,
        "gemma3_text": _gemma3,
        "deepseek_v2": _latents,
    }
    return own[kind](model) if kind in own else {}


def _falcon(model: GgufModel) -> dict[str, Any]:
    two_norms = "blk.0.attn_norm_2.weight" in model.located
    key_heads = model.count("attention.head_count_kv", model.count("attention.head_count"))
    is_new = two_norms or key_heads > 1
    return {
        "new_decoder_architecture": is_new,
        "multi_query": not is_new,
        "num_ln_in_parallel_attn": (2 if two_norms else 1) if is_new else None,
    }


def _stablelm(model: GgufModel) -> dict[str, Any]:
    return {
        "use_parallel_residual": "blk.0.ffn_norm.weight" not in model.located,
        "qk_layernorm": "blk.0.attn_q_norm.weight" in model.located,
    }


def _gemma2(model: GgufModel) -> dict[str, Any]:
    equal_share = model.count("embedding_length") // _heads(model)
    is_largest = model.count("block_count") == LARGEST_GEMMA[model.architecture]
    return {"query_pre_attn_scalar": equal_share if is_largest else model.count("attention.key_length", equal_share)}


def _gemma3(model: GgufModel) -> dict[str, Any]:
    pattern, layers = model.count("attention.sliding_window_pattern", GEMMA3_PATTERN), model.count("block_count")
    kinds = ("sliding_attention", "full_attention")
    found: dict[str, Any] = {"layer_types": [kinds[pattern > 0 and (at + 1) % pattern == 0] for at in range(layers)]}
    return _gemma2(model) | found


def _latents(model: GgufModel) -> dict[str, Any]:
    if model.get("attention.key_length_mla") is not None:
        raise model.refused(
            "the matrix of its latents is stored in two parts (attention.key_length_mla), which is not supported; "
            "give the safetensors checkpoint"
        )
    rotated = model.count("rope.dimension_count")
    return {
        "kv_lora_rank": model.count("attention.kv_lora_rank"),
        "q_lora_rank": model.count("attention.q_lora_rank", 0) or None,
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": max(0, model.count("attention.key_length") - rotated),
        "v_head_dim": model.count("attention.value_length"),
    }


def _rotations(model: GgufModel, ours: _common.Architecture, config: Mapping[str, Any]) -> dict[str, Any]:
    main, kinds = _rotation(model, config), ours.MODULES.rotary
    if kinds["main"]:
        base = model.number("rope.freq_base_swa", USUAL_BASE)
        return {kinds["main"]: main, kinds["local"]: {"rope_type": "default", "rope_theta": base}}
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    if "qk_rope_head_dim" in config:
        return main
    rotated = model.count("rope.dimension_count", head_dim)
    if ours.MODULES.partial_rotary:
        main["partial_rotary_factor"] = _share(rotated, head_dim)
    elif rotated != head_dim:
        raise model.refused(
            f"{rotated} of {head_dim} dimensions of a head are rotated, expected all in a model of this architecture"
        )
    return main


def _share(part: int, whole: int) -> float:
    """Returns a factor that gives `part` of `whole`, rounded down."""
    share = part / whole
    return share if int(whole * share) == part else math.nextafter(share, 1)


def _rotation(model: GgufModel, config: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {"rope_type": "default", "rope_theta": model.number("rope.freq_base", USUAL_BASE)}
    scaling = model.text(f"{model.architecture}.rope.scaling.type") or "none"
    factor = model.number("rope.scaling.factor", model.number("rope.scale_linear", 1.0))
    if factor != 1 and scaling in ("none", "linear"):
        found |= {"rope_type": "linear", "factor": factor}
    elif scaling == "yarn":
        found |= _yarn(model, factor)
    elif scaling not in ("none", "linear", "longrope"):
        raise model.refused(f"rope.scaling.type is {short(scaling)}, expected none, linear, yarn or longrope")
    if FACTORS in model.located or LONG_FACTORS in model.located:
        if found["rope_type"] != "default":
            raise model.refused(f"it has {found['rope_type']} rotation and a factor for each frequency, expected one")
        found |= _frequency_factors(model, config)
    return found


def _yarn(model: GgufModel, factor: float) -> dict[str, Any]:
    found: dict[str, Any] = {"rope_type": "yarn", "factor": factor}
    found["original_max_position_embeddings"] = model.count("rope.scaling.original_context_length")
    for key, name in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
        if model.get(f"rope.scaling.{key}") is not None:
            found[name] = model.number(f"rope.scaling.{key}")
    if model.architecture == "gpt-oss":
        found["truncate"] = False
    growth, scores = math.log(max(1.0, factor)), model.number("rope.scaling.yarn_log_multiplier", 0.0)
    turned = model.number("rope.scaling.attn_factor", 1.0) * (1 if scores else 0.1 * growth + 1)
    found["attention_factor"] = turned
    on_scores = turned * (scores * growth + 1)  # its square multiplies DeepSeek's scores, if there is a multiplier
    if scores and growth and not math.isclose(on_scores, 1, rel_tol=1e-6):
        found["mscale_all_dim"] = (on_scores - 1) / (0.1 * growth)
    return found


def _frequency_factors(model: GgufModel, config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a rotation with a divisor for each frequency: Llama 3's, which has one for all texts, is written as
    longrope with equal factors for short and long texts."""
    context, is_same = config["max_position_embeddings"], FACTORS in model.located
    original = context if is_same else model.count("rope.scaling.original_context_length", context)
    return {
        "rope_type": "longrope",
        "short_factor": _vector(model, FACTORS if is_same else SHORT_FACTORS),
        "long_factor": _vector(model, FACTORS if is_same else LONG_FACTORS),
        "attention_factor": 1.0 if is_same else model.number("rope.scaling.attn_factor", 1.0),
        "original_max_position_embeddings": original,
    }


def _vector(model: GgufModel, name: str) -> list[float]:
    _rows(model, name)
    found = model.located[name]
    if len(found.entry.shape) != 1 or found.entry.shape[0] > MAX_FACTORS or found.entry.dtype != "F32":
        raise model.refused(
            f"the tensor {name} has the shape {list(found.entry.shape)} and the type {found.entry.dtype}, expected "
            f"a vector of up to {MAX_FACTORS} numbers F32"
        )
    return [float(value) for value in read_entry(found.path, found.entry, 0, found.entry.shape[0])]
