"""Writes checkpoints of real shapes with planted activation structure, for work at 7B scale without real weights.

`python -m tests.support.planted --shape mistral-7b --layers 2 --output FOLDER` writes a Hugging Face folder: config,
sharded safetensors (one shard per layer, streamed), a word-level tokenizer, and `corpus.jsonl`, text on the topics.

The planted structure: token embeddings are constant + topic direction + token noise, in equal energy, and attention and
MLP add little to the residual stream, so every layer's MLP sees about the same normalised input. Neuron j of layer l
has a home topic; its gate (or OPT's up) pre-activation is

    z_j = strength * [token is of the home topic] + N(0, 1) over tokens - theta_j

where theta_j makes P(z_j > 0) equal a planted frequency. Frequencies follow a power law whose hottest 26 % of neurons
make 80 % of all activations (PowerInfer Fig. 4) with the layer's density as mean: hot neurons fire by token noise, cold
ones by topic. Documents keep to one topic, which ties activations to the text (ActiveFlow Fig. 6).

`python -m tests.support.planted_mixtures` does the same for mixtures of experts.
"""

import argparse
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.shared.synthetic.law import frequencies

TOPIC_STRENGTH = 2.5
HOT_SHARE, HOT_MASS = 0.26, 0.80
TOPIC_LOGIT = 5.3
"""How much a token adds to the logits of its topic's words: close to the corpus, so that perplexity is realistic."""
COMMON_WORDS_SHARE = 0.2
"""Share of a document's words that belong to other topics."""
CORRECTION = "e_score_correction_bias"
"""End of the names of tensors that published checkpoints store as float32."""


