"""Planted layers of a 7B (tests/support/planted.py) as artifacts, for benchmarks on emulated devices.

Neurons fire by the topic of the text and by how hot they are; matrices are int4. There is an artifact for each order of
the units on flash; what is pinned first are the units of the highest planted frequency.
"""

from pathlib import Path
from typing import Any

import numpy as np

from runtime import budget
from runtime.artifact.reader import open_artifact
from tests.support.artifacts import Recipe, build_artifact
from tests.support.methods import families_of
from tests.support.planted import COMMON_WORDS_SHARE, HOT_SHARE, Plant, plant_of
from tests.support.shapes import spec_7b

CASES = {"relu-10": ("relu", "relu", 0.1), "swiglu-50": ("topk", "silu", 0.5)}
"""Case -> selector, activation, density."""
ORDERS = ("numbered", "by-topic")
PINNED_SHARE = 0.4
"""Of the units in DRAM, those that are pinned."""
VOCAB_SIZE, NUM_TOPICS, TOPIC = 2048, 64, 5


def write_artifacts(case: str, layers: int, folder: Path) -> None:
    """The case's artifacts, one for each order."""
    method, act, density = CASES[case]
    plant = plant_of("mistral-7b", layers, density, hidden_act=act, vocab_size=VOCAB_SIZE, num_topics=NUM_TOPICS)
    spec = spec_7b(layers, VOCAB_SIZE, act)
    weights = planted_weights(plant)
    keys = [(layer, family) for layer in range(layers) for family in families_of(method, spec)]
    rank = {key: order_of(plant, "by-frequency", *key) for key in keys}
    for order in ORDERS:
        recipe = Recipe(
            spec=spec,
            method=method,
            format="int4_group32",
            pinned_share=0,
            slots_share=0.5,
            read_buffer_bytes=8 << 20,
            collapse_gap_bytes=16384,
            context_length=64,
            density=density,
            order={key: order_of(plant, order, *key) for key in keys},
            rank=rank,
        )
        build_artifact(folder / f"{case}-{order}", recipe, weights)


def planted_weights(plant: Plant) -> dict[str, np.ndarray]:
    """Role -> float32, of a planted model."""
    from tests.support._planted_tensors import layer_tensors, shared_tensors

    tensors = shared_tensors(plant)
    for layer in range(plant.shape.num_hidden_layers):
        tensors |= layer_tensors(plant, layer)
    roles = {
        name.removeprefix("model.").replace("mlp.", "").replace("self_attn.", ""): tensor.float().numpy()
        for name, tensor in tensors.items()
    }
    return roles | {"rotary.inv_freq": (1 / 10000 ** (np.arange(64) / 64)).astype(np.float32)}


def order_of(plant: Plant, kind: str, layer: int, family: str) -> np.ndarray:
    """int32 ids of the units of a family in an order, as the planting gives it."""
    count = plant.shape.hidden_size if family == "mlp_in" else plant.shape.intermediate_size
    if kind == "numbered":
        return np.arange(count, dtype=np.int32)
    if family == "mlp_in":  # inputs have no topic: those that are large for every token come first
        return np.argsort(-np.abs(plant.directions()[-1].numpy()), kind="stable").astype(np.int32)
    frequencies = plant.frequencies(layer)
    by_frequency = np.argsort(-frequencies, kind="stable").astype(np.int32)
    if kind == "by-frequency":
        return by_frequency
    num_hot = round(HOT_SHARE * count)
    cold = by_frequency[num_hot:]
    return np.concatenate([by_frequency[:num_hot], cold[np.argsort(plant.home_topics(layer)[cold], kind="stable")]])


def topic_tokens(num_tokens: int) -> np.ndarray:
    """int64 [2, num_tokens]: two passages of one document, to fill the caches and to be measured."""
    random = np.random.default_rng(3)
    topics = np.full((2, num_tokens), TOPIC)
    strays = random.random(topics.shape) < COMMON_WORDS_SHARE
    topics[strays] = random.integers(NUM_TOPICS, size=int(strays.sum()))
    return topics + NUM_TOPICS * random.integers(1, VOCAB_SIZE // NUM_TOPICS, topics.shape)


def plan_of(path: Path, dram: float) -> tuple[Any, Any]:
    """(manifest, its plan with that share of the units in DRAM)."""
    manifest = open_artifact(path).manifest
    plan = manifest.plans[0]
    counts = {section.family: section.num_units for section in manifest.flash.sections}
    parts = tuple(
        part.model_copy(
            update={
                "num_pinned": round(dram * PINNED_SHARE * counts[part.family]),
                "cache_slots": round(dram * (1 - PINNED_SHARE) * counts[part.family]),
            }
        )
        for part in plan.parts
    )
    changed = plan.model_copy(update={"parts": parts})
    return manifest, changed.model_copy(update={"dram_budget_bytes": budget.used_bytes(manifest, changed)})
