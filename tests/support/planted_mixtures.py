"""Writes mixtures of experts of real shapes with planted routing, for work without real weights.

`python -m tests.support.planted_mixtures --shape mixtral-8x7b --layers 2 --output FOLDER` writes the same files as
tests/support/planted.py, and the experts of a layer in several shards. Memory holds one shard and one matrix.

The planted law: in every layer, the router's logit of expert e for a token of topic t is

    b_e + A a_{e,t} + S n_e

with b and a fixed per layer, a_{e,t} drawn from N(0, 1), and n_e ~ N(0, 1) over tokens, independent for each expert.
Three statistics follow from it; `expected` samples them with numpy alone:

- skew: b_e = sqrt(A**2 + S**2) * Phi^-1(f_e), where f is a power law of the rank with the number of experts per token
  as its sum, and `hot_mass` is the share of the hottest quarter. A token uses about as many experts as have positive
  logits, so that expert e is used with frequency f_e but for the spread of that number;
- persistence, the share of a token's experts that the token before it used: from A against S. Documents keep to one
  topic, as in planted.py, so that a large A makes its tokens share experts, and a large S makes them differ;
- predictability, the share of a layer's experts that its router already chooses from the MLP input of the layer
  before: from layer to layer the noise of a token becomes c n + sqrt(1 - c**2) m with a new m ~ N(0, 1); c is `carry`.

If routers take sigmoids, the experts have the largest sigmoid(logit) + r_e, and r_e from N(0, CORRECTION**2) is fixed
per layer.

How tensors give that law: hidden states are constant + topic direction + token noise, as in planted.py; topic and
constant have the energy 1/3 each, and the noise has v_l per dimension before layer l, v_0 = 1/3. A row of a router
(and of an expert's gate, whose law is that of planted.py in each expert) is the sum of three parts, which are scaled
by the norm of the layer's input. Up projections read the noise alone, and down projections write into its dimensions
alone, so that what a layer adds has mean zero and the energy v_l (1 / c**2 - 1): then v_{l+1} = v_l / c**2. Attention
adds 1 % of a hidden state's length.
"""

import argparse
import functools
import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.shared.synthetic.law import frequencies
from tests.support.planted import (
    COMMON_WORDS_SHARE,
    TOPIC_STRENGTH,
    Plant,
    Shape,
    planted_frequencies,
    thresholds,
    write,
)

HOT_EXPERTS = 0.25
"""Share of the experts whose uses `hot_mass` is about."""
CORRECTION = 0.02
DOCUMENT_TOKENS = 128
SHARD_BYTES = 1 << 30
SAMPLED_TOKENS = 1 << 14
BF16_BYTES = 2


@dataclass(frozen=True)
class MixtureShape(Shape):
    """Dimensions of a mixture; `intermediate_size` is an expert's."""

    num_experts: int = 8
    num_experts_per_tok: int = 2
    num_shared_experts: int = 0
    num_dense_layers: int = 0
    """Layers at the start that have an MLP of `dense_intermediate_size` instead of experts."""
    dense_intermediate_size: int = 0
    hidden_act: str = "silu"

    @property
    def takes_sigmoids(self) -> bool:
        """Whether routers choose by sigmoids with a correction."""
        return self.model_type == "glm4_moe"


@dataclass(frozen=True)
class Routing:
    """The parameters of the planted law."""

    hot_mass: float = 0.35
    """Share of all uses that the hottest quarter of the experts has."""
    topic: float = 0.5
    """A."""
    token: float = 1.0
    """S."""
    carry: float = 0.95
    """c: the correlation of a token's noise from a layer to the next; 1 if layers add nothing."""


SHAPES = {
    "mixtral-8x7b": MixtureShape("mixtral", 4096, 14336, 32, 32, 8, 32000, 32768),
    "qwen3-30b-a3b": MixtureShape(
        "qwen3_moe", 2048, 768, 48, 32, 4, 151936, 40960, head_dim=128, num_experts=128, num_experts_per_tok=8
    ),
    "glm-4.5-air": MixtureShape(
        "glm4_moe",
        4096,
        1408,
        46,
        96,
        8,
        151552,
        131072,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        num_shared_experts=1,
        num_dense_layers=1,
        dense_intermediate_size=10944,
    ),
    "gpt-oss-20b": MixtureShape(
        "gpt_oss", 2880, 2880, 24, 64, 8, 201088, 131072, head_dim=64, num_experts=32, num_experts_per_tok=4
    ),
    "small-moe": MixtureShape("mixtral", 256, 128, 12, 8, 4, 2048, 512, num_topics=16, num_experts=16),
}
ROUTING = {
    "mixtral-8x7b": Routing(),
    "qwen3-30b-a3b": Routing(hot_mass=0.5, topic=0.8),
    "glm-4.5-air": Routing(hot_mass=0.45, topic=0.8),
    "gpt-oss-20b": Routing(hot_mass=0.45, topic=0.8),
    "small-moe": Routing(hot_mass=0.5, topic=0.8),
}


