"""calibrate and the statistics it shares with recalibrate: counted by hand from transformers' own activations."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coldpress.compiler.activity import statistics
from coldpress.compiler.activity.forward import LayerStream
from coldpress.compiler.io import Workspace, load_arrays, save_arrays, sha256_of
from coldpress.compiler.stages import calibrate, ingest
from coldpress.compiler.stages.calibrate import CalibrateConfig
from coldpress.compiler.stages.ingest import IngestConfig
from coldpress.schemas.activations import Activations
from coldpress.schemas.corpus import SPLITS, Corpus, TokenBlocks
from coldpress.schemas.families import FamilyName
from coldpress.schemas.model import Model
from tests.support.models import write_model

BLOCKS, BLOCK_TOKENS, LAYERS = 3, 21, 3  # 21: blocks do not end on whole bytes


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Model]:
    def ingested(kind: str = "llama", relu: bool = True, dtype: str = "float32") -> Model:
        folder = tmp_path_factory.mktemp("model") / "tiny"
        write_model(folder, kind, num_hidden_layers=LAYERS, relu=relu, dtype=dtype, overrides={"sliding_window": None})
        return ingest.run(IngestConfig(model=str(folder)), Workspace(folder / "work", "test"))

    return ingested


@pytest.fixture(scope="module")
def relu(make: Callable[..., Model]) -> Model:
    return make()


@pytest.fixture(scope="module")
def silu(make: Callable[..., Model]) -> Model:
    return make(relu=False)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return corpus_of(tmp_path_factory.mktemp("corpus"), BLOCKS, BLOCK_TOKENS)


def corpus_of(folder: Path, num_blocks: int, block_tokens: int) -> Corpus:
    tokens = np.random.default_rng(5).integers(2, 384, (num_blocks, block_tokens)).astype(np.int32)
    arrays = save_arrays(folder / "tokens.safetensors", {"tokens": tokens})
    blocks = (
        TokenBlocks(split=split, arrays=arrays, num_blocks=num_blocks, block_tokens=block_tokens) for split in SPLITS
    )
    return Corpus(name="random", text_sha256="0" * 64, splits=tuple(blocks))


def run(model: Model, corpus: Corpus, work: Path, threads: int = 1, **config: Any) -> Activations:
    return calibrate.run(CalibrateConfig(**config), model, corpus, Workspace(work, "test"), threads)


def active_of(found: Activations, layer: int, family: FamilyName) -> np.ndarray:
    """bool [num_units, num_tokens]."""
    bits = load_arrays(found.layers[layer].family(family).arrays, "bits")["bits"]
    return np.unpackbits(bits, axis=1, count=found.num_tokens, bitorder="little").astype(bool)


def by_transformers(
    model: Model, corpus: Corpus, module: str, dtype: str = "float32", layers: str = "model.layers"
) -> list[np.ndarray]:
    """Per layer, what goes into a module of the whole model, float32 [num_tokens, size]."""
    import torch
    from transformers import AutoModelForCausalLM

    whole: Any = AutoModelForCausalLM.from_pretrained(
        Path(next(iter(model.tensors.values())).file).resolve().parent, dtype=dtype
    ).eval()
    seen: list[np.ndarray] = []
    for layer in whole.get_submodule(layers):
        layer.get_submodule(module).register_forward_pre_hook(
            lambda _, inputs: seen.append(inputs[0].flatten(0, 1).float().numpy().copy())
        )
    with torch.no_grad():
        whole(torch.from_numpy(load_arrays(corpus.split("calibration").arrays)["tokens"]).long())
    return seen


def same_files(one: Activations, two: Activations) -> bool:
    def digests(found: Activations) -> list[str]:
        return [
            arrays.sha256
            for layer in found.layers
            for arrays in (layer.inputs, layer.mean_squares, *(family.arrays for family in layer.families))
            if arrays is not None
        ]

    return digests(one) == digests(two)


def test_bits_counts_and_inputs_are_those_of_the_model(relu: Model, corpus: Corpus, tmp_path: Path) -> None:
    found = run(relu, corpus, tmp_path)
    assert (found.num_tokens, found.exact_zeros, len(found.layers)) == (63, True, LAYERS)
    assert found.weights_sha256 == relu.weights_sha256
    inner, inputs = (by_transformers(relu, corpus, module) for module in ("mlp.down_proj", "mlp"))
    for layer in range(LAYERS):
        active = inner[layer].T != 0
        statistics_of = found.layers[layer].family("neuron")
        arrays = load_arrays(statistics_of.arrays)
        assert np.array_equal(active_of(found, layer, "neuron"), active)
        assert arrays["bits"].shape == (160, 8)
        assert not (arrays["bits"][:, -1] & 0x80).any()  # padding behind the 63rd token
        assert np.array_equal(arrays["counts"], active.sum(axis=1))
        assert arrays["counts"].dtype == np.int64
        assert statistics_of.density == pytest.approx(active.mean())
        assert 0.01 < active.mean() < 0.7
        stored = load_arrays(found.layers[layer].inputs, "mlp_inputs")["mlp_inputs"]
        assert stored.dtype == np.float16
        assert np.allclose(stored, inputs[layer], rtol=2e-3, atol=1e-4)


def test_similarity_is_the_mean_cosine_with_the_layer_before(relu: Model, corpus: Corpus, tmp_path: Path) -> None:
    found = run(relu, corpus, tmp_path)
    inputs = by_transformers(relu, corpus, "mlp")
    assert found.layers[0].input_similarity is None
    for layer in range(1, LAYERS):
        one, two = inputs[layer], inputs[layer - 1]
        cosine = (one * two).sum(1) / np.linalg.norm(one, axis=1) / np.linalg.norm(two, axis=1)
        assert found.layers[layer].input_similarity == pytest.approx(cosine.mean(), abs=1e-3)


def test_every_family_that_some_method_has_is_looked_at(
    relu: Model, silu: Model, corpus: Corpus, tmp_path: Path
) -> None:
    """So that another method does not calibrate again. What a ReLU makes zero is counted, of the rest magnitudes."""
    found, smooth = run(relu, corpus, tmp_path / "relu"), run(silu, corpus, tmp_path / "silu")
    families = ["neuron", "up_down", "gate_down", "mlp_in", "mlp_mid", "attn_in", "attn_out"]
    exact = {"neuron", "up_down", "mlp_mid"}
    for statistics_of in (found.layers[1], smooth.layers[1]):
        assert [family.family for family in statistics_of.families] == families
    for family in found.layers[1].families:
        assert (family.density is None) == (family.family not in exact)
        assert ("bits" in load_arrays(family.arrays)) == (family.family in exact)
    assert all(family.density is None for family in smooth.layers[1].families)
    assert found.are_exact(["up_down"])
    assert not found.are_exact(["mlp_in", "mlp_mid"])
    assert not smooth.are_exact(["neuron"])


def test_families_with_one_signal_share_a_file(relu: Model, corpus: Corpus, tmp_path: Path) -> None:
    found = run(relu, corpus, tmp_path)
    for layer in found.layers:
        files = {family.family: family.arrays for family in layer.families}
        assert files["neuron"] == files["mlp_mid"] != files["up_down"]
    assert [entry.family for entry in found.of_families(["mlp_mid"]).layers[2].families] == ["mlp_mid"]


def test_gates_decide_where_up_and_down_are_the_unit(relu: Model, corpus: Corpus, tmp_path: Path) -> None:
    found = run(relu, corpus, tmp_path)
    for layer in range(LAYERS):
        assert np.array_equal(active_of(found, layer, "up_down"), active_of(found, layer, "neuron"))


def test_two_matrices_have_the_inner_activation_as_signal(
    make: Callable[..., Model], corpus: Corpus, tmp_path: Path
) -> None:
    opt = make("opt")
    found = run(opt, corpus, tmp_path)
    assert found.layers[0].family("gate_down") is None, "there is no gate"
    inner = by_transformers(opt, corpus, "fc2", layers="model.decoder.layers")
    for family in ("mlp_mid", "neuron"):
        assert np.array_equal(active_of(found, 1, family), inner[1].reshape(found.num_tokens, -1).T != 0)


def test_magnitudes_give_the_threshold_of_any_density(silu: Model, corpus: Corpus, tmp_path: Path) -> None:
    found = run(silu, corpus, tmp_path)
    for family, module in (("mlp_in", "mlp"), ("mlp_mid", "mlp.down_proj")):
        signals = by_transformers(silu, corpus, module)
        for layer in range(LAYERS):
            arrays = load_arrays(found.layers[layer].family(family).arrays)
            histogram, edges = arrays["magnitude_histogram"], arrays["magnitude_edges"]
            assert histogram.sum() == signals[layer].size
            for density in (0.05, 0.3, 0.5, 0.9):
                above = np.cumsum(histogram[::-1])[::-1]
                threshold = edges[np.flatnonzero(above >= density * above[0])[-1]]
                exact = np.quantile(np.abs(signals[layer]), 1 - density)
                assert threshold == pytest.approx(exact, rel=0.04)


def test_threads_change_no_byte(relu: Model, corpus: Corpus, tmp_path: Path) -> None:
    assert same_files(run(relu, corpus, tmp_path / "1"), run(relu, corpus, tmp_path / "2", threads=2))


def native_bfloat16(monkeypatch: pytest.MonkeyPatch, native: bool) -> None:
    import torch

    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": native})


def test_bfloat16_weights_are_computed_in_bfloat16(
    make: Callable[..., Model], corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As transformers does by default; the statistics are those of its own pass but for rounding."""
    model = make(dtype="bfloat16")
    native_bfloat16(monkeypatch, native=True)
    found = run(model, corpus, tmp_path / "1")
    assert found.compute_dtype == "bfloat16"
    assert same_files(found, run(model, corpus, tmp_path / "2", threads=2))
    inner, inputs = (by_transformers(model, corpus, module, "bfloat16") for module in ("mlp.down_proj", "mlp"))
    for layer in range(LAYERS):
        stored = load_arrays(found.layers[layer].inputs, "mlp_inputs")["mlp_inputs"]
        assert np.allclose(stored, inputs[layer], rtol=0.05, atol=0.05)
        assert (active_of(found, layer, "neuron") == (inner[layer].T != 0)).mean() > 0.99
    exact = run(model, corpus, tmp_path / "3", compute_dtype="float32")
    assert exact.compute_dtype == "float32"
    assert not same_files(found, exact)


