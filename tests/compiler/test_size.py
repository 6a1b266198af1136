"""size: the next byte goes where it saves most, and perplexity says where to stop."""

import logging
import math
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch

from coldpress.compiler.activity.forward import LayerStream
from coldpress.compiler.checkpoint.tensors import read_role
from coldpress.compiler.io import Workspace, load_arrays, save_arrays
from coldpress.compiler.search.by_layer import LayerOptions, first_that_meets, path_of, scaled_effects
from coldpress.compiler.stages import ingest
from coldpress.compiler.stages.ingest import IngestConfig
from coldpress.compiler.stages.size import SizeConfig, choose, run
from coldpress.compiler.stages.size.passes import Network, effects_alone, network_of, nll_with
from coldpress.runtime.quantization import fp16
from coldpress.runtime.sparsity import predictor
from coldpress.schemas.corpus import SPLITS, Corpus, TokenBlocks
from coldpress.schemas.errors import ColdpressError
from coldpress.schemas.model import Model
from coldpress.schemas.predictors import Point, PredictorSize, TrainedLayer, TrainedPredictors
from tests.support.methods import nothing_cached
from tests.support.models import write_model
from tests.support.statistics import sparsity_of

LAYERS, HIDDEN, UNITS = 3, 64, 160
TOKENS = np.random.default_rng(8).integers(0, 384, (4, 24)).astype(np.int32)
RANKS = (8, 32, 2 * HIDDEN)
THRESHOLDS = (1e-6, -0.05, -100.0)
"""Hardly above zero, so that the largest network is the gate's sign; more; all."""
NO_TOPK = {1: 0, 2: 0}
PREDICTOR = predictor.Plugin()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("size")
    write_model(folder / "tiny", num_hidden_layers=LAYERS, relu=True)
    return ingest.run(IngestConfig(model=str(folder / "tiny")), Workspace(folder / "work", "test"))


@pytest.fixture(scope="module")
def stream(model: Model) -> LayerStream:
    return LayerStream(model)


@pytest.fixture(scope="module")
def trained(model: Model, tmp_path_factory: pytest.TempPathFactory) -> dict[int, TrainedLayer]:
    """Of layers 1 and 2; layer 0 uses all its units."""
    folder = tmp_path_factory.mktemp("trained")
    return {layer: trained_of(model, layer, folder) for layer in (1, 2)}