@dataclass(frozen=True)
class MixturePlant(Plant):
    """The structure planted in one mixture."""

    shape: MixtureShape
    routing: Routing

    def added(self, layer: int) -> np.ndarray:
        """Returns b, float64 [num_experts]."""
        shape, law = self.shape, self.routing
        density = shape.num_experts_per_tok / shape.num_experts
        found = frequencies(shape.num_experts, density, HOT_EXPERTS, law.hot_mass)
        spread = (law.topic**2 + law.token**2) ** 0.5
        normal = statistics.NormalDist()
        sorted_b = np.array([spread * normal.inv_cdf(float(frequency)) for frequency in found])
        return np.random.default_rng([self.seed, layer, 6]).permutation(sorted_b)

    def likings(self, layer: int) -> np.ndarray:
        """Returns a, float64 [num_experts, num_topics]."""
        size = (self.shape.num_experts, self.shape.num_topics)
        return np.random.default_rng([self.seed, layer, 5]).standard_normal(size)

    def corrections(self, layer: int) -> np.ndarray:
        """Returns r, float64 [num_experts]; 0 if routers take no sigmoids."""
        drawn = np.random.default_rng([self.seed, layer, 7]).standard_normal(self.shape.num_experts)
        return CORRECTION * drawn * self.shape.takes_sigmoids

    def noise_energy(self, layer: int) -> float:
        """Returns v, the variance of the token noise before a layer."""
        return self.routing.carry ** (-2 * layer) / 3

    def input_size(self, layer: int) -> float:
        """Returns the root mean square of the hidden states before a layer."""
        return (2 / 3 + self.noise_energy(layer) * self._noise_dimensions / self.shape.hidden_size) ** 0.5

    @property
    def _noise_dimensions(self) -> int:
        """The number of dimensions that neither a topic nor the constant has."""
        return self.shape.hidden_size - self.shape.num_topics - 1

    def rows(self, layer: int, role: int, constant: np.ndarray, topics: Any, noise: float = 1.0) -> Any:
        """Returns rows whose products with a layer's input are constant + topics[:, t] + noise * N(0, 1).

        Float32 [n, hidden_size], from `constant` [n] and `topics` [n, num_topics] (torch, or 0 for none).
        """
        import torch

        size, directions = self.shape.hidden_size, self.directions()
        drawn = torch.randn(len(constant), size, generator=self.generator(layer, role))
        drawn -= (drawn @ directions.T) @ directions
        drawn *= noise / (self.noise_energy(layer) * self._noise_dimensions) ** 0.5
        fixed = torch.from_numpy(constant).float()[:, None] * directions[-1] + topics @ directions[:-1]
        return self.input_size(layer) * (drawn + (3 / size) ** 0.5 * fixed)

    def shards(self) -> list[Callable[[], Iterable[tuple[str, Any]]]]:
        """Returns what makes the tensors of each shard: a layer's experts are in shards of their own."""
        from tests.support import _planted_mixture_tensors as tensors

        shape = self.shape
        found: list[Callable[[], Iterable[tuple[str, Any]]]] = [lambda: tensors.outer_tensors(self)]
        per_shard = max(1, SHARD_BYTES // (3 * BF16_BYTES * shape.hidden_size * shape.intermediate_size))
        if shape.model_type == "gpt_oss":  # one tensor has all experts of a layer
            per_shard = shape.num_experts
        for layer in range(shape.num_hidden_layers):
            found.append(functools.partial(tensors.used_by_all, self, layer))
            if layer >= shape.num_dense_layers:
                starts = range(0, shape.num_experts, per_shard)
                parts = [range(start, min(shape.num_experts, start + per_shard)) for start in starts]
                found += [functools.partial(tensors.experts, self, layer, part) for part in parts]
        return found

    def config(self) -> dict[str, Any]:
        """Returns config.json."""
        from tests.support._planted_mixture_tensors import config

        return config(self.shape)


@dataclass(frozen=True)
class Sampled:
    """What tokens of documents choose in one layer by the planted law."""

    used: np.ndarray
    """bool [num_documents, DOCUMENT_TOKENS, num_experts]: each token's experts."""
    guessed: np.ndarray
    """bool of the same shape: what the layer's router chooses from the MLP input of the layer before."""
    weights: np.ndarray
    """float64 of the same shape: the factors of the experts' outputs."""


@dataclass(frozen=True)
class Expected:
    """The statistics of the planted law in one layer."""

    frequencies: np.ndarray
    """float64 [num_experts]: how often each expert is used."""
    persistence: float
    """Share of a token's experts that the token before it used, within a document."""
    predictability: float
    """Share of a token's experts that the router chooses from the input of the layer before."""


def sample(plant: MixturePlant, layer: int, num_tokens: int = SAMPLED_TOKENS) -> Sampled:
    """Samples the law of a layer, for documents as `write_corpus` writes them."""
    shape, law = plant.shape, plant.routing
    random = np.random.default_rng([plant.seed, layer, 8])
    size = (-(-num_tokens // DOCUMENT_TOKENS), DOCUMENT_TOKENS)
    topics = np.repeat(np.arange(size[0])[:, None] % shape.num_topics, DOCUMENT_TOKENS, axis=1)
    topics = np.where(random.random(size) < COMMON_WORDS_SHARE, random.integers(shape.num_topics, size=size), topics)
    fixed = plant.added(layer) + law.topic * plant.likings(layer).T[topics]
    before, new = random.standard_normal((2, *size, shape.num_experts))
    kept = fixed + law.token * law.carry * before
    logits = kept + law.token * (1 - law.carry**2) ** 0.5 * new
    grown = plant.input_size(layer) / plant.input_size(max(0, layer - 1))
    used, guessed = (_largest(plant, layer, found) for found in (logits, grown * kept))
    powers = np.where(used, _sigmoid(logits) if shape.takes_sigmoids else np.exp(logits), 0.0)
    return Sampled(used, guessed, powers / powers.sum(axis=2, keepdims=True))


def expected(plant: MixturePlant, layer: int, num_tokens: int = SAMPLED_TOKENS) -> Expected:
    """Returns the statistics of a layer by sampling the planted law: no tensor of the checkpoint is looked at."""
    found, chosen = sample(plant, layer, num_tokens), plant.shape.num_experts_per_tok
    return Expected(
        frequencies=found.used.mean(axis=(0, 1)),
        persistence=float((found.used[:, 1:] & found.used[:, :-1]).sum(axis=2).mean()) / chosen,
        predictability=float((found.used & found.guessed).sum(axis=2).mean()) / chosen,
    )


def _largest(plant: MixturePlant, layer: int, logits: np.ndarray) -> np.ndarray:
    """Returns which experts a router chooses, bool [..., num_experts]."""
    shape = plant.shape
    scores = _sigmoid(logits) + plant.corrections(layer) if shape.takes_sigmoids else logits
    places = np.argsort(-scores, axis=-1, kind="stable")[..., : shape.num_experts_per_tok]
    found = np.zeros(scores.shape, bool)
    np.put_along_axis(found, places, values=True, axis=-1)
    return found


def _sigmoid(values: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-values))


@functools.cache
def unit_thresholds(shape: MixtureShape, intermediate_size: int, density: float) -> np.ndarray:
    """Returns theta of planted.py for the units of one expert, float64 [intermediate_size], ascending."""
    return thresholds(planted_frequencies(intermediate_size, density), shape.num_topics)


@functools.cache
def inner_energy(shape: MixtureShape, intermediate_size: int, density: float) -> float:
    """Returns the mean square of an expert's inner activation act(gate) * up; that of up is 1."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(64)
    theta = unit_thresholds(shape, intermediate_size, density)[:, None]
    slope = 1.702 if shape.model_type == "gpt_oss" else 1.0
    act = {"silu": lambda z: z * _sigmoid(slope * z), "relu": lambda z: np.maximum(z, 0)}[shape.hidden_act]
    own, other = (act(nodes + mean - theta) ** 2 @ weights / weights.sum() for mean in (TOPIC_STRENGTH, 0))
    return float((own / shape.num_topics + other * (1 - 1 / shape.num_topics)).mean())


def mixture_of(
    shape: str,
    layers: int | None = None,
    density: float = 0.1,
    seed: int = 0,
    routing: Routing | None = None,
    **changes: Any,
) -> MixturePlant:
    """Returns a plant by shape name; `changes` replace fields of the shape."""
    chosen = replace(SHAPES[shape], **({"num_hidden_layers": layers} if layers else {}), **changes)
    return MixturePlant(chosen, (density,) * chosen.num_hidden_layers, seed, routing or ROUTING[shape])


def main() -> None:
    """Writes the checkpoint that the command line describes, and prints the statistics of its law."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), required=True)
    parser.add_argument("--layers", type=int, help="number of layers (default: the shape's own)")
    parser.add_argument("--density", type=float, default=0.1, help="planted share of active neurons (default: 0.1)")
    parser.add_argument("--hot-mass", type=float, help="share of uses of the hottest quarter of the experts")
    parser.add_argument("--topic", type=float, help="A: what the topic adds to the logits")
    parser.add_argument("--carry", type=float, help="c: how much of a token's noise the next layer sees, up to 1")
    parser.add_argument("--corpus-tokens", type=int, default=40960, help="words of corpus.jsonl (default: 40960)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, required=True)
    given = parser.parse_args()
    changed = {name: getattr(given, name) for name in ("hot_mass", "topic", "carry")}
    routing = replace(ROUTING[given.shape], **{name: value for name, value in changed.items() if value is not None})
    plant = mixture_of(given.shape, given.layers, given.density, given.seed, routing)
    print(write(plant, given.output, given.corpus_tokens))
    for line in _described(plant):
        print(line)


def _described(plant: MixturePlant) -> Iterator[str]:
    """Yields a line for each layer with experts."""
    for layer in range(plant.shape.num_dense_layers, plant.shape.num_hidden_layers):
        found = expected(plant, layer)
        hot = np.sort(found.frequencies)[::-1][: round(HOT_EXPERTS * len(found.frequencies))].sum()
        yield (
            f"layer {layer}: hottest quarter {hot / found.frequencies.sum():.3f}, persistence {found.persistence:.3f}, "
            f"predictability {found.predictability:.3f}"
        )


if __name__ == "__main__":
    main()
