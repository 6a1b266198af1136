"""calibrate finds again what planted checkpoints plant, and puts it down under the right layer: 12 of them here."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coldpress.compiler.io import Workspace, load_arrays
from coldpress.compiler.stages import calibrate, ingest, tokenize
from coldpress.compiler.stages.calibrate import CalibrateConfig
from coldpress.compiler.stages.ingest import IngestConfig
from coldpress.compiler.stages.tokenize import TokenizeConfig
from coldpress.schemas.activations import Activations
from tests.support.planted import HOT_MASS, HOT_SHARE, Plant, plant_of, write

pytestmark = pytest.mark.slow

TOKENS = 8192
DENSITIES = tuple(0.06 + 0.02 * ((5 * layer) % 12) for layer in range(12))
"""Distinct, and not in order: layers 10 and 11 cannot be taken for 2 or 3."""


@dataclass(frozen=True)
class Planted:
    """A checkpoint and what calibrate says of it."""

    plant: Plant
    found: Activations

    def arrays(self, layer: int) -> dict[str, np.ndarray]:
        return load_arrays(self.found.layers[layer].family("neuron").arrays)

    def counts(self, layer: int) -> np.ndarray:
        return self.arrays(layer)["counts"]

    def active(self, layer: int) -> np.ndarray:
        """float32 [num_units, num_tokens]."""
        bits = self.arrays(layer)["bits"]
        return np.unpackbits(bits, axis=1, count=self.found.num_tokens, bitorder="little").astype(np.float32)

    def task_topics(self) -> np.ndarray:
        """The topic of each task of the record."""
        return np.array([int(task.name.removeprefix("topic-")) for task in self.found.tasks])


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Planted:
    folder = tmp_path_factory.mktemp("planted")
    return calibrated(Plant(plant_of("small").shape, DENSITIES, seed=3), folder, TOKENS)


def calibrated(plant: Plant, folder: Path, num_tokens: int) -> Planted:
    write(plant, folder / "model", 2 * num_tokens)
    model = ingest.run(IngestConfig(model=str(folder / "model")), Workspace(folder / "ingest", "test"))
    config = TokenizeConfig(corpus=str(folder / "model/corpus.jsonl"), calibration_tokens=num_tokens)
    corpus = tokenize.run(config, model, Workspace(folder / "tokenize", "test"))
    config = CalibrateConfig()
    return Planted(plant, calibrate.run(config, model, corpus, Workspace(folder / "calibrate", "test"), 2))


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("llama", {}),
        ("mistral", {}),
        ("qwen2", {}),
        ("qwen3", {"head_dim": 48}),
        ("phi3", {}),
        ("opt", {"num_key_value_heads": 8}),
        ("arcee", {}),
        ("bamboo", {}),
        ("nemotron", {}),
    ],
)
def test_any_architecture_can_be_planted(tmp_path: Path, model_type: str, changes: dict[str, Any]) -> None:
    plant = plant_of("small", layers=2, density=0.15, model_type=model_type, **changes)
    found = calibrated(plant, tmp_path, 2048)
    for layer in range(2):
        frequencies = found.counts(layer) / found.found.num_tokens
        assert frequencies.mean() == pytest.approx(0.15, rel=0.1)
        assert np.corrcoef(frequencies, plant.frequencies(layer))[0, 1] > 0.97


def test_densities_layer_by_layer(planted: Planted) -> None:
    assert planted.found.num_tokens == TOKENS
    found = [layer.family("neuron").density for layer in planted.found.layers]
    assert found == pytest.approx(DENSITIES, rel=0.08)
    assert np.argsort(found).tolist() == np.argsort(DENSITIES).tolist()
    assert [layer.layer for layer in planted.found.layers] == list(range(12))


def test_a_quarter_of_the_neurons_make_most_activations(planted: Planted) -> None:
    for layer in range(12):
        counts = np.sort(planted.counts(layer))[::-1]
        hot = counts[: round(HOT_SHARE * len(counts))].sum() / counts.sum()
        assert hot == pytest.approx(HOT_MASS, abs=0.03)


def test_each_neuron_has_its_frequency(planted: Planted) -> None:
    for layer in range(12):
        found, expected = planted.counts(layer) / TOKENS, planted.plant.frequencies(layer)
        assert np.corrcoef(found, expected)[0, 1] > 0.97
    other = np.corrcoef(planted.counts(10) / TOKENS, planted.plant.frequencies(1))[0, 1]
    assert abs(other) < 0.2


def test_neurons_of_one_topic_fire_together(planted: Planted) -> None:
    """Cold ones: hot neurons fire by token noise, whatever the topic."""
    for layer in (0, 11):
        active, topics = planted.active(layer), planted.plant.home_topics(layer)
        cold = np.flatnonzero((planted.counts(layer) > 40) & (planted.plant.frequencies(layer) < 0.05))
        together = np.corrcoef(active[cold])
        same = topics[cold][:, None] == topics[cold][None]
        np.fill_diagonal(same, False)
        different = ~same & ~np.eye(len(cold), dtype=bool)
        assert together[same].mean() > 0.15
        assert -0.03 < together[different].mean() < 0  # a token is of one topic only


def test_activity_depends_on_the_text(planted: Planted) -> None:
    """A cold neuron fires where its topic is the task's, and in fewer contexts than by chance (ActiveFlow Fig. 6)."""
    topics = planted.task_topics()
    assert len(topics) == planted.plant.shape.num_topics
    tokens = np.array([task.num_tokens for task in planted.found.tasks])
    for layer in (0, 11):
        arrays, homes = planted.arrays(layer), planted.plant.home_topics(layer)
        cold = np.flatnonzero((arrays["counts"] > 40) & (planted.plant.frequencies(layer) < 0.05))
        rates = arrays["task_counts"][:, cold] / tokens[:, None]
        assert (topics[rates.argmax(axis=0)] == homes[cold]).mean() > 0.9
        contexts = arrays["context_counts"][:, cold].astype(np.float64)
        assert contexts.sum() == arrays["counts"][cold].sum()
        by_chance = contexts.sum(axis=0) / len(contexts)  # a Poisson count's variance is its mean
        assert (contexts.var(axis=0) / by_chance).mean() > 2


