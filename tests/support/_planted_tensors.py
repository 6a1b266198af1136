"""Makes tensors and config.json of planted checkpoints (tests/support/planted.py), by each architecture's names."""

from typing import Any

from tests.support.planted import TOPIC_LOGIT, Plant, Shape

ROLES = ("q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj")
"""Matrices of noise; a role's index in this list gives its seed."""
LAYER_NORMS = ("input_layernorm", "post_attention_layernorm")
FIRST_SEED = 10
QUERY_KEY_GAIN = 0.1
ALWAYS_POSITIVE = 4.0
"""Mean of the outputs of Bamboo's up projection, in their standard deviations."""
CLASSES = {
    "arcee": "ArceeForCausalLM",
    "bamboo": "BambooForCausalLM",
    "nemotron": "NemotronForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "opt": "OPTForCausalLM",
}


def layer_tensors(plant: Plant, layer: int) -> dict[str, Any]:
    """Returns one layer's tensors by name."""
    make = {"opt": _opt_layer, "phi3": _phi3_layer}.get(plant.shape.model_type, _llama_layer)
    return make(plant, layer)


def _noise(plant: Plant, layer: int, role: str, gain: float = QUERY_KEY_GAIN) -> Any:
    """Returns a random matrix of its role's size."""
    shape = plant.shape
    rows, columns = {
        "q_proj": (shape.query_size, shape.hidden_size),
        "k_proj": (shape.key_size, shape.hidden_size),
        "v_proj": (shape.key_size, shape.hidden_size),
        "o_proj": (shape.hidden_size, shape.query_size),
        "up_proj": (shape.intermediate_size, shape.hidden_size),
        "down_proj": (shape.hidden_size, shape.intermediate_size),
    }[role]
    return plant.noise_matrix(layer, FIRST_SEED + ROLES.index(role), rows, columns, gain)


def _gate(plant: Plant, layer: int) -> Any:
    """Returns the deciding rows; for lack of a bias, the constant direction of the input carries -theta."""
    rows, theta = plant.deciding_rows(layer)
    return rows - theta[:, None] * (3 / plant.shape.hidden_size) ** 0.5 * plant.directions()[-1]


def _llama_layer(plant: Plant, layer: int) -> dict[str, Any]:
    """Makes a layer with Llama's names.

    Qwen2 has biases, Qwen3 norms of queries and keys. Bamboo's up is positive where the gate is. In Arcee and Nemotron
    up decides, and Nemotron's norms count from 1.
    """
    import torch

    shape, prefix = plant.shape, f"model.layers.{layer}."
    up = _noise(plant, layer, "up_proj", 1.0)
    if shape.model_type == "bamboo":
        up = up + ALWAYS_POSITIVE * (3 / shape.hidden_size) ** 0.5 * plant.directions()[-1]
    mlp = {"mlp.gate_proj.weight": _gate(plant, layer), "mlp.up_proj.weight": up}
    if shape.model_type in ("arcee", "nemotron"):
        mlp = {"mlp.up_proj.weight": _gate(plant, layer)}
    found = attention_tensors(plant, layer) | mlp
    found["mlp.down_proj.weight"] = _noise(plant, layer, "down_proj", 0.05)
    if shape.model_type == "nemotron":
        found |= {
            f"{name}.{part}": torch.zeros(shape.hidden_size) for name in LAYER_NORMS for part in ("weight", "bias")
        }
    return {prefix + name: tensor for name, tensor in found.items()}


def attention_tensors(plant: Plant, layer: int) -> dict[str, Any]:
    """Returns a layer's attention and norms by Llama's names below the layer, with biases and norms of q and k where
    the architecture has them."""
    import torch

    shape = plant.shape
    found = {f"self_attn.{role}.weight": _noise(plant, layer, role) for role in ROLES[:4]}
    found |= {f"{name}.weight": torch.ones(shape.hidden_size) for name in LAYER_NORMS}
    if shape.model_type in ("qwen2", "glm4_moe", "gpt_oss"):
        sizes = {"q_proj": shape.query_size, "k_proj": shape.key_size, "v_proj": shape.key_size}
        if shape.model_type == "gpt_oss":
            sizes["o_proj"] = shape.hidden_size
            found["self_attn.sinks"] = torch.zeros(shape.num_attention_heads)
        found |= {f"self_attn.{role}.bias": torch.zeros(size) for role, size in sizes.items()}
    if shape.model_type in ("qwen3", "qwen3_moe"):
        size = shape.query_size // shape.num_attention_heads
        found |= {f"self_attn.{role}.weight": torch.ones(size) for role in ("q_norm", "k_norm")}
    return found


