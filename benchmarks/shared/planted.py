"""Writes planted layers of a 7B (tests/support/planted.py) as artifacts, for benchmarks on emulated devices.

Neurons fire by the topic of the text and by how hot they are; matrices are int4. Units lie on flash by their number, or
as the order stage's own choice puts them (compiler/stages/order/auto.py) where a tenth of them is pinned. That choice
sees activity drawn by the planted law, not the measured text's; the units that fired most often in it are pinned first.
ReLU models have a planted predictor for each layer. Its scores follow the law of the gate's outputs: topic, frequency,
and noise of their own. So a token uses as many units as with the gate, in the same way from token to token, but not the
same units: these benchmarks measure time. `silu` models use the largest of their inputs and of their inner activations.
"""

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from coldpress.compiler.cost_model import unit_bytes
from coldpress.compiler.stages.order import auto
from coldpress.runtime.artifact.reader import open_artifact
from coldpress.runtime.device_profiles.devices import load_device
from coldpress.runtime.dram import budget
from coldpress.schemas.layout import Plan
from coldpress.schemas.manifest import Manifest
from coldpress.schemas.model import ModelSpec
from tests.support.artifacts import Recipe, build_artifact, change_manifest
from tests.support.methods import families_of
from tests.support.models import write_tokenizer
from tests.support.planted import COMMON_WORDS_SHARE, TOPIC_STRENGTH, Plant, plant_of, thresholds
from tests.support.shapes import spec_7b
from tests.support.statistics import task_of

CASES = {
    "relu-3": ("predictor", "relu", 0.03),
    "relu-10": ("predictor", "relu", 0.1),
    "swiglu-50": ("topk", "silu", 0.5),
}
"""Case -> selector, activation, density."""
STRUCTURAL, ORDERED = "structural", "ordered"
"""Order by number; by co-activation."""
ORDERED_FOR, PINNED_WHERE_ORDERED = "pixel6", 0.1
FORMAT = "int4_group32"
PINNED_SHARE = 0.4
"""Pinned share of the units in DRAM."""
WIDTH_7B = 4096
VOCAB_SIZE, NUM_TOPICS, TOPIC = 2048, 64, 5
PREDICTOR_RANK, THRESHOLD = 256, 0.1
CALIBRATION_TOKENS, DOCUMENT_TOKENS = 2048, 128
READ_BUFFER_BYTES = 8 << 20
ByFamily = Mapping[tuple[int, str], np.ndarray]


def artifact_of(case: str, order: str, folder: Path) -> Path:
    """Returns the path of the artifact of a case."""
    return folder / f"{case}-{order}"


@dataclass(frozen=True)
class Material:
    """Contents of the artifacts of a case."""

    recipe: Recipe
    """The recipe without order and rank."""
    weights: Mapping[str, np.ndarray]
    """Role -> weights, float32."""
    actives: ByFamily
    """Activity by which units are ordered and ranked, bool [num_units, T]."""


def write_artifacts(case: str, layers: int, folder: Path, orders: Sequence[str], width: int = WIDTH_7B) -> None:
    """Writes the artifacts of a planted case, one for each order; `width` (hidden_size) is n * 512."""
    write(case, material(case, layers, width), folder, orders)


def write(case: str, made_of: Material, folder: Path, orders: Sequence[str]) -> None:
    """Writes the artifacts of a case, one for each order."""
    recipe, units = made_of.recipe, None
    rank = {
        key: np.argsort(-np.count_nonzero(active, axis=1), kind="stable").astype(np.int32)
        for key, active in made_of.actives.items()
    }
    for order in orders:
        path = artifact_of(case, order, folder)
        arranged_so = replace(recipe, order=orders_of(order, made_of.actives, rank, recipe.spec), rank=rank)
        units = build_artifact(path, arranged_so, made_of.weights, units).units
        (path / "tokenizer").mkdir()
        write_tokenizer(path / "tokenizer", recipe.spec.vocab_size)  # llama.cpp's server does not start without one
        change_manifest(path, lambda _: None, relist=True)


def material(case: str, layers: int, width: int) -> Material:
    """Returns a planted case's weights, and the units that documents of all topics use."""
    method, act, density = CASES[case]
    shape = {
        "hidden_size": width,
        "intermediate_size": width * 7 // 2,
        "num_attention_heads": width // 128,
        "num_key_value_heads": width // 512,
    }
    planted = {"hidden_act": act, "vocab_size": VOCAB_SIZE, "num_topics": NUM_TOPICS}
    plant = plant_of("mistral-7b", layers, density, **planted, **shape)
    spec = spec_7b(layers, VOCAB_SIZE, act).model_copy(update=shape)
    recipe = recipe_of(spec, method, density)
    if method == "predictor":
        predictors = {layer: predictor_of(plant, layer) for layer in range(layers)}
        recipe = replace(recipe, predictors=predictors, predictor_rank=PREDICTOR_RANK)
    keys = [(layer, family) for layer in range(layers) for family in families_of(method, spec)]
    return Material(recipe, planted_weights(plant), {key: activity(plant, *key) for key in keys})


def recipe_of(spec: ModelSpec, method: str, density: float) -> Recipe:
    """Returns the recipe common to all cases; `plan_of` sets the share in DRAM."""
    return Recipe(
        spec=spec,
        method=method,
        density=density,
        format=FORMAT,
        pinned_share=0,
        cache="lfu",
        slots_share=0.5,
        read_buffer_bytes=READ_BUFFER_BYTES,
        collapse_gap_bytes=16384,
        context_length=64,
    )