def test_consecutive_inputs_are_alike(planted: Planted) -> None:
    """The layers add little to the residual stream, so inputs stay what the embeddings are."""
    assert planted.found.layers[0].top_precision == ()
    for layer in planted.found.layers[1:]:
        assert layer.input_similarity is not None
        assert layer.input_similarity > 0.99
        assert [found.density for found in layer.top_precision] == [0.1, 0.2, 0.3, 0.5]
        assert all(found.precision > 0.9 for found in layer.top_precision)


def test_similarity_and_precision_by_hand(planted: Planted) -> None:
    def inputs(layer: int) -> np.ndarray:
        return load_arrays(planted.found.layers[layer].inputs, "mlp_inputs")["mlp_inputs"].astype(np.float32)

    one, two = inputs(11), inputs(10)
    cosine = (one * two).sum(1) / np.linalg.norm(one, axis=1) / np.linalg.norm(two, axis=1)
    assert planted.found.layers[11].input_similarity == pytest.approx(cosine.mean(), abs=1e-6)
    k = round(0.3 * one.shape[1])
    largest = [np.argsort(-np.abs(values), axis=1, kind="stable")[:, :k] for values in (one, two)]
    shared = [len(np.intersect1d(a, b)) for a, b in zip(*largest, strict=True)]
    assert planted.found.layers[11].top_precision[2].precision == pytest.approx(np.mean(shared) / k, rel=1e-9)


def test_no_tasks_no_counts(planted: Planted, tmp_path: Path) -> None:
    """Only where the corpus names tasks is there anything to count by them."""
    assert "task_counts" in planted.arrays(0)
    text = tmp_path / "plain.txt"
    rng = np.random.default_rng(0)
    text.write_text("\n\n".join(" ".join(f"w{word}" for word in rng.integers(3, 2048, 40)) for _ in range(60)))
    write(Plant(plant_of("small", layers=1).shape, DENSITIES[:1], 3), tmp_path / "model", 128)
    model = ingest.run(IngestConfig(model=str(tmp_path / "model")), Workspace(tmp_path / "ingest", "test"))
    corpus = tokenize.run(TokenizeConfig(corpus=str(text), block_tokens=64), model, Workspace(tmp_path / "t", "test"))
    found = calibrate.run(CalibrateConfig(), model, corpus, Workspace(tmp_path / "c", "test"), 1)
    assert found.tasks == ()
    arrays = load_arrays(found.layers[0].family("neuron").arrays)
    assert "task_counts" not in arrays
    assert arrays["context_counts"].shape == (found.num_tokens // 64, 1024)