@dataclass(frozen=True)
class Shape:
    """Dimensions of a checkpoint, in Hugging Face's names."""

    model_type: str
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int
    max_position_embeddings: int
    hidden_act: str = "relu"
    num_topics: int = 64
    head_dim: int | None = None
    """Size of a head if it is not hidden_size / num_attention_heads."""

    @property
    def query_size(self) -> int:
        """Number of rows of q_proj."""
        return self.num_attention_heads * (self.head_dim or self.hidden_size // self.num_attention_heads)

    @property
    def key_size(self) -> int:
        """Number of rows of k_proj and of v_proj."""
        return self.query_size // self.num_attention_heads * self.num_key_value_heads


SHAPES = {
    "mistral-7b": Shape("mistral", 4096, 14336, 32, 32, 8, 32000, 4096),
    "llama-2-7b": Shape("llama", 4096, 11008, 32, 32, 32, 32000, 4096),
    "llama-2-70b": Shape("llama", 8192, 28672, 80, 64, 8, 32000, 4096),
    "opt-6.7b": Shape("opt", 4096, 16384, 32, 32, 32, 50272, 2048),
    "qwen2-7b": Shape("qwen2", 3584, 18944, 28, 28, 4, 152064, 32768),
    "qwen3-8b": Shape("qwen3", 4096, 12288, 36, 32, 8, 151936, 40960, head_dim=128),
    "tinyllama-1.1b": Shape("llama", 2048, 5632, 22, 32, 4, 32000, 2048),
    "phi-3-mini": Shape("phi3", 3072, 8192, 32, 32, 32, 32064, 4096),
    "small": Shape("llama", 256, 1024, 12, 8, 4, 2048, 512, num_topics=16),
}


def planted_frequencies(num_units: int, density: float) -> np.ndarray:
    """Returns activation frequencies, float64 [num_units], descending.

    Their mean is `density`, and the hottest HOT_SHARE of the units has HOT_MASS of their sum.
    """
    return frequencies(num_units, density, HOT_SHARE, HOT_MASS)


def thresholds(frequencies: np.ndarray, num_topics: int) -> np.ndarray:
    """Returns theta [num_units] such that P(strength * [topic] + N(0, 1) > theta) is the planted frequency."""
    import torch

    share = torch.tensor(1 / num_topics, dtype=torch.float64)
    target = torch.from_numpy(frequencies)
    low, high = torch.full_like(target, -10.0), torch.full_like(target, 10.0)
    for _ in range(60):
        middle = (low + high) / 2
        tail = torch.special.ndtr
        found = share * tail(TOPIC_STRENGTH - middle) + (1 - share) * tail(-middle)
        low, high = torch.where(found > target, middle, low), torch.where(found > target, high, middle)
    return ((low + high) / 2).numpy()


@dataclass(frozen=True)
class Plant:
    """The structure planted in one checkpoint; tests compute it again to check a calibration."""

    shape: Shape
    densities: tuple[float, ...]
    seed: int

    def generator(self, layer: int, role: int) -> Any:
        """Returns the torch generator of a layer and role, so that any tensor can be made alone."""
        import torch

        return torch.Generator().manual_seed(self.seed * 1_000_003 + layer * 1009 + role)

    def home_topics(self, layer: int) -> np.ndarray:
        """Returns the home topic of each neuron, int64 [intermediate_size]."""
        rng = np.random.default_rng([self.seed, layer, 1])
        return rng.integers(self.shape.num_topics, size=self.shape.intermediate_size)

    def frequencies(self, layer: int) -> np.ndarray:
        """Returns the planted activation frequency of each neuron, float64 [intermediate_size], in shuffled order."""
        rng = np.random.default_rng([self.seed, layer, 2])
        return rng.permutation(planted_frequencies(self.shape.intermediate_size, self.densities[layer]))

    def directions(self) -> Any:
        """Returns orthonormal directions, float32 [num_topics + 1, hidden_size]: the topics, then the constant.

        Each direction sums to zero, so that LayerNorm keeps it.
        """
        import torch

        raw = torch.randn(self.shape.num_topics + 1, self.shape.hidden_size, generator=self.generator(-1, 1))
        return torch.linalg.qr((raw - raw.mean(1, keepdim=True)).T)[0].T.contiguous()

    def embeddings(self) -> Any:
        """Returns the embeddings, float32 [vocab_size, hidden_size]; word w is of topic w % num_topics."""
        import torch

        shape, directions = self.shape, self.directions()
        topics = torch.arange(shape.vocab_size) % shape.num_topics
        noise = torch.randn(shape.vocab_size, shape.hidden_size, generator=self.generator(-1, 2))
        noise -= (noise @ directions.T) @ directions
        scale = shape.hidden_size**0.5
        return (scale * directions[topics] + scale * directions[-1] + noise) / 3**0.5

    def deciding_rows(self, layer: int) -> tuple[Any, Any]:
        """Returns the matrix that decides activity, [intermediate_size, hidden_size], and theta [intermediate_size]."""
        import torch

        shape, directions = self.shape, self.directions()
        size = (shape.intermediate_size, shape.hidden_size)
        rows = torch.randn(size, generator=self.generator(layer, 3)) * (3 / shape.hidden_size) ** 0.5
        rows -= (rows @ directions.T) @ directions
        scale = (3 / shape.hidden_size) ** 0.5
        rows += TOPIC_STRENGTH * scale * directions[torch.from_numpy(self.home_topics(layer))]
        theta = torch.from_numpy(thresholds(self.frequencies(layer), shape.num_topics)).float()
        return rows, theta

    def noise_matrix(self, layer: int, role: int, rows: int, columns: int, gain: float) -> Any:
        """Returns a random matrix that turns unit-variance inputs into outputs of standard deviation `gain`."""
        import torch

        return torch.randn(rows, columns, generator=self.generator(layer, role)) * (gain / columns**0.5)

    def shards(self) -> list[Callable[[], Iterable[tuple[str, Any]]]]:
        """Returns what makes the names and float32 tensors of each shard: one for each layer."""
        from tests.support._planted_tensors import layer_tensors, shared_tensors

        found: list[Callable[[], Iterable[tuple[str, Any]]]] = [lambda: shared_tensors(self).items()]
        layers = range(self.shape.num_hidden_layers)
        return found + [lambda layer=layer: layer_tensors(self, layer).items() for layer in layers]

    def config(self) -> dict[str, Any]:
        """Returns config.json."""
        from tests.support._planted_tensors import config

        return config(self.shape)


def write_weights(plant: Plant, folder: Path) -> None:
    """Writes sharded bfloat16 safetensors, one shard in memory at a time; corrections of routers stay float32."""
    import torch
    from safetensors.torch import save_file

    def stored(name: str, tensor: Any) -> Any:
        kind = torch.float32 if name.endswith(CORRECTION) else torch.bfloat16
        if tensor.dtype == torch.uint8:  # already packed
            kind = tensor.dtype
        return tensor.to(kind).contiguous()

    makers = plant.shards()
    weight_map: dict[str, str] = {}
    total_bytes = 0
    for number, make in enumerate(makers, start=1):
        name = f"model-{number:05d}-of-{len(makers):05d}.safetensors"
        tensors = {key: stored(key, value) for key, value in make()}
        save_file(tensors, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
        total_bytes += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True))