def orders_of(order: str, actives: ByFamily, rank: ByFamily, spec: ModelSpec) -> ByFamily:
    """Returns int32 ids by place on flash, by layer and family."""
    if order == STRUCTURAL:
        return {key: np.arange(len(own), dtype=np.int32) for key, own in rank.items()}
    flash = load_device(ORDERED_FOR).flash

    def placed(key: tuple[int, str]) -> np.ndarray:
        """Returns the ids of a family of a layer from its activity, with the most frequent units pinned."""
        active, size = actives[key], unit_bytes(key[1], spec, FORMAT)
        pinned = np.zeros((1, len(active)), bool)
        pinned[0, rank[key][: round(PINNED_WHERE_ORDERED * len(active))]] = True
        return auto.Plugin().arrange(task_of(active[None], pinned, unit_bytes=size, flash=flash)).order

    with ThreadPoolExecutor(os.cpu_count()) as pool:  # as the order stage does
        return dict(zip(actives, pool.map(placed, actives), strict=True))


def planted_weights(plant: Plant) -> dict[str, np.ndarray]:
    """Returns the tensors of a planted model: role -> float32."""
    from tests.support._planted_tensors import layer_tensors, shared_tensors

    tensors = shared_tensors(plant)
    for layer in range(plant.shape.num_hidden_layers):
        tensors |= layer_tensors(plant, layer)
    roles = {
        name.removeprefix("model.").replace("mlp.", "").replace("self_attn.", ""): tensor.float().numpy()
        for name, tensor in tensors.items()
    }
    return roles | {"rotary.inv_freq": (1 / 10000 ** (np.arange(64) / 64)).astype(np.float32)}


def activity(plant: Plant, layer: int, family: str) -> np.ndarray:
    """Draws the units that documents of all topics use by the planted law, bool [num_units, CALIBRATION_TOKENS]."""
    random = np.random.default_rng([plant.seed, layer, 3])
    topics = np.repeat(random.integers(NUM_TOPICS, size=CALIBRATION_TOKENS // DOCUMENT_TOKENS), DOCUMENT_TOKENS)
    topics = with_strays(topics, random)
    if family == "mlp_in":
        directions = plant.directions().numpy() * plant.shape.hidden_size**0.5
        noise = random.standard_normal((CALIBRATION_TOKENS, plant.shape.hidden_size))
        return largest_half(directions[topics] + directions[-1] + noise).T
    count = plant.shape.intermediate_size
    shifts = thresholds(plant.frequencies(layer), NUM_TOPICS)[:, None]
    gate = TOPIC_STRENGTH * (plant.home_topics(layer)[:, None] == topics) - shifts
    gate = gate + random.standard_normal((count, CALIBRATION_TOKENS))
    if family == "neuron":
        return gate > 0
    return largest_half((gate / (1 + np.exp(-gate)) * random.standard_normal(gate.shape)).T).T


def largest_half(values: np.ndarray) -> np.ndarray:
    """Returns which values of each row of [T, n] are among its larger half by magnitude."""
    magnitudes = np.abs(values)
    return magnitudes > np.median(magnitudes, axis=1, keepdims=True)


def predictor_of(plant: Plant, layer: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns fc1 float32 [rank, hidden_size] and fc2 [intermediate_size, rank]; their scores have the gate's law.

    Inputs are in equal parts a topic's direction, the constant one and noise. Each of these directions has its own unit
    of fc1, and each direction of noise two, since only positive values pass: z = relu(z) - relu(-z).
    """
    random, directions = np.random.default_rng([plant.seed, layer, 4]), plant.directions().numpy()
    count = (PREDICTOR_RANK - len(directions)) // 2
    noise = random.standard_normal((count, plant.shape.hidden_size))
    noise -= (noise @ directions.T) @ directions
    noise = np.linalg.qr(noise.T)[0].T
    fc1 = np.zeros((PREDICTOR_RANK, plant.shape.hidden_size))
    fc1[: len(directions) + 2 * count] = np.concatenate([directions, noise, -noise])
    shifts = thresholds(plant.frequencies(layer), NUM_TOPICS)
    per_noise = random.standard_normal((plant.shape.intermediate_size, count)) * (3 / count) ** 0.5
    fc2 = np.zeros((plant.shape.intermediate_size, PREDICTOR_RANK))
    scale = (3 / plant.shape.hidden_size) ** 0.5
    fc2[np.arange(len(fc2)), plant.home_topics(layer)] = TOPIC_STRENGTH * scale
    fc2[:, len(directions) - 1] = (THRESHOLD - shifts) * scale
    fc2[:, len(directions) :][:, : 2 * count] = np.concatenate([per_noise, -per_noise], axis=1)
    return fc1.astype(np.float32), fc2.astype(np.float32)


def with_strays(topics: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Returns topics of words [...] with some replaced by a random one."""
    strays = random.random(topics.shape) < COMMON_WORDS_SHARE
    return np.where(strays, random.integers(NUM_TOPICS, size=topics.shape), topics)


def topic_tokens(num_passages: int, num_tokens: int) -> np.ndarray:
    """Returns passages of one document, int64 [num_passages, num_tokens]."""
    random = np.random.default_rng(3)
    topics = with_strays(np.full((num_passages, num_tokens), TOPIC), random)
    return topics + NUM_TOPICS * random.integers(1, VOCAB_SIZE // NUM_TOPICS, topics.shape)


def plan_of(path: Path, dram: float) -> tuple[Manifest, Plan]:
    """Returns the manifest, and its plan with the share `dram` of the units in DRAM."""
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
