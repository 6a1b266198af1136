"""Statistics of experts: by hand, against caches simulated one use after another, and on planted mixtures."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coldpress.compiler.activity import expert_statistics
from coldpress.compiler.activity.expert_counts import used_experts
from coldpress.compiler.activity.packed_bits import num_before
from coldpress.compiler.activity.shards import merge
from coldpress.compiler.io import Workspace, load_arrays
from coldpress.compiler.stages import calibrate, ingest, tokenize
from coldpress.compiler.stages.calibrate import CalibrateConfig
from coldpress.compiler.stages.ingest import IngestConfig
from coldpress.compiler.stages.tokenize import TokenizeConfig
from coldpress.runtime.cache import CacheFacts, make
from coldpress.schemas.activations import Activations
from coldpress.schemas.corpus import Corpus
from coldpress.schemas.model import Model
from tests.support.planted_mixtures import MixturePlant, expected, mixture_of, write

TOKENS, CHOSEN = 8192, 2


def used_of(tokens: list[tuple[int, ...]], num_experts: int) -> np.ndarray:
    """Returns bool [T, E] from each token's experts."""
    found = np.zeros((len(tokens), num_experts), bool)
    for token, experts in enumerate(tokens):
        found[token, list(experts)] = True
    return found


def random_uses(num_tokens: int, num_experts: int, chosen: int, seed: int) -> np.ndarray:
    """Returns bool [T, E] with some experts hotter than others, and some kept from token to token."""
    random = np.random.default_rng(seed)
    liked = random.standard_normal((num_tokens, num_experts)) + np.linspace(1.5, 0, num_experts)
    for token in range(1, num_tokens):
        liked[token] += 0.5 * liked[token - 1]
    return liked.argsort(axis=1).argsort(axis=1) >= num_experts - chosen


BY_HAND = used_of([(0, 1), (0, 2), (2, 3), (0, 2), (1, 3), (0, 1), (0, 1), (1, 2)], 4)


def test_pairs_and_tasks_by_hand() -> None:
    assert expert_statistics.together(BY_HAND).tolist() == [[5, 3, 2, 0], [3, 5, 1, 1], [2, 1, 4, 1], [0, 1, 1, 2]]
    tasks = np.array([0, 0, 0, -1, 2, 2, 2, 2])
    assert expert_statistics.task_counts(BY_HAND, tasks, 3).tolist() == [[2, 1, 2, 1], [0, 0, 0, 0], [2, 4, 1, 1]]


def test_a_static_set_is_ranked_by_the_tokens_before_the_last_quarter() -> None:
    """Six tokens use 0 four times, 1 and 2 three times, 3 twice; the last two use 0, 1, 1 and 2."""
    assert num_before(8) == 6
    assert expert_statistics.static_coverage(BY_HAND).tolist() == [1 / 4, 3 / 4, 1.0, 1.0]


def test_persistence_is_within_blocks() -> None:
    """In one block 0; 2; 2; none; 1; 0 and 1; 1 are repeated; in two the step from the fourth token does not count."""
    assert expert_statistics.persistence(BY_HAND, 8) == pytest.approx(7 / 14)
    two = used_of([(0, 1), (0, 2), (1, 2), (1, 2)], 3)
    assert expert_statistics.persistence(two, 2) == pytest.approx(3 / 4)
    assert expert_statistics.persistence(two, 1) == 0.0


def test_stack_distances_by_hand() -> None:
    """The order begins as 0 1 2 3; a token's experts come to its front, the higher number first."""
    found = expert_statistics.stack_distances(BY_HAND[:4]).tolist()
    assert found == [[1, 2, 0, 0], [2, 0, 3, 0], [0, 0, 1, 4], [3, 0, 2, 0]]