def write_tokenizer(shape: Shape, folder: Path) -> None:
    """Writes a word-level tokenizer: word w is `w<number>`; 0 is <s>, 1 is </s>, 2 is <unk>."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {"<s>": 0, "</s>": 1, "<unk>": 2} | {f"w{word}": word for word in range(3, shape.vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    tokenizer_config = {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": False, **names}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))


def write_corpus(shape: Shape, folder: Path, num_tokens: int, seed: int, document_tokens: int = 128) -> Path:
    """Writes documents as JSON lines; each keeps to one topic but for COMMON_WORDS_SHARE of its words."""
    rng = np.random.default_rng([seed, 77])
    path = folder / "corpus.jsonl"
    words_per_topic = (shape.vocab_size - 3) // shape.num_topics
    with path.open("w") as file:
        for number in range(-(-num_tokens // document_tokens)):
            topics = np.full(document_tokens, number % shape.num_topics)
            strays = rng.random(document_tokens) < COMMON_WORDS_SHARE
            topics[strays] = rng.integers(shape.num_topics, size=strays.sum())
            words = topics + shape.num_topics * rng.integers(1, words_per_topic, size=document_tokens)
            text = " ".join(f"w{word}" for word in words)
            file.write(json.dumps({"text": text, "task": f"topic-{number % shape.num_topics}"}) + "\n")
    return path


def write(plant: Plant, folder: Path, corpus_tokens: int) -> Path:
    """Writes the whole checkpoint and its corpus; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(plant.config(), indent=2))
    write_weights(plant, folder)
    write_tokenizer(plant.shape, folder)
    write_corpus(plant.shape, folder, corpus_tokens, plant.seed)
    return folder


def plant_of(shape: str, layers: int | None = None, density: float = 0.1, seed: int = 0, **changes: Any) -> Plant:
    """Returns a plant by shape name; `changes` replace fields of the shape."""
    chosen = replace(SHAPES[shape], **({"num_hidden_layers": layers} if layers else {}), **changes)
    return Plant(chosen, (density,) * chosen.num_hidden_layers, seed)


def main() -> None:
    """Writes the checkpoint that the command line describes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), required=True)
    parser.add_argument("--layers", type=int, help="number of layers (default: the shape's own)")
    parser.add_argument("--density", type=float, default=0.1, help="planted share of active neurons (default: 0.1)")
    parser.add_argument("--hidden-act", default="relu", choices=("relu", "silu"))
    parser.add_argument("--corpus-tokens", type=int, default=40960, help="words of corpus.jsonl (default: 40960)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    plant = plant_of(
        arguments.shape, arguments.layers, arguments.density, arguments.seed, hidden_act=arguments.hidden_act
    )
    print(write(plant, arguments.output, arguments.corpus_tokens))


if __name__ == "__main__":
    main()