def trained_of(model: Model, layer: int, folder: Path) -> TrainedLayer:
    """relu(v x) - relu(-v x) is v x: of rank 2 k, what the gate's first k directions say of x; of 2 H, gate x."""
    gate = read_role(model, f"layers.{layer}.gate_proj.weight").astype(np.float32)
    directions = np.linalg.svd(gate, full_matrices=False)[2]
    sizes = []
    for rank in RANKS:
        kept = directions[: rank // 2]
        arrays = {
            "fc1": fp16.Plugin().encode(np.concatenate([kept, -kept])),
            "fc2": fp16.Plugin().encode(np.concatenate([gate @ kept.T, -gate @ kept.T], axis=1)),
        }
        points = tuple(Point(threshold=at, recall=0.9, precision=0.5, predicted_density=0.6) for at in THRESHOLDS)
        saved = save_arrays(folder / f"{layer}.{rank}.safetensors", arrays)
        nbytes = sum(array.nbytes for array in arrays.values())
        sizes.append(PredictorSize(rank=rank, arrays=saved, nbytes=nbytes, points=points))
    return TrainedLayer(layer=layer, format="fp16", density=0.5, skewness=0.1, suggested_rank=32, sizes=tuple(sizes))


def bytes_of(*ranks: int) -> int:
    return sum(2 * rank * (HIDDEN + UNITS) for rank in ranks)


def test_a_byte_goes_where_it_saves_most() -> None:
    steep = LayerOptions(nbytes=(10, 20, 40), effect=(9.0, 1.0, 0.9))
    flat = LayerOptions(nbytes=(10, 20, 40), effect=(3.0, 2.5, 0.0))
    assert path_of([steep, flat], 80) == [(0, 0), (1, 0), (1, 2), (2, 2)]
    assert path_of([flat, steep], 80)[1] == (0, 1)
    assert path_of([steep, flat], 49) == [(0, 0), (1, 0), (1, 1)]  # the last step of `flat` no longer fits
    assert path_of([steep, flat], 5) == [(0, 0)]


@pytest.mark.parametrize("length", [1, 2, 3, 8, 21])
def test_the_first_place_that_meets_is_found_from_anywhere(length: int) -> None:
    for wanted in range(length + 1):
        for start in range(length):
            asked: list[int] = []

            def meets(place: int, wanted: int = wanted, asked: list[int] = asked) -> bool:
                asked.append(place)
                return place >= wanted

            assert first_that_meets(meets, length, start) == min(wanted, length - 1)
            assert len(asked) == len(set(asked)) <= 2 + 2 * math.ceil(math.log2(length + 1))


def test_effects_fall_with_errors() -> None:
    assert scaled_effects(0.5, [4.0, 1.0, 0.0]) == (0.5, 0.125, 0.0)
    assert scaled_effects(0.5, [0.0, 0.0]) == (0.0, 0.0)


def test_a_network_decides_as_the_runtime_does(trained: dict[int, TrainedLayer]) -> None:
    size = trained[1].sizes[1]
    inputs = np.random.default_rng(0).normal(size=(40, HIDDEN)).astype(np.float32)
    for threshold in (0.3, 0.0, 1000.0):  # above all scores: the best unit alone
        point = size.points[0].model_copy(update={"threshold": threshold})
        found = network_of(PREDICTOR, "fp16", size, point, HIDDEN).predicted(torch.from_numpy(inputs), None).numpy()
        arrays = {**load_arrays(size.arrays), "format": np.array("fp16"), "threshold": np.array(threshold)}
        arrays["num_selected"] = np.array([0])
        alone = np.zeros_like(found)
        for token, signal in enumerate(inputs):
            alone[token, PREDICTOR.select(signal, arrays, nothing_cached(UNITS))] = True
        assert (found != alone).mean() < 1e-3
        assert alone.any(axis=1).all()


def test_a_layer_alone_is_the_model_with_only_its_predictor(
    stream: LayerStream, trained: dict[int, TrainedLayer]
) -> None:
    errors, changed = effects_alone(PREDICTOR, stream, TOKENS, trained, NO_TOPK)
    whole = stream.token_nll(TOKENS)
    for layer, one in trained.items():
        smallest = network_of(PREDICTOR, "fp16", one.sizes[0], one.sizes[0].points[0], HIDDEN)
        nll, _ = nll_with(stream, TOKENS, [layer], {layer: smallest}.__getitem__)
        assert changed[layer] == pytest.approx(np.mean((nll - whole) ** 2) / 2, rel=1e-4)
        assert errors[layer][0] > errors[layer][1] > 0
        assert errors[layer][2] < 1e-6 * errors[layer][0]


def test_cosine_and_perplexity_are_those_of_the_masked_layer(
    stream: LayerStream, trained: dict[int, TrainedLayer]
) -> None:
    """By hand, from the gate's own sign where the network is smaller."""
    one = trained[2]
    network = network_of(PREDICTOR, "fp16", one.sizes[0], one.sizes[0].points[0], HIDDEN)
    down = torch.from_numpy(read_role(stream.model, "layers.2.down_proj.weight")).float()
    seen: list[torch.Tensor] = []
    cosines: list[float] = []

    def by_hand(block: int) -> dict[str, object]:
        def mask(inner: torch.Tensor) -> torch.Tensor:
            scores = torch.relu(seen[-1] @ network.weights.fc1.T) @ network.weights.fc2.T
            left = inner * (scores >= THRESHOLDS[0])
            pair = [torch.nn.functional.linear(part, down) for part in (inner, left)]
            cosines.append(float(torch.nn.functional.cosine_similarity(pair[0], pair[1]).mean()))
            return left

        return {"mlp_input": lambda part: seen.append(part), "mlp_inner": mask}

    expected = stream.nll(TOKENS, lambda layer: by_hand if layer == 2 else None)  # type: ignore[arg-type,return-value]
    nll, found = nll_with(stream, TOKENS, [2], lambda _: network)
    assert nll.sum() == pytest.approx(expected[0], rel=1e-6)
    assert found[2] == pytest.approx(np.mean(cosines), rel=1e-4)
    assert 0 < found[2] < 1


def test_one_layer_s_network_is_in_memory(stream: LayerStream, trained: dict[int, TrainedLayer]) -> None:
    before: list[int] = []
    made: list[weakref.ref[Network]] = []

    def make(layer: int) -> Network:
        before.append(sum(network() is not None for network in made))
        size = trained[layer].sizes[0]
        network = network_of(PREDICTOR, "fp16", size, size.points[0], HIDDEN)
        made.append(weakref.ref(network))
        return network

    nll_with(stream, TOKENS, trained, make)
    assert before == [0, 0]


def test_sizes_are_the_smallest_within_the_tolerance(stream: LayerStream, trained: dict[int, TrainedLayer]) -> None:
    generous = choose(PREDICTOR, stream, TOKENS, trained, 1 << 40, tolerance=10.0, num_selected=NO_TOPK)
    assert [entry.rank for entry in generous.layers] == [8, 8]
    strict = choose(PREDICTOR, stream, TOKENS, trained, 1 << 40, tolerance=1e-5, num_selected=NO_TOPK)
    assert sum(entry.rank for entry in strict.layers) > 16
    without = math.exp(stream.block_nll(TOKENS).sum() / TOKENS[:, 1:].size)
    for found, tolerance in ((generous, 10.0), (strict, 1e-5)):
        assert found.ppl_without == pytest.approx(without)
        networks = {entry.layer: network_of(PREDICTOR, "fp16", entry, entry, HIDDEN) for entry in found.layers}
        ppl = math.exp(nll_with(stream, TOKENS, networks, networks.__getitem__)[0].mean())
        assert ppl <= (1 + tolerance) * without
        assert [tried.predictor_bytes for tried in found.tried] == sorted(t.predictor_bytes for t in found.tried)
        assert (bytes_of(*(entry.rank for entry in found.layers)), ppl) in [
            (tried.predictor_bytes, pytest.approx(tried.ppl)) for tried in found.tried
        ]


def test_where_bytes_end_thresholds_are_lowered(stream: LayerStream, trained: dict[int, TrainedLayer]) -> None:
    limit = bytes_of(8, 32)
    found = choose(PREDICTOR, stream, TOKENS, trained, limit, tolerance=1e-5, num_selected=NO_TOPK)
    assert sum(entry.nbytes for entry in found.layers) <= limit
    assert {entry.threshold for entry in found.layers} == {-100.0}


def test_every_token_gets_as_many_units_where_that_is_asked_for(
    stream: LayerStream, trained: dict[int, TrainedLayer]
) -> None:
    """Whatever thresholds say: with all units nothing is lost at any size, with few no size is enough."""
    everything = choose(PREDICTOR, stream, TOKENS, trained, 1 << 40, 1e-5, {1: UNITS, 2: UNITS})
    assert [entry.rank for entry in everything.layers] == [8, 8]
    few = choose(PREDICTOR, stream, TOKENS, trained, 1 << 40, 1e-5, {1: 4, 2: 4})
    assert {entry.threshold for entry in few.layers} == {THRESHOLDS[0]}
    assert few.tried[-1].ppl != pytest.approx(few.ppl_without, rel=1e-4)


def test_what_cannot_be_met_is_said(
    stream: LayerStream, trained: dict[int, TrainedLayer], caplog: pytest.LogCaptureFixture
) -> None:
    rough = {
        layer: one.model_copy(
            update={"sizes": tuple(size.model_copy(update={"points": size.points[:1]}) for size in one.sizes[:2])}
        )
        for layer, one in trained.items()
    }
    with caplog.at_level(logging.WARNING):
        found = choose(PREDICTOR, stream, TOKENS, rough, 1 << 40, tolerance=1e-6, num_selected=NO_TOPK)
    assert [entry.rank for entry in found.layers] == [32, 32]
    assert "0.00 % were asked for; more DRAM would help" in caplog.text


def corpus_of(folder: Path) -> Corpus:
    arrays = save_arrays(folder / "tokens.safetensors", {"tokens": TOKENS})
    blocks = TokenBlocks(split="validation", arrays=arrays, num_blocks=len(TOKENS), block_tokens=TOKENS.shape[1])
    parts = tuple(blocks.model_copy(update={"split": split}) for split in SPLITS)
    return Corpus(name="test", text_sha256="0" * 64, splits=parts)


def test_the_stage_joins_chunks_and_refuses_other_weights(
    model: Model, trained: dict[int, TrainedLayer], tmp_path: Path
) -> None:
    sparsity = sparsity_of("predictor", {"neuron": (1.0, 0.5, 0.5)}, predictor_rank=(0, 128, 128))
    arrays = {f"{layer}.neuron.num_selected": np.array([0], np.int32) for layer in range(LAYERS)}
    saved = save_arrays(tmp_path / "selector.safetensors", arrays)
    sparsity = sparsity.model_copy(update={"predictor_limit_bytes": bytes_of(128, 128), "arrays": saved})
    chunks = tuple(TrainedPredictors(weights_sha256=model.weights_sha256, layers=(trained[layer],)) for layer in (2, 1))
    config, corpus = SizeConfig(predictor_tolerance=10.0), corpus_of(tmp_path)
    found = run(config, model, corpus, sparsity, chunks, 1)
    assert [(entry.layer, entry.rank) for entry in found.layers] == [(1, 8), (2, 8)]
    assert found == run(config, model, corpus, sparsity, chunks, 2)
    none = run(config, model, corpus, sparsity, (TrainedPredictors(weights_sha256=model.weights_sha256, layers=()),), 1)
    assert none.layers == ()
    other = chunks[0].model_copy(update={"weights_sha256": "6" * 64})
    with pytest.raises(ColdpressError, match="the predictors belong to weights 666666666666"):
        run(config, model, corpus, sparsity, (other,), 1)
