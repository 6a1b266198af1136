"""Makes tensors and config.json of planted mixtures (planted_mixtures.py), by each architecture's names."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from tests.support._planted_gpt_oss import stacked_experts
from tests.support._planted_tensors import attention_tensors, common_config, llama_config, shared_tensors
from tests.support.planted import TOPIC_STRENGTH
from tests.support.planted_mixtures import MixturePlant, MixtureShape, inner_energy, sample, unit_thresholds

ROUTER_ROLE, MLP_ROLE, SHARED_ROLE, EXPERT_ROLE = 90, 91, 94, 100
"""Seeds of a layer's parts; each MLP has three."""
BLOCKS = {"mixtral": "block_sparse_moe", "qwen3_moe": "mlp", "glm4_moe": "mlp", "gpt_oss": "mlp"}
MATRICES = {"mixtral": ("w1", "w3", "w2")}
"""Names of gate, up and down, where they are not Llama's."""
CLASSES = {
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
}
NOT_PACKED = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
WEIGHED_TOKENS = 2048
"""Tokens that tell how the weights of a token's experts are spread."""
Named = Iterator[tuple[str, Any]]


def outer_tensors(plant: MixturePlant) -> Named:
    """Yields the tensors outside the layers; the last norm takes back what the layers added to the length."""
    for name, tensor in shared_tensors(plant).items():
        grown = plant.input_size(plant.shape.num_hidden_layers) if name == "model.norm.weight" else 1.0
        yield name, tensor * grown


def used_by_all(plant: MixturePlant, layer: int) -> Named:
    """Yields a layer's attention, norms and router, and the MLP that every token uses, if there is one."""
    shape, prefix = plant.shape, f"model.layers.{layer}."
    yield from ((prefix + name, tensor) for name, tensor in attention_tensors(plant, layer).items())
    if layer < shape.num_dense_layers:
        width = shape.dense_intermediate_size
        yield from _mlp(plant, layer, MLP_ROLE, prefix + "mlp.", width, _added(plant, layer, width))
        return
    block = f"{prefix}{BLOCKS[shape.model_type]}."
    yield from _router(plant, layer, block)
    if shape.num_shared_experts:
        width = shape.num_shared_experts * shape.intermediate_size
        added = _added(plant, layer, width) / 2
        yield from _mlp(plant, layer, SHARED_ROLE, block + "shared_experts.", width, added)


def experts(plant: MixturePlant, layer: int, numbers: range) -> Named:
    """Yields the matrices of some experts, one after another."""
    shape = plant.shape
    weights = sample(plant, layer, WEIGHED_TOKENS).weights
    share = float((weights**2).sum(axis=2).mean()) * (2 if shape.num_shared_experts else 1)
    added = _added(plant, layer, shape.intermediate_size) / share
    block = f"model.layers.{layer}.{BLOCKS[shape.model_type]}."

    def of(expert: int, prefix: str = "") -> Named:
        return _mlp(plant, layer, EXPERT_ROLE + 3 * expert, prefix, shape.intermediate_size, added)

    if shape.model_type == "gpt_oss":
        yield from stacked_experts(f"{block}experts.", numbers, lambda expert: tuple(part for _, part in of(expert)))
        return
    for expert in numbers:
        yield from of(expert, f"{block}experts.{expert}.")


def _router(plant: MixturePlant, layer: int, block: str) -> Named:
    """Yields the router's matrix, and its correction if it takes sigmoids."""
    import torch

    law, topics = plant.routing, torch.from_numpy(plant.likings(layer)).float()
    name = "router" if plant.shape.model_type == "gpt_oss" else "gate"
    if name == "router":
        yield block + "router.bias", torch.zeros(plant.shape.num_experts)
    yield (
        f"{block}{name}.weight",
        plant.rows(layer, ROUTER_ROLE, plant.added(layer), law.topic * topics, law.token),
    )
    if plant.shape.takes_sigmoids:
        yield block + "gate.e_score_correction_bias", torch.from_numpy(plant.corrections(layer)).float()


def _added(plant: MixturePlant, layer: int, width: int) -> float:
    """Returns the variance of an entry of a down projection whose output has all the energy that a layer adds."""
    energy = plant.noise_energy(layer + 1) - plant.noise_energy(layer)
    return energy / (width * inner_energy(plant.shape, width, plant.densities[layer]))


def _mlp(plant: MixturePlant, layer: int, role: int, prefix: str, width: int, variance: float) -> Named:
    """Yields gate, up and down; the gate's units have home topics and frequencies, as in planted.py."""
    import torch

    shape = plant.shape
    gate, up, down = MATRICES.get(shape.model_type, ("gate_proj", "up_proj", "down_proj"))
    random = np.random.default_rng([plant.seed, layer, role])
    theta = random.permutation(unit_thresholds(shape, width, plant.densities[layer]))
    homes = torch.from_numpy(random.integers(shape.num_topics, size=width))
    likes = TOPIC_STRENGTH * torch.nn.functional.one_hot(homes, shape.num_topics).float()
    yield f"{prefix}{gate}.weight", plant.rows(layer, role, -theta, likes)
    nothing = torch.zeros(width, shape.num_topics)
    yield f"{prefix}{up}.weight", plant.rows(layer, role + 1, np.zeros(width), nothing)
    directions = plant.directions()
    drawn = torch.randn(shape.hidden_size, width, generator=plant.generator(layer, role + 2)) * variance**0.5
    drawn -= directions.T @ (directions @ drawn)
    yield f"{prefix}{down}.weight", drawn


def config(shape: MixtureShape) -> dict[str, Any]:
    """Returns config.json of the checkpoint."""
    own: dict[str, Any] = {
        "mixtral": {"sliding_window": None, "num_local_experts": shape.num_experts},
        "qwen3_moe": {
            "use_sliding_window": False,
            "attention_bias": False,
            "decoder_sparse_step": 1,
            "mlp_only_layers": list(range(shape.num_dense_layers)),
            "moe_intermediate_size": shape.intermediate_size,
            "num_experts": shape.num_experts,
            "norm_topk_prob": True,
        },
        "glm4_moe": {
            "attention_bias": True,
            "use_qk_norm": False,
            "partial_rotary_factor": 0.5,
            "moe_intermediate_size": shape.intermediate_size,
            "n_routed_experts": shape.num_experts,
            "n_shared_experts": shape.num_shared_experts,
            "routed_scaling_factor": 1.0,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": shape.num_dense_layers,
            "norm_topk_prob": True,
            "num_nextn_predict_layers": 0,
        },
        "gpt_oss": {
            "attention_bias": True,
            "sliding_window": 128,
            "num_local_experts": shape.num_experts,
            "swiglu_limit": 7.0,
            "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": NOT_PACKED},
        },
    }[shape.model_type]
    found = common_config(shape) | llama_config(shape) | own
    if shape.head_dim is not None:
        found["head_dim"] = shape.head_dim
    if shape.dense_intermediate_size:
        found["intermediate_size"] = shape.dense_intermediate_size
    return found | {"architectures": [CLASSES[shape.model_type]], "num_experts_per_tok": shape.num_experts_per_tok}