@pytest.mark.parametrize(("num_experts", "chosen"), [(8, 2), (16, 4), (128, 8)])
def test_one_pass_gives_the_misses_of_every_cache(num_experts: int, chosen: int) -> None:
    """Against the runtime's own policy, one cache for each size, which begins with the experts of lowest numbers."""
    used = random_uses(400, num_experts, chosen, seed=num_experts)
    found, start = expert_statistics.lru_misses(used), num_before(400)
    for held in range(chosen, num_experts + 1, 1 if num_experts < 100 else 7):
        state = make("lru", {}, CacheFacts(num_experts, held, np.empty(0, np.int32), np.arange(num_experts)))
        for expert in range(num_experts)[::-1]:
            state.serve(np.array([expert]))
        missed = 0
        for token, experts in enumerate(used):
            ids = np.flatnonzero(experts)
            hits = state.serve(ids)
            missed += (token >= start) * int((~hits if hits.dtype == bool else np.isin(ids, hits, invert=True)).sum())
        assert found[held - 1] == pytest.approx(missed / used[start:].sum(), abs=1e-12), held


def test_one_pass_gives_the_misses_of_an_lru_expert_by_expert() -> None:
    """A list with the last used expert in front; the experts of a token are looked up before it changes."""
    for layer in range(11):
        used = random_uses(200, 12, 3, seed=layer)
        found = expert_statistics.lru_misses(used)
        for held in range(1, 13):
            order, missed, uses = list(range(12)), 0, 0
            for token, experts in enumerate(used):
                ids = np.flatnonzero(experts).tolist()
                if token >= 150:
                    uses += len(ids)
                    missed += len(set(ids) - set(order[:held]))
                for expert in ids:
                    order.remove(expert)
                    order.insert(0, expert)
            assert found[held - 1] == pytest.approx(missed / uses, abs=1e-12)
        assert found[-1] == 0
        assert (np.diff(found) <= 1e-12).all()


def calibrated(plant: MixturePlant, folder: Path, num_tokens: int) -> tuple[MixturePlant, Model, Corpus, Activations]:
    write(plant, folder / "model", 2 * num_tokens)
    model = ingest.run(IngestConfig(model=str(folder / "model")), Workspace(folder / "ingest", "test"))
    config = TokenizeConfig(corpus=str(folder / "model/corpus.jsonl"), calibration_tokens=num_tokens)
    corpus = tokenize.run(config, model, Workspace(folder / "tokenize", "test"))
    found = calibrate.run(CalibrateConfig(), model, corpus, Workspace(folder / "calibrate", "test"), 2)
    return plant, model, corpus, found


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> tuple[MixturePlant, Model, Corpus, Activations]:
    return calibrated(mixture_of("small-moe", seed=3), tmp_path_factory.mktemp("planted"), TOKENS)


