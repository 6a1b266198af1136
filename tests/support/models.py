"""Writes tiny random Hugging Face checkpoints of every supported architecture.
The weights are scaled so that greedy continuations wander and, with `relu`, about a sixth of the neurons fire: the
embeddings share one direction that the gates lean against. Same arguments, same bytes.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

BY_HAND = (
    "arcee",
    "bamboo",
    "deepseek_v2",
    "glm4_moe",
    "gpt_oss",
    "granitemoe",
    "llama",
    "mistral",
    "mixtral",
    "nemotron",
    "olmoe",
    "opt",
    "phi3",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
)
"""Models whose tensors are listed here, so that writing them needs no torch; transformers lists those of the others."""
BY_TRANSFORMERS = (
    "falcon",
    "gemma2",
    "gemma3_text",
    "glm4",
    "gpt_neox",
    "granite",
    "olmo2",
    "phi",
    "smollm3",
    "stablelm",
)
MODEL_TYPES = tuple(sorted((*BY_HAND, *BY_TRANSFORMERS)))
MIXTURES = ("deepseek_v2", "glm4_moe", "gpt_oss", "granitemoe", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe")
"""Models with several experts, in which only the router chooses units."""
UNGATED = ("arcee", "nemotron")
FROM_ONE = ("gemma2", "gemma3_text", "nemotron")
"""Models that store the difference of a norm's weights from 1."""
NORMS_AROUND = ("gemma2", "gemma3_text", "glm4")
"""Models with a norm before and after each block."""
RELU_TYPES = ("arcee", "bamboo", "nemotron")
"""Models whose activation is always of the ReLU family, whatever `relu` says."""
SMOOTH_TYPES = ("gpt_oss",)
"""Models whose activation is never of the ReLU family."""
OUTPUTS = (
    "o_proj",
    "out_proj",
    "down_proj",
    "output_linear",
    "fc2",
    "w2",
    "dense_4h_to_h",
    "attention.dense",
    "self_attn.dense",
)
"""Parts of the names of matrices whose results are added to the hidden states."""
EXPERTS: dict[str, dict[str, Any]] = {
    "deepseek_v2": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 2,
        "routed_scaling_factor": 1.5,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 32,
        "q_lora_rank": None,
        "qk_nope_head_dim": 24,
        "qk_rope_head_dim": 16,
        "v_head_dim": 20,
        "num_key_value_heads": 4,
    },
    "glm4_moe": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "routed_scaling_factor": 1.5,
        "first_k_dense_replace": 1,
        "use_qk_norm": True,
        "num_nextn_predict_layers": 0,
        "partial_rotary_factor": 0.5,
    },
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 32, "sliding_window": 20},
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": False},
    "qwen2_moe": {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": False},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True, "head_dim": 32},
}
"""Keys of mixtures."""
COUNTED = {
    "deepseek_v2": "n_routed_experts",
    "glm4_moe": "n_routed_experts",
    "granitemoe": "num_local_experts",
    "mixtral": "num_local_experts",
}
"""Keys with the number of experts, where it is not `num_experts`."""
MATRICES = ("gate_proj", "up_proj", "down_proj")
PREFIXES = {
    "deepseek_v2": "DeepseekV2",
    "glm4_moe": "Glm4Moe",
    "gpt_oss": "GptOss",
    "granitemoe": "GraniteMoe",
    "qwen2_moe": "Qwen2Moe",
    "olmoe": "Olmoe",
    "qwen3_moe": "Qwen3Moe",
}
"""Beginnings of class names that are not the capitalized model_type."""
DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}

TEXT = """The kettle had boiled dry twice before anyone noticed the smell of hot iron in the narrow kitchen.

A river remembers its old bed: after heavy rain the water looks for the meadow where it used to run.

She counted the steps to the lighthouse every evening, and every evening there were one hundred and twelve of them.

To build a boat you need a flat place, dry wood, a patient friend and a winter with nothing else to do.

When the train stopped between two stations the passengers began, one after another, to tell where they had been.

Bread wants time more than strength; leave the dough alone and it will do most of the work by itself.

The map was wrong about the bridge, but it was right about the hill, the church and the three tall trees.
"""