def test_what_is_computed_in(
    make: Callable[..., Model], relu: Model, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    native_bfloat16(monkeypatch, native=False)
    assert run(make(dtype="bfloat16"), corpus, tmp_path / "1").compute_dtype == "float32"
    native_bfloat16(monkeypatch, native=True)
    assert run(make(dtype="float16"), corpus, tmp_path / "2").compute_dtype == "float32"
    assert run(relu, corpus, tmp_path / "3").compute_dtype == "float32"


def test_blocks_of_whole_bytes_are_joined_alike(relu: Model, tmp_path: Path) -> None:
    """16 tokens per block or two blocks read as bits: the same columns."""
    whole = corpus_of(tmp_path / "corpus", 2, 16)
    found = run(relu, whole, tmp_path / "w")
    inner = by_transformers(relu, whole, "mlp.down_proj")
    assert np.array_equal(active_of(found, 2, "neuron"), inner[2].T != 0)


def test_progress_is_told(relu: Model, corpus: Corpus, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger=statistics.__name__)
    run(relu, corpus, tmp_path)
    assert [record.message for record in caplog.records] == ["layer 1/3", "layer 2/3", "layer 3/3"]


class _Interrupted(Exception):
    pass


def test_hidden_states_are_not_hashed(
    relu: Model, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are the largest file of the stage: their blocks carry checksums, which take no second read."""
    hashed: list[str] = []

    def watched(path: Path) -> str:
        hashed.append(path.name)
        return sha256_of(path)

    monkeypatch.setattr("coldpress.compiler.io.sha256_of", watched)
    run(relu, corpus, tmp_path)
    assert "001.inputs.safetensors" in hashed
    assert not [name for name in hashed if name.startswith("hidden")]


@pytest.mark.slow
@pytest.mark.parametrize("removed", [False, True])
def test_an_interrupted_run_resumes(
    relu: Model, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, removed: bool
) -> None:
    expected = run(relu, corpus, tmp_path / "whole")
    assert sorted(path.name for path in (tmp_path / "whole").iterdir()) == [
        f"{layer:03d}.{name}.{kind}"
        for layer in range(LAYERS)
        for name in ("attn_in", "attn_out", "gate_down", "inputs", "mlp_in", "neuron", "squares", "up_down")
        for kind in ("done.json", "safetensors")
    ]
    real = LayerStream.load_layer
    ran: list[int] = []

    def until_layer_2(stream: LayerStream, layer: int, *arguments: Any) -> Any:
        if layer == 2:
            raise _Interrupted
        return real(stream, layer, *arguments)

    def watched(stream: LayerStream, layer: int, *arguments: Any) -> Any:
        ran.append(layer)
        return real(stream, layer, *arguments)

    monkeypatch.setattr(LayerStream, "load_layer", until_layer_2)
    with pytest.raises(_Interrupted):
        run(relu, corpus, tmp_path / "w")
    if removed:
        (tmp_path / "w/hidden.002.safetensors").unlink()
    monkeypatch.setattr(LayerStream, "load_layer", watched)
    assert same_files(run(relu, corpus, tmp_path / "w"), expected)
    assert ran == ([0, 1, 2] if removed else [2])
    ran.clear()
    assert same_files(run(relu, corpus, tmp_path / "w"), expected)
    assert ran == []