def hot_mass(frequencies: np.ndarray) -> float:
    """Returns the share of the uses that the hottest quarter has."""
    return np.sort(frequencies)[::-1][: len(frequencies) // 4].sum() / frequencies.sum()


def check_law(plant: MixturePlant, found: Activations, tolerance: float, of_means: float) -> None:
    """Compares hottest quarter, persistence and predictability of every layer, and their means over all layers, with
    the law's own sampling."""
    shape, differences = plant.shape, []
    for number, layer in enumerate(found.layers):
        if number < shape.num_dense_layers:
            assert layer.experts is None
            continue
        law = expected(plant, number)
        assert layer.experts is not None
        used = used_experts(layer.experts, found.num_tokens)
        assert used.shape == (found.num_tokens, shape.num_experts)
        assert (used.sum(axis=1) == shape.num_experts_per_tok).all()
        frequencies = used.mean(axis=0)
        assert np.corrcoef(frequencies, law.frequencies)[0, 1] > 0.95
        again, ahead = expert_statistics.persistence(used, found.block_tokens or 0), layer.experts.predictability
        assert (ahead is None) == (number == 0)
        hot = hot_mass(frequencies) - hot_mass(law.frequencies)
        differences.append((hot, again - law.persistence, 0.0 if ahead is None else ahead - law.predictability))
    assert np.abs(differences).max() < tolerance
    assert np.abs(np.mean(differences, axis=0)).max() < of_means


@pytest.mark.slow
def test_calibration_finds_the_planted_law(planted: tuple[MixturePlant, Model, Corpus, Activations]) -> None:
    """In each of 12 layers to 0.05, and on average to 0.02: the text has 2,045 different words, each with one noise."""
    plant, _, _, found = planted
    check_law(plant, found, 0.05, 0.02)
    other = used_experts(found.layers[10].experts, TOKENS).mean(axis=0)  # type: ignore[arg-type]
    assert np.corrcoef(other, expected(plant, 1).frequencies)[0, 1] < 0.9


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("qwen3_moe", {"head_dim": 32, "num_experts": 32, "num_experts_per_tok": 4}),
        ("gpt_oss", {"head_dim": 32, "num_experts": 32, "num_experts_per_tok": 4}),
        ("glm4_moe", {"head_dim": 32, "num_shared_experts": 1, "num_dense_layers": 1, "dense_intermediate_size": 256}),
    ],
)
def test_any_mixture_can_be_planted(tmp_path: Path, model_type: str, changes: dict[str, Any]) -> None:
    plant = mixture_of("small-moe", layers=3, model_type=model_type, **changes)
    plant, _, _, found = calibrated(plant, tmp_path, 4096)
    check_law(plant, found, 0.05, 0.04)


@pytest.mark.slow
def test_the_record_sums_up_the_layers(planted: tuple[MixturePlant, Model, Corpus, Activations]) -> None:
    _, _, corpus, found = planted
    layers = [used_experts(layer.experts, TOKENS) for layer in found.layers if layer.experts is not None]
    curve = found.experts
    assert curve is not None
    assert curve.num_experts_per_tok == CHOSEN
    for held in (1, 4, 16):
        last = [used[TOKENS * 3 // 4 :] for used in layers]
        hottest = [np.argsort(-used[: TOKENS * 3 // 4].sum(axis=0), kind="stable")[:held] for used in layers]
        served = [part[:, ids].sum() / part.sum() for part, ids in zip(last, hottest, strict=True)]
        assert curve.static_misses[held - 1] == pytest.approx(1 - np.mean(served), abs=1e-9)
    tasks = load_arrays(corpus.split("calibration").arrays)["tasks"].ravel()
    for layer, used in zip(found.layers, layers, strict=True):
        assert layer.experts is not None
        counts = load_arrays(layer.experts.arrays)["task_counts"]
        assert counts.tolist() == [used[tasks == task].sum(axis=0).tolist() for task in range(len(found.tasks))]


@pytest.mark.slow
def test_shards_and_the_log(
    planted: tuple[MixturePlant, Model, Corpus, Activations], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, model, corpus, found = planted
    parts = [
        calibrate.run(
            CalibrateConfig(shard=shard, num_shards=3), model, corpus, Workspace(tmp_path / str(shard), "test"), 2
        )
        for shard in range(3)
    ]
    caplog.set_level(logging.INFO)
    joined = calibrate.run(CalibrateConfig(), model, corpus, Workspace(tmp_path / "all", "test"), 1, tuple(parts))
    assert joined.experts == found.experts
    for one, two in zip(joined.layers, found.layers, strict=True):
        assert one.experts is not None
        assert two.experts is not None
        assert one.experts.arrays.sha256 == two.experts.arrays.sha256
        assert one.experts.predictability == two.experts.predictability
    (line,) = [message for message in caplog.messages if message.startswith("calibrate: experts")]
    curve = found.experts
    assert curve is not None
    for share, held in ((0.125, 2), (0.25, 4), (0.5, 8), (0.75, 12)):
        part = f"{1 - curve.static_misses[held - 1]:.0%} and {1 - curve.lru_misses[held - 1]:.0%} with {share:.1%}"
        assert part in line
    assert merge(tuple(parts), Workspace(tmp_path / "again", "test")).experts == found.experts