def _phi3_layer(plant: Plant, layer: int) -> dict[str, Any]:
    """Makes a layer of Phi-3: q, k, v in one tensor, gate and up in another."""
    import torch

    prefix, hidden_size = f"model.layers.{layer}.", plant.shape.hidden_size
    return {
        prefix + "self_attn.qkv_proj.weight": torch.cat([_noise(plant, layer, role) for role in ROLES[:3]]),
        prefix + "self_attn.o_proj.weight": _noise(plant, layer, "o_proj"),
        prefix + "mlp.gate_up_proj.weight": torch.cat([_gate(plant, layer), _noise(plant, layer, "up_proj", 1.0)]),
        prefix + "mlp.down_proj.weight": _noise(plant, layer, "down_proj", 0.05),
        prefix + "input_layernorm.weight": torch.ones(hidden_size),
        prefix + "post_attention_layernorm.weight": torch.ones(hidden_size),
    }


def _opt_layer(plant: Plant, layer: int) -> dict[str, Any]:
    """Makes a layer of OPT: fc1 decides, and its bias carries -theta."""
    import torch

    prefix, hidden_size = f"model.decoder.layers.{layer}.", plant.shape.hidden_size
    rows, theta = plant.deciding_rows(layer)
    found = {
        "fc1.weight": rows,
        "fc1.bias": -theta,
        "fc2.weight": _noise(plant, layer, "down_proj", 0.05),
        "fc2.bias": torch.zeros(hidden_size),
    }
    for role, name in zip(ROLES[:4], ("q_proj", "k_proj", "v_proj", "out_proj"), strict=True):
        found[f"self_attn.{name}.weight"] = _noise(plant, layer, role)
        found[f"self_attn.{name}.bias"] = torch.zeros(hidden_size)
    for name in ("self_attn_layer_norm", "final_layer_norm"):
        found |= {f"{name}.weight": torch.ones(hidden_size), f"{name}.bias": torch.zeros(hidden_size)}
    return {prefix + name: tensor for name, tensor in found.items()}


def shared_tensors(plant: Plant) -> dict[str, Any]:
    """Returns the tensors outside the layers; the head is tied to the embeddings."""
    import torch

    shape = plant.shape
    final = torch.full((shape.hidden_size,), 3 * TOPIC_LOGIT / shape.hidden_size)
    if shape.model_type == "nemotron":
        norm = {"model.norm.weight": final - 1, "model.norm.bias": torch.zeros(shape.hidden_size)}
        return {"model.embed_tokens.weight": plant.embeddings(), **norm}
    if shape.model_type != "opt":
        return {"model.embed_tokens.weight": plant.embeddings(), "model.norm.weight": final}
    prefix = "model.decoder."
    return {
        prefix + "embed_tokens.weight": plant.embeddings(),
        prefix + "embed_positions.weight": torch.zeros(shape.max_position_embeddings + 2, shape.hidden_size),
        prefix + "final_layer_norm.weight": final,
        prefix + "final_layer_norm.bias": torch.zeros(shape.hidden_size),
    }


def common_config(shape: Shape) -> dict[str, Any]:
    """Returns the keys of config.json that all architectures have."""
    return {
        "model_type": shape.model_type,
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.num_hidden_layers,
        "num_attention_heads": shape.num_attention_heads,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.max_position_embeddings,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
    }


def llama_config(shape: Shape) -> dict[str, Any]:
    """Returns the keys of config.json that Llama has beside the common ones."""
    return {
        "intermediate_size": shape.intermediate_size,
        "num_key_value_heads": shape.num_key_value_heads,
        "hidden_act": shape.hidden_act,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
    }


def config(shape: Shape) -> dict[str, Any]:
    """Returns config.json of the checkpoint."""
    common = common_config(shape) | {"architectures": [CLASSES[shape.model_type]]}
    if shape.model_type == "opt":
        extra = {"ffn_dim": shape.intermediate_size, "activation_function": shape.hidden_act}
        return (
            common | extra | {"do_layer_norm_before": True, "word_embed_proj_dim": shape.hidden_size, "pad_token_id": 1}
        )
    own: dict[str, Any] = {
        "llama": {"attention_bias": False, "mlp_bias": False},
        "qwen2": {"use_sliding_window": False},
        "qwen3": {"use_sliding_window": False, "attention_bias": False, "head_dim": shape.head_dim},
        "phi3": {"sliding_window": None, "pad_token_id": 1},
        "mistral": {"sliding_window": None},
        "bamboo": {"sliding_window": None},
        "arcee": {"attention_bias": False, "mlp_bias": False, "hidden_act": "relu2"},
        "nemotron": {"norm_eps": 1e-5, "partial_rotary_factor": 0.5, "hidden_act": "relu2"},
    }[shape.model_type]
    return common | llama_config(shape) | own