def documents(count: int = 60) -> list[str]:
    """Returns `count` different short paragraphs."""
    lines = [line for line in TEXT.splitlines() if line]
    return [f"Page {i}. {lines[i % len(lines)]} {lines[(i * 3 + i // 7) % len(lines)]}" for i in range(count)]


def write_corpus(path: Path, count: int = 60) -> Path:
    """Writes a text file of `count` paragraphs with blank lines between them."""
    path.write_text("\n\n".join(documents(count)) + "\n", encoding="utf-8")
    return path


def encode(values: np.ndarray, dtype: str) -> bytes:
    """Returns the bytes of values as `float32`, `float16` or `bfloat16` (rounded to nearest even)."""
    values = np.ascontiguousarray(values, np.float32)
    if dtype == "bfloat16":
        bits = values.view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").tobytes()
    return values.astype("<f2" if dtype == "float16" else "<f4").tobytes()


def write_safetensors(path: Path, tensors: Mapping[str, tuple[str, tuple[int, ...], bytes]]) -> Path:
    """Writes tensors, name -> (dtype code, shape, bytes), to a safetensors file in the order given."""
    header: dict[str, Any] = {}
    offset = 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(data for _, _, data in tensors.values()))
    return path


def write_model(
    folder: Path,
    model_type: str = "llama",
    *,
    num_hidden_layers: int = 12,
    relu: bool = False,
    hidden_size: int = 64,
    intermediate_size: int = 160,
    vocab_size: int = 384,
    context: int = 256,
    tie: bool = False,
    dtype: str = "float32",
    num_shards: int = 1,
    seed: int = 0,
    add_bos_token: bool = True,
    tokenizer_size: int | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> Path:
    """Writes config.json, weights (`num_shards` files), tokenizer.json and tokenizer_config.json; returns `folder`.

    The tokenizer has as many tokens as the embeddings have rows, or `tokenizer_size`. `overrides` replaces keys of
    config.json before the weights are shaped (`num_key_value_heads`, `attention_bias`, `head_dim`, `rope_parameters`,
    …).
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = _config(model_type, num_hidden_layers, relu, hidden_size, intermediate_size, vocab_size, context)
    config |= {"tie_word_embeddings": tie, "dtype": dtype, **(overrides or {})}
    config = {key: value for key, value in config.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    write_weights(folder, random_weights(config, seed), dtype, num_shards)
    write_tokenizer(folder, tokenizer_size or vocab_size, add_bos_token)
    return folder


def write_weights(folder: Path, weights: Mapping[str, np.ndarray], dtype: str = "float32", num_shards: int = 1) -> None:
    """Writes float32 `weights` as model.safetensors, or as shards with an index."""
    coded = {name: (DTYPES[dtype], values.shape, encode(values, dtype)) for name, values in weights.items()}
    if num_shards == 1:
        write_safetensors(folder / "model.safetensors", coded)
        return
    names = list(coded)
    weight_map: dict[str, str] = {}
    for shard in range(num_shards):
        file = f"model-{shard + 1:05d}-of-{num_shards:05d}.safetensors"
        part = names[len(names) * shard // num_shards : len(names) * (shard + 1) // num_shards]
        write_safetensors(folder / file, {name: coded[name] for name in part})
        weight_map |= dict.fromkeys(part, file)
    total = sum(len(data) for _, _, data in coded.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def write_tokenizer(folder: Path, vocab_size: int, add_bos_token: bool = True) -> None:
    """Trains a byte-level BPE tokenizer of `vocab_size` entries on this module's text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "add_bos_token": add_bos_token,
        "bos_token": "<s>",
        "eos_token": "</s>",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))


