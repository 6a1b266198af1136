"""Reads a transformers model as the runtime's tests need it: its ModelSpec, and its tensors by role in float32.

It does not use compiler/architectures: the runtime's decoder is tested against transformers alone.
"""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from coldpress.schemas.model import ModelSpec

NORMS_AFTER = ("olmo2",)
"""Models with norms of the outputs of attention and MLP, and with norms of q and k over all heads together."""
RENAMED = {
    "out_proj": "o_proj",
    "fc1": "up_proj",
    "fc2": "down_proj",
    "self_attn_layer_norm": "input_layernorm",
    "final_layer_norm": "post_attention_layernorm",
}


def load_hf(folder: Path) -> Any:
    """Loads the model of a folder, or of a GGUF file by transformers' own decoder, in float32 and evaluation mode."""
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    torch.set_num_threads(1)
    if folder.suffix == ".gguf":
        whole: dict[str, Any] = {"gguf_file": folder.name, "quantization_config": GgufConfig(dequantize=True)}
        return AutoModelForCausalLM.from_pretrained(folder.parent, dtype=torch.float32, **whole).eval()
    if json.loads((folder / "config.json").read_text())["model_type"] == "bamboo":
        return _bamboo(folder)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def _bamboo(folder: Path) -> Any:
    """Loads transformers' Mistral and replaces its MLP by the published formula of dReLU."""
    import torch
    from transformers import MistralConfig, MistralForCausalLM

    values = json.loads((folder / "config.json").read_text())
    values.pop("model_type")
    model = MistralForCausalLM.from_pretrained(folder, config=MistralConfig(**values), dtype=torch.float32).eval()
    for layer in model.model.layers:
        mlp: Any = layer.mlp
        mlp.forward = lambda x, mlp=mlp: mlp.down_proj(torch.relu(mlp.gate_proj(x)) * torch.relu(mlp.up_proj(x)))
    model.config.model_type = "bamboo"
    return model


def spec_of(config: Any) -> ModelSpec:
    """Returns the ModelSpec of a transformers config."""
    is_opt, is_nemotron = config.model_type == "opt", config.model_type == "nemotron"
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    types = tuple(getattr(config, "layer_types", None) or ())
    rotary = {} if is_opt else config.rope_parameters
    return ModelSpec(
        model_type=config.model_type,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.ffn_dim if is_opt else config.intermediate_size,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=heads,
        num_key_value_heads=heads if is_opt else config.num_key_value_heads,
        head_dim=head_dim,
        max_position_embeddings=config.max_position_embeddings,
        hidden_act=_activation(config),
        activation_threshold=getattr(config, "swiglu_limit", 0.0),
        attention_sinks=config.model_type == "gpt_oss",
        num_experts=getattr(config, "num_local_experts", 1),
        num_experts_per_tok=getattr(config, "num_experts_per_tok", 1),
        gated_mlp=config.model_type not in ("opt", "arcee", "nemotron"),
        norm="layer_norm" if is_opt else "layer_norm_1p" if is_nemotron else "rms_norm",
        norm_eps=1e-5 if is_opt else config.norm_eps if is_nemotron else config.rms_norm_eps,
        position="learned" if is_opt else "rotary",
        rotary_dim=0 if is_opt else int(head_dim * rotary.get("partial_rotary_factor", 1)),
        rotary_scaling=_rotary_scaling(rotary, config.max_position_embeddings),
        position_offset=2 if is_opt else 0,
        norm_placement="after" if config.model_type in NORMS_AFTER else "before",
        qk_norm="width" if config.model_type in NORMS_AFTER else "head",
        sliding_window=None if is_opt else window,
        layer_types=types if window and len(set(types)) > 1 else (),
        tie_word_embeddings=config.tie_word_embeddings,
        bos_token_id=config.bos_token_id,
        eos_token_ids=(config.eos_token_id,),
    )


def _activation(config: Any) -> Any:
    if config.model_type in ("bamboo", "gpt_oss"):
        return {"bamboo": "drelu", "gpt_oss": "swiglu_oai"}[config.model_type]
    return config.activation_function if config.model_type == "opt" else config.hidden_act


def _rotary_scaling(rotary: dict[str, Any], context: int) -> float:
    """Returns the factor of cos and sin: YaRN's formula (Peng et al. 2023, section 3.4), and longrope's."""
    kind, original = rotary.get("rope_type"), rotary.get("original_max_position_embeddings") or context
    if kind == "yarn":
        return 0.1 * math.log(rotary["factor"]) + 1
    if kind == "longrope" and context > original:
        return math.sqrt(1 + math.log(context / original) / math.log(original))
    return 1.0


