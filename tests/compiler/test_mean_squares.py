"""Importances of inputs: `calibrate` measures the mean squares that transformers' own modules have, with any threads
and shards, and rounding uses them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from coldpress.compiler.activity.shards import merge
from coldpress.compiler.checkpoint.tensors import read_role
from coldpress.compiler.io import Workspace, load_arrays, save_arrays
from coldpress.compiler.rounding import rtn
from coldpress.compiler.rounding._matrix import InputStatistics, Rounding
from coldpress.compiler.stages import calibrate, ingest, quantize, recalibrate
from coldpress.compiler.stages.calibrate import CalibrateConfig
from coldpress.compiler.stages.ingest import IngestConfig
from coldpress.compiler.stages.quantize import QuantizeConfig
from coldpress.compiler.stages.recalibrate import RecalibrateConfig
from coldpress.runtime.plugins import load
from coldpress.runtime.quantization import Format
from coldpress.schemas.activations import Activations
from coldpress.schemas.corpus import Corpus
from coldpress.schemas.gram import Importance, LayerArrays
from coldpress.schemas.model import Model
from coldpress.schemas.quantized import Quantized
from tests.support.hf import load_hf
from tests.support.methods import families_of, fitted
from tests.support.models import write_model
from tests.support.records import tiny_sparsity
from tests.support.statistics import corpus_of_tokens, sparsity_of

LAYERS, BLOCKS, BLOCK_TOKENS = 11, 5, 13  # 11: layer 10 comes after layer 9, and after layer 1
EXPERTS, WIDTH = 4, 160
MODULES = {
    "attention_input": "self_attn.q_proj",
    "attention_mixed": "self_attn.o_proj",
    "mlp_input": "mlp.gate_proj",
    "mlp_inner": "mlp.down_proj",
}


def ingested(folder: Path, kind: str, num_hidden_layers: int) -> Model:
    write_model(folder / "tiny", kind, num_hidden_layers=num_hidden_layers)
    return ingest.run(IngestConfig(model=str(folder / "tiny")), Workspace(folder / "tiny/work", "test"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return ingested(tmp_path_factory.mktemp("llama"), "llama", LAYERS)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return ingested(tmp_path_factory.mktemp("mixtral"), "mixtral", 2)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    tokens = np.random.default_rng(5).integers(2, 384, (BLOCKS, BLOCK_TOKENS)).astype(np.int32)
    return corpus_of_tokens(tmp_path_factory.mktemp("corpus"), {"calibration": tokens})


def calibrated(model: Model, corpus: Corpus, work: Path, threads: int = 1, **config: Any) -> Activations:
    settings: dict[str, Any] = {"compute_dtype": "float32"} | config
    return calibrate.run(CalibrateConfig(**settings), model, corpus, Workspace(work, "test"), threads)


@pytest.fixture(scope="module")
def measured(model: Model, corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Activations:
    return calibrated(model, corpus, tmp_path_factory.mktemp("calibrate"))


@pytest.fixture(scope="module")
def expected(model: Model, corpus: Corpus) -> list[dict[str, np.ndarray]]:
    """Per layer, the squares of what a module takes in, float64 [num_blocks, T, n] by signal."""
    source, seen = load_hf(Path(model.folder).parents[1]), [{} for _ in range(LAYERS)]
    for layer, found in zip(source.model.layers, seen, strict=True):
        for signal, name in MODULES.items():
            layer.get_submodule(name).register_forward_pre_hook(
                lambda _, inputs, found=found, signal=signal: found.update({signal: inputs[0].double().numpy() ** 2})
            )
    with torch.no_grad():
        source(torch.from_numpy(load_arrays(corpus.split("calibration").arrays)["tokens"]).long())
    return seen


def arrays_of(found: Activations, layer: int) -> dict[str, np.ndarray]:
    file = found.layers[layer].mean_squares
    assert file is not None
    return load_arrays(file)


def importance_of(known: InputStatistics, model: Model, role: str) -> np.ndarray:
    importance = known.weights(model, f"{role}.weight", "row").importance
    assert importance is not None
    return importance


def squares_of(found: Activations) -> list[str]:
    return [layer.mean_squares.sha256 for layer in found.layers if layer.mean_squares]


def test_they_are_the_mean_squares_of_what_each_matrix_takes_in(
    measured: Activations, expected: list[dict[str, np.ndarray]]
) -> None:
    assert len(squares_of(measured)) == LAYERS
    for layer, wanted in enumerate(expected):
        arrays = arrays_of(measured, layer)
        assert arrays.keys() == wanted.keys()
        for signal, values in arrays.items():
            assert values.dtype == np.float32
            np.testing.assert_allclose(values, wanted[signal].mean(axis=1), rtol=1e-3)


@pytest.mark.slow
def test_neither_cores_nor_shards_change_a_bit(
    model: Model, corpus: Corpus, measured: Activations, tmp_path: Path
) -> None:
    assert squares_of(calibrated(model, corpus, tmp_path / "cores", threads=3)) == squares_of(measured)
    parts = [calibrated(model, corpus, tmp_path / f"{shard}", shard=shard, num_shards=2) for shard in range(2)]
    assert squares_of(merge(parts[::-1], Workspace(tmp_path / "merged", "test"))) == squares_of(measured)
    again = calibrated(model, corpus, tmp_path / "0", shard=0, num_shards=2)
    assert squares_of(again) == squares_of(parts[0]), "an interrupted run takes up the files that are there"


def test_what_a_selector_leaves_out_is_not_measured(
    model: Model, corpus: Corpus, measured: Activations, tmp_path: Path
) -> None:
    densities = dict.fromkeys(families_of("topk", model.spec), (0.3,) * LAYERS)
    sparsity = fitted(sparsity_of("topk", densities), model.spec, tmp_path)
    work = Workspace(tmp_path / "work", "test")
    found = recalibrate.run(RecalibrateConfig(), model, corpus, sparsity, measured, work, 1)
    assert found.layers[0].families != measured.layers[0].families
    assert squares_of(found) == []


def quantized(
    model: Model, folder: Path, layers: Sequence[int], format_name: str = "q4_1", **inputs: Any
) -> dict[int, str]:
    """Returns layer -> digest of its codes, with a selector over inputs: gate and up are read by columns."""
    sparsity = tiny_sparsity(model, "predictor", format_name)
    found: Quantized = quantize.run(
        QuantizeConfig(), model, sparsity, tuple(layers), Workspace(folder, "test"), **inputs
    )
    return {layer.layer: layer.arrays.sha256 for layer in found.layers}


@pytest.mark.slow
def test_chunks_change_no_byte_and_importances_do(model: Model, measured: Activations, tmp_path: Path) -> None:
    whole = quantized(model, tmp_path / "whole", range(LAYERS), activations=measured)
    parts = [
        quantized(model, tmp_path / f"{start}", part, activations=measured)
        for start, part in ((4, range(4, LAYERS)), (0, range(4)))
    ]
    assert parts[1] | parts[0] == whole
    plain = quantized(model, tmp_path / "plain", range(LAYERS))
    assert all(plain[layer] != whole[layer] for layer in range(LAYERS))


def test_an_importance_matrix_wins(model: Model, measured: Activations, tmp_path: Path) -> None:
    given = np.random.default_rng(1)
    prefix = "layers.0."
    arrays = {
        role.removeprefix(prefix).removesuffix(".weight"): given.exponential(1, source.shape[1]).astype(np.float32)
        for role, source in model.tensors.items()
        if role.startswith(prefix) and role.endswith("_proj.weight")
    }
    saved = save_arrays(tmp_path / "given.safetensors", arrays)
    layers = tuple(LayerArrays(layer=layer, arrays=saved) for layer in range(LAYERS))
    importance = Importance(imatrix_sha256="0" * 64, layers=layers, shared=None)
    both = quantized(model, tmp_path / "both", (0, 10), importance=importance, activations=measured)
    assert both == quantized(model, tmp_path / "alone", (0, 10), importance=importance)
    assert both != quantized(model, tmp_path / "measured", (0, 10), activations=measured)


@pytest.mark.parametrize("format_name", ["q4_1", "int4_group32", "iq4_nl"])
@pytest.mark.parametrize("name", ["v_proj", "o_proj", "up_proj", "down_proj"])
def test_outputs_change_less(
    model: Model, measured: Activations, expected: list[dict[str, np.ndarray]], name: str, format_name: str
) -> None:
    """By the mean squares of transformers' own inputs; layer 10's are not those of layer 1."""
    codec, role = load("coldpress.runtime.quantization", Format, format_name), f"layers.10.{name}.weight"
    signal = {"v_proj": "attention_input", "o_proj": "attention_mixed", "up_proj": "mlp_input"}.get(name, "mlp_inner")
    prices, weight = expected[10][signal].mean(axis=(0, 1)), read_role(model, role)

    def lost(activations: Activations | None) -> float:
        codes = Rounding(rtn.Plugin(), activations=activations).codes(model, role, "row", format_name)
        return float((prices * np.square(codec.decode(codes, weight.shape[1]) - weight)).sum())

    assert lost(measured) < lost(None)


def test_experts_have_their_own_inputs(mixture: Model, corpus: Corpus, tmp_path: Path) -> None:
    """Gate and up take what every token gives; a down projection its expert's part, weighted by the router."""
    found = calibrated(mixture, corpus, tmp_path)
    source, inner, given = load_hf(Path(mixture.folder).parents[1]), [], []
    tokens = torch.from_numpy(load_arrays(corpus.split("calibration").arrays)["tokens"]).long()
    block = source.model.layers[1].mlp
    block.register_forward_pre_hook(lambda _, inputs: given.append(inputs[0].flatten(0, 1)))
    with torch.no_grad():
        source(tokens)
    logits = given[0] @ torch.from_numpy(read_role(mixture, "layers.1.router.weight")).T
    top = logits.softmax(-1).topk(2)
    weights = torch.zeros_like(logits).scatter_(1, top.indices, top.values / top.values.sum(-1, keepdim=True))
    for expert in range(EXPERTS):
        gate, up = (
            given[0] @ torch.from_numpy(read_role(mixture, f"layers.1.experts.{expert}.{name}_proj.weight")).T
            for name in ("gate", "up")
        )
        inner.append((torch.nn.functional.silu(gate) * up * weights[:, expert, None]).double().square().mean(0))
    known = InputStatistics(activations=found)
    for expert in range(EXPERTS):
        of = {
            name: importance_of(known, mixture, f"layers.1.experts.{expert}.{name}_proj")
            for name in ("gate", "up", "down")
        }
        np.testing.assert_allclose(of["down"], inner[expert].numpy(), rtol=1e-3)
        for name in ("gate", "up"):
            np.testing.assert_allclose(of[name], given[0].double().square().mean(0).numpy(), rtol=1e-3)
    assert known.weights(mixture, "layers.1.router.weight", "row").importance is None
    assert known.weights(mixture, "embed_tokens.weight", "row").importance is None


def test_an_expert_without_tokens_has_no_importance(mixture: Model, corpus: Corpus, tmp_path: Path) -> None:
    found = calibrated(mixture, corpus, tmp_path)
    arrays = arrays_of(found, 0)
    arrays["mlp_inner"][:, WIDTH : 2 * WIDTH] = 0
    arrays["mlp_inner"][:, 0] = 0
    layer = found.layers[0].model_copy(update={"mean_squares": save_arrays(tmp_path / "none.safetensors", arrays)})
    known = InputStatistics(activations=found.model_copy(update={"layers": (layer,)}))
    assert known.weights(mixture, "layers.0.experts.1.down_proj.weight", "row").importance is None
    used = importance_of(known, mixture, "layers.0.experts.0.down_proj")
    assert 0 < used[0] < used[1:].min(), "an input that this text never used may be used by another"


def test_statistics_without_them_give_none(model: Model, measured: Activations) -> None:
    layers = tuple(layer.model_copy(update={"mean_squares": None}) for layer in measured.layers)
    known = InputStatistics(activations=measured.model_copy(update={"layers": layers}))
    assert known.weights(model, "layers.3.down_proj.weight", "row").importance is None