def _config(
    model_type: str, layers: int, relu: bool, hidden: int, intermediate: int, vocab: int, context: int
) -> dict[str, Any]:
    common: dict[str, Any] = {
        "model_type": model_type,
        "vocab_size": vocab,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "max_position_embeddings": context,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": None,
        "attention_dropout": 0.0,
        "use_cache": True,
    }
    if model_type == "opt":
        return common | {
            "architectures": ["OPTForCausalLM"],
            "ffn_dim": intermediate,
            "word_embed_proj_dim": hidden,
            "do_layer_norm_before": True,
            "activation_function": "relu" if relu else "gelu",
            "enable_bias": True,
            "dropout": 0.0,
            "pad_token_id": 1,
        }
    activation = {"arcee": "relu2", "nemotron": "relu2", "bamboo": "relu", "gpt_oss": "silu"}
    config = common | {
        "architectures": [f"{PREFIXES.get(model_type, model_type.capitalize())}ForCausalLM"],
        "intermediate_size": intermediate,
        "num_key_value_heads": 2,
        "hidden_act": activation.get(model_type, "relu" if relu else "silu"),
        "norm_eps" if model_type == "nemotron" else "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    return _with_own_keys(model_type, config, relu)


def _with_own_keys(model_type: str, config: dict[str, Any], relu: bool) -> dict[str, Any]:
    """Returns Llama's configuration with the keys of another architecture."""
    if model_type == "nemotron":
        config["rope_parameters"]["partial_rotary_factor"] = 0.5
    if model_type in ("falcon", "gpt_neox", "phi", "stablelm"):
        del config["rms_norm_eps"]
        config["layer_norm_epsilon" if model_type == "falcon" else "layer_norm_eps"] = 1e-5
    if model_type in ("falcon", "gpt_neox", "phi"):
        del config["num_key_value_heads"], config["hidden_act"]
        config["activation" if model_type == "falcon" else "hidden_act"] = "relu" if relu else "gelu"
    if model_type == "falcon":
        config["ffn_hidden_size"] = config.pop("intermediate_size")
    if model_type in ("gemma2", "gemma3_text"):
        del config["hidden_act"]
        config |= {"hidden_activation": "relu" if relu else "gelu_pytorch_tanh", "head_dim": 32}
        config |= {"query_pre_attn_scalar": 24, "sliding_window": 20}
    if model_type == "gemma3_text":
        config["rope_parameters"] = {"full_attention": {"rope_theta": 50000.0}}
    if model_type == "gpt_oss":
        config |= {"attention_bias": True, "swiglu_limit": 0.75}
    if model_type in ("granite", "granitemoe"):
        config |= {"embedding_multiplier": 3.0, "attention_multiplier": 0.2}
        config |= {"residual_multiplier": 0.6, "logits_scaling": 2.0}
    if model_type == "qwen3":
        config |= {"head_dim": 32, "attention_bias": False}  # wider than hidden_size / heads, as in real checkpoints
    if model_type in ("mistral", "bamboo", "mixtral"):
        config |= {"sliding_window": 48}
    if model_type in ("deepseek_v2", "glm4_moe", "qwen2_moe", "qwen3_moe"):  # layers without experts are wider
        width = config["intermediate_size"]
        config |= {"moe_intermediate_size": width, "intermediate_size": 2 * width}
        config |= {"shared_expert_intermediate_size": width + 32} if model_type == "qwen2_moe" else {}
    return config | EXPERTS.get(model_type, {})


def random_weights(config: Mapping[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """Returns random float32 weights for `config`, by Hugging Face's names."""
    kind = config["model_type"]
    listed = {"opt": _opt_shapes, **dict.fromkeys(set(BY_HAND) - {"opt"}, _llama_shapes)}
    shapes = listed.get(kind, _shapes_by_transformers)(config)
    rng = np.random.default_rng(seed)
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    shared = np.where(np.arange(hidden) % 2, 1.0, -1.0) / np.sqrt(hidden)  # mean 0, so LayerNorm keeps it
    gain = 1.0 if config["tie_word_embeddings"] else 0.6
    weights: dict[str, np.ndarray] = {}
    for name, shape in shapes.items():
        if len(shape) == 1 and name.endswith(".weight"):
            values = rng.uniform(0.7, 1.3, shape)
            if ".layers." not in name and config["tie_word_embeddings"]:  # else every token's successor is itself
                values *= rng.choice([-1.0, 1.0], shape)
            if "post_" in name and kind in NORMS_AROUND:  # else the blocks outweigh the embedding
                values *= 0.3
            values -= kind in FROM_ONE
        elif name.endswith("bias"):
            values = rng.normal(0, 0.1, shape)
        elif name.endswith("sinks"):
            values = rng.normal(0, 1.0, shape)
        elif "embed" in name or name == "lm_head.weight":
            values = rng.normal(0, 2 / np.sqrt(hidden), shape)
            if name == "lm_head.weight":  # tokens follow a random cycle, so that text does not repeat soon
                cycle = rng.permutation(shape[0])
                values[cycle] += 2 * next(iter(weights.values()))[np.roll(cycle, 1)]
            values += 2 * shared
        else:
            width = config.get("intermediate_size", shape[0])
            turned = kind == "gpt_oss" and len(shape) == 3
            *experts, rows, columns = (shape[0], shape[2], shape[1]) if turned else shape
            each = [_matrix(rng, (rows, columns), name, (gain, layers), shared) for _ in range(*experts or [1])]
            if any(part in name for part in _deciding(kind)):
                for matrix in each:
                    matrix[:width] -= 0.2 * shared
            values = np.stack([matrix.T if turned else matrix for matrix in each]) if experts else each[0]
        weights[name] = values.astype(np.float32)
    return weights


def _matrix(
    rng: np.random.Generator, shape: tuple[int, int], name: str, gain: tuple[float, int], shared: np.ndarray
) -> np.ndarray:
    values = rng.normal(0, 1 / np.sqrt(shape[1]), shape)
    if any(part in name for part in OUTPUTS):
        return (values - values.mean(axis=1, keepdims=True)) * gain[0] / np.sqrt(2 * gain[1])
    if shape[1] != len(shared):  # it takes latents, which do not have the shared direction
        return values
    return values - np.outer(values @ shared, shared)  # only the gates may see it, else all positions become similar


def _deciding(model_type: str) -> tuple[str, ...]:
    """Returns parts of the names of the matrices whose sign decides which neurons fire."""
    if model_type in MIXTURES:  # their routers are called gate
        return ("w1", "gate_proj", "input_linear")
    return ("up_proj",) if model_type in UNGATED else ("gate", "fc1", "dense_h_to_4h")


def _llama_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, intermediate = config["hidden_size"], config["intermediate_size"]
    head_dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    queries, keys = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    kind = config["model_type"]
    parts = ("weight", "bias") if kind == "nemotron" else ("weight",)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        linears: dict[str, tuple[int, ...]]
        linears = {"self_attn.o_proj": (hidden, queries), "mlp.down_proj": (hidden, intermediate)}
        if kind == "deepseek_v2":
            linears = _latent_shapes(config) | _expert_shapes(config, layer)
        elif kind in MIXTURES:
            linears: dict[str, tuple[int, ...]] = {
                "self_attn.o_proj": (hidden, queries),
                "self_attn.q_proj": (queries, hidden),
            }
            linears |= {f"self_attn.{name}_proj": (keys, hidden) for name in "kv"}
            linears |= _expert_shapes(config, layer)
        elif kind == "phi3":
            linears["self_attn.qkv_proj"] = (queries + 2 * keys, hidden)
            linears["mlp.gate_up_proj"] = (2 * intermediate, hidden)
        else:
            linears |= {f"self_attn.{name}_proj": (keys, hidden) for name in "kv"}
            linears["self_attn.q_proj"] = (queries, hidden)
            inner = ("up",) if kind in UNGATED else ("gate", "up")
            linears |= {f"mlp.{name}_proj": (intermediate, hidden) for name in inner}
        biased = "qkv" if kind == "qwen2" or config.get("qkv_bias", kind == "qwen2_moe") else ""
        if config.get("attention_bias") and kind != "deepseek_v2":
            biased = "qkv" if kind == "glm4_moe" else "qkvo"
        for name, shape in linears.items():
            shapes[f"{prefix}{name}.weight"] = shape
            if (name.startswith("mlp.") and config.get("mlp_bias")) or (name[:9] == "self_attn" and name[10] in biased):
                shapes[f"{prefix}{name}.bias"] = shape[:1]
        if kind == "deepseek_v2":
            shapes |= {f"{prefix}self_attn.{name}": shape for name, shape in _latent_vectors(config).items()}
        norms = ("input_layernorm", "post_attention_layernorm")
        shapes |= {f"{prefix}{name}.{part}": (hidden,) for name in norms for part in parts}
        if kind == "glm4_moe" and "mlp.gate" in linears:
            shapes[f"{prefix}mlp.gate.e_score_correction_bias"] = linears["mlp.gate"][:1]
        if kind in ("qwen3", "qwen3_moe") or config.get("use_qk_norm"):
            shapes |= {f"{prefix}self_attn.{name}_norm.weight": (head_dim,) for name in "qk"}
        if kind == "gpt_oss":
            shapes[f"{prefix}self_attn.sinks"] = (config["num_attention_heads"],)
            shapes |= {f"{prefix}{name}": shape for name, shape in _gpt_oss_shapes(config).items()}
        if kind == "olmoe":
            shapes |= {f"{prefix}self_attn.{name}_norm.weight": (of,) for name, of in (("q", queries), ("k", keys))}
    shapes |= {f"model.norm.{part}": (hidden,) for part in parts}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    return shapes


def _shapes_by_transformers(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Returns the tensor shapes of any model that transformers has, embeddings first."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    values = {key: value for key, value in config.items() if key not in ("model_type", "architectures")}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(config["model_type"], **values))
    shapes = {name: tuple(values.shape) for name, values in model.state_dict().items()}
    return {
        name: shape for name, shape in shapes.items() if name != "lm_head.weight" or not config["tie_word_embeddings"]
    }


def _expert_shapes(config: Mapping[str, Any], layer: int) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the router and the experts of a layer, or of its MLP if it has no experts."""
    kind, hidden = config["model_type"], config["hidden_size"]
    if kind == "gpt_oss":
        return {}
    if layer < config.get("first_k_dense_replace", 0) or layer in config.get("mlp_only_layers", ()):
        return _mlp_shapes("mlp.", MATRICES, hidden, config["intermediate_size"])
    if (layer + 1) % config.get("decoder_sparse_step", 1):
        return _mlp_shapes("mlp.", MATRICES, hidden, config["intermediate_size"])
    intermediate = config.get("moe_intermediate_size", config["intermediate_size"])
    experts = config[COUNTED.get(kind, "num_experts")]
    if kind == "granitemoe":
        block = "block_sparse_moe"
        shapes = {f"{block}.input_linear": (experts, 2 * intermediate, hidden)}
        return shapes | {
            f"{block}.output_linear": (experts, hidden, intermediate),
            f"{block}.router.layer": (experts, hidden),
        }
    block, names = ("block_sparse_moe", ("w1", "w3", "w2")) if kind == "mixtral" else ("mlp", MATRICES)
    shapes: dict[str, tuple[int, ...]] = {f"{block}.gate": (experts, hidden)}
    for expert in range(experts):
        shapes |= _mlp_shapes(f"{block}.experts.{expert}.", names, hidden, intermediate)
    if kind == "qwen2_moe":
        shapes |= _mlp_shapes("mlp.shared_expert.", MATRICES, hidden, config["shared_expert_intermediate_size"])
        shapes["mlp.shared_expert_gate"] = (1, hidden)
    if kind in ("deepseek_v2", "glm4_moe"):
        shapes |= _mlp_shapes("mlp.shared_experts.", MATRICES, hidden, intermediate * config["n_shared_experts"])
    return shapes


def _latent_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the matrices of DeepSeek-V2's attention."""
    hidden, heads, latent = config["hidden_size"], config["num_attention_heads"], config["kv_lora_rank"]
    fixed, turned, values = (config[f"{name}_head_dim"] for name in ("qk_nope", "qk_rope", "v"))
    shapes: dict[str, tuple[int, ...]] = {"kv_a_proj_with_mqa": (latent + turned, hidden)}
    shapes |= {"kv_b_proj": (heads * (fixed + values), latent), "o_proj": (hidden, heads * values)}
    if config["q_lora_rank"] is None:
        shapes["q_proj"] = (heads * (fixed + turned), hidden)
    else:
        shapes["q_a_proj"] = (config["q_lora_rank"], hidden)
        shapes["q_b_proj"] = (heads * (fixed + turned), config["q_lora_rank"])
    return {f"self_attn.{name}": shape for name, shape in shapes.items()}


def _latent_vectors(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the norms and biases of DeepSeek-V2's attention."""
    latent, of_queries = config["kv_lora_rank"], config["q_lora_rank"]
    shapes: dict[str, tuple[int, ...]] = {"kv_a_layernorm.weight": (latent,)}
    biases: dict[str, tuple[int, ...]] = {"kv_a_proj_with_mqa.bias": (latent + config["qk_rope_head_dim"],)}
    biases["o_proj.bias"] = (config["hidden_size"],)
    if of_queries is not None:
        shapes["q_a_layernorm.weight"] = biases["q_a_proj.bias"] = (of_queries,)
    return shapes | (biases if config.get("attention_bias") else {})


def _gpt_oss_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the router's and the experts' tensors, whose names do not all end in `weight`."""
    hidden, width, experts = config["hidden_size"], config["intermediate_size"], config["num_local_experts"]
    return {
        "mlp.router.weight": (experts, hidden),
        "mlp.router.bias": (experts,),
        "mlp.experts.gate_up_proj": (experts, hidden, 2 * width),
        "mlp.experts.gate_up_proj_bias": (experts, 2 * width),
        "mlp.experts.down_proj": (experts, width, hidden),
        "mlp.experts.down_proj_bias": (experts, hidden),
    }


def _mlp_shapes(prefix: str, names: tuple[str, ...], hidden: int, inner: int) -> dict[str, tuple[int, ...]]:
    gate, up, down = (f"{prefix}{name}" for name in names)
    return {gate: (inner, hidden), up: (inner, hidden), down: (hidden, inner)}


def _opt_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, intermediate = config["hidden_size"], config["ffn_dim"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.decoder.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.decoder.embed_positions.weight": (config["max_position_embeddings"] + 2, hidden),
    }
    linears = {f"self_attn.{name}_proj": (hidden, hidden) for name in ("q", "k", "v", "out")}
    linears |= {"fc1": (intermediate, hidden), "fc2": (hidden, intermediate)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.decoder.layers.{layer}."
        for name, shape in linears.items():
            shapes[f"{prefix}{name}.weight"] = shape
            if config.get("enable_bias", True):
                shapes[f"{prefix}{name}.bias"] = shape[:1]
        for name in ("self_attn_layer_norm", "final_layer_norm"):
            shapes |= {f"{prefix}{name}.{part}": (hidden,) for part in ("weight", "bias")}
    shapes |= {f"model.decoder.final_layer_norm.{part}": (hidden,) for part in ("weight", "bias")}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    return shapes