def roles_of(model: Any, spec: ModelSpec) -> dict[str, np.ndarray]:
    """Returns role -> float32 array; splits fused projections and translates OPT's names."""
    roles: dict[str, np.ndarray] = {}
    for name, tensor in model.state_dict().items():
        parts = role_of(name).split(".")
        values = np.ascontiguousarray(tensor.numpy(), np.float32)
        roles |= _split(parts, values, spec)
    if spec.tie_word_embeddings:
        roles.pop("lm_head.weight", None)
    if spec.position == "rotary":
        roles["rotary.inv_freq"] = model.model.rotary_emb.inv_freq.numpy().astype(np.float32)
    return roles


def role_of(name: str) -> str:
    """Returns the role of a parameter of transformers; of a fused projection the name without prefixes."""
    parts = (
        name.removeprefix("model.").removeprefix("decoder.").replace("self_attn.", "").replace("mlp.", "").split(".")
    )
    if parts[0] == "layers":
        parts[2] = RENAMED.get(parts[2], parts[2])
    elif parts[0] == "final_layer_norm":
        parts[0] = "norm"
    return ".".join(parts)


def _split(parts: list[str], values: np.ndarray, spec: ModelSpec) -> dict[str, np.ndarray]:
    queries, keys = spec.num_attention_heads * spec.head_dim, spec.num_key_value_heads * spec.head_dim
    if parts[2:3] == ["gate"]:
        return {".".join([*parts[:2], "router", *parts[3:]]): values}
    if parts[2:3] == ["sinks"]:
        return {".".join([*parts[:2], "attention.sinks"]): values}
    if parts[2:3] == ["experts"]:
        return (_of_gpt_oss if spec.attention_sinks else _of_experts)(parts, values)
    fused = {
        "qkv_proj": (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)),
        "gate_up_proj": (("gate_proj", spec.intermediate_size), ("up_proj", spec.intermediate_size)),
    }
    if parts[0] != "layers" or parts[2] not in fused:
        return {".".join(parts): values}
    found, start = {}, 0
    for name, num_rows in fused[parts[2]]:
        found[".".join([*parts[:2], name, *parts[3:]])] = np.ascontiguousarray(values[start : start + num_rows])
        start += num_rows
    return found


def _of_experts(parts: list[str], values: np.ndarray) -> dict[str, np.ndarray]:
    """Splits transformers' tensors of all E experts: gate and up are [E, 2F, N], down is [E, N, F]."""
    found: dict[str, np.ndarray] = {}
    for expert, matrix in enumerate(values):
        prefix = ".".join([*parts[:3], str(expert)])
        if parts[3] == "down_proj":
            found[f"{prefix}.down_proj.weight"] = np.ascontiguousarray(matrix)
        else:
            gate, up = np.split(matrix, 2)
            found |= {f"{prefix}.gate_proj.weight": np.ascontiguousarray(gate)}
            found |= {f"{prefix}.up_proj.weight": np.ascontiguousarray(up)}
    return found


def _of_gpt_oss(parts: list[str], values: np.ndarray) -> dict[str, np.ndarray]:
    """Splits the same of gpt-oss: gate and up are [E, N, 2F], column by column in turn, down is [E, F, N]; and biases,
    [E, 2F] and [E, N]."""
    found: dict[str, np.ndarray] = {}
    name, kind = parts[3].removesuffix("_bias"), "bias" if parts[3].endswith("_bias") else "weight"
    for expert, entry in enumerate(values):
        rows, prefix = entry.T, ".".join([*parts[:3], str(expert)])
        own = {"down_proj": rows} if name == "down_proj" else {"gate_proj": rows[::2], "up_proj": rows[1::2]}
        found |= {f"{prefix}.{role}.{kind}": np.ascontiguousarray(one) for role, one in own.items()}
    return found


def half_cache(model: Any) -> Any:
    """Returns an empty cache for transformers that rounds keys and values to fp16, as an artifact's cache stores them.

    The model still computes in float32, so that this rounding is all that differs from the model as it is.
    """
    from transformers import DynamicCache

    class HalfCache(DynamicCache):
        def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
            rounded = (part.half().float() for part in (key_states, value_states))
            return super().update(*rounded, *args, **kwargs)

    return HalfCache(config=model.config)


def greedy(model: Any, prompt_ids: list[int], num_new: int) -> tuple[list[int], np.ndarray]:
    """Returns transformers' greedy continuation, not ended by end-of-sequence tokens, and its logits [num_new, V]."""
    import torch

    done = model.generate(
        torch.tensor([prompt_ids]),
        attention_mask=torch.ones(1, len(prompt_ids), dtype=torch.long),
        max_new_tokens=num_new,
        min_new_tokens=num_new,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    logits = torch.cat(done.logits).float().numpy()
    return done.sequences[0, len(prompt_ids) :].tolist(), logits


def all_logits(model: Any, token_ids: list[int], *, half_keys: bool = False) -> np.ndarray:
    """Returns the logits at every position, float32 [T, V]; `half_keys` rounds keys and values to fp16."""
    import torch

    with torch.no_grad():
        cache = half_cache(model) if half_keys else None
        return model(torch.tensor([token_ids]), past_key_values=cache).logits[0].float().numpy()
