"""recalibrate: the chosen densities, the masked pass, and when nothing has to be done."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coldpress.compiler.activity.forward import LayerStream
from coldpress.compiler.checkpoint.tensors import read_role
from coldpress.compiler.io import Workspace, load_arrays
from coldpress.compiler.stages import calibrate, ingest, recalibrate
from coldpress.compiler.stages.allocate import with_smaller
from coldpress.compiler.stages.calibrate import CalibrateConfig
from coldpress.compiler.stages.ingest import IngestConfig
from coldpress.compiler.stages.recalibrate import RecalibrateConfig
from coldpress.runtime.sparsity import topk
from coldpress.schemas.activations import Activations
from coldpress.schemas.corpus import Corpus
from coldpress.schemas.families import FamilyName, Method
from coldpress.schemas.model import Model
from coldpress.schemas.sparsity import Budget, Densities, Sparsity
from tests.support.methods import families_of, fit, fitted, nothing_cached
from tests.support.models import write_model
from tests.support.statistics import few_blocks

LAYERS = 3
NO_BUDGET = Budget(
    dram_budget_bytes=1,
    resident_bytes=0,
    predictor_bytes=0,
    kv_cache_bytes=0,
    bookkeeping_bytes=0,
    buffer_bytes=0,
    cache_bytes=0,
)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return few_blocks(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def silu(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return ingested(tmp_path_factory.mktemp("silu") / "tiny", relu=False)


@pytest.fixture(scope="module")
def relu(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return ingested(tmp_path_factory.mktemp("relu") / "tiny", relu=True)


def ingested(folder: Path, relu: bool) -> Model:
    write_model(folder, num_hidden_layers=LAYERS, relu=relu)
    return ingest.run(IngestConfig(model=str(folder)), Workspace(folder / "work", "test"))


def sparsity(folder: Path, method: Method, model: Model, *per_layer: float) -> Sparsity:
    families = families_of(method, model.spec)
    chosen = Sparsity(
        method=method,
        format="fp16",
        context_length=64,
        densities=tuple(Densities(family=family, per_layer=per_layer) for family in families),
        predictor_rank=(),
        budget=NO_BUDGET,
    )
    return fitted(chosen, model.spec, folder)


def first(model: Model, corpus: Corpus, work: Path, method: Method) -> Activations:
    return calibrate.run(CalibrateConfig(), model, corpus, Workspace(work / "first", "test"), 1)


def run(
    model: Model, corpus: Corpus, work: Path, method: Method, *per_layer: float, threads: int = 1, **changes: Any
) -> tuple[Activations, Activations]:
    """(what calibrate found, what recalibrate makes of it)."""
    before = first(model, corpus, work, method)
    changed = model.model_copy(update=changes)
    workspace = Workspace(work / f"second{threads}", "test")
    chosen = sparsity(work, method, model, *per_layer)
    return before, recalibrate.run(RecalibrateConfig(), changed, corpus, chosen, before, workspace, threads)


def active_of(found: Activations, layer: int, family: FamilyName) -> np.ndarray:
    bits = load_arrays(found.layers[layer].family(family).arrays, "bits")["bits"]
    return np.unpackbits(bits, axis=1, count=found.num_tokens, bitorder="little").astype(bool)


def test_exact_zeros_hold(relu: Model, corpus: Corpus, tmp_path: Path) -> None:
    before, after = run(relu, corpus, tmp_path, "predictor", 0.2, 0.2, 0.2)
    assert after == before.of_families(["neuron"])
    assert not (tmp_path / "second1").exists()


def test_what_is_left_of_a_relu_is_counted_again(relu: Model, corpus: Corpus, tmp_path: Path) -> None:
    before, after = run(relu, corpus, tmp_path, "fatrelu", 0.01, 0.01, 0.01)
    assert not after.exact_zeros
    for layer in range(LAYERS):
        used, fired = active_of(after, layer, "up_down"), active_of(before, layer, "up_down")
        assert (used.sum(axis=0) >= 1).all()
        if layer == 0:  # later layers see other inputs
            assert not (used & ~fired)[:, fired.any(axis=0)].any()
            assert used.sum() < fired.sum()


def test_with_every_unit_nothing_is_counted(silu: Model, corpus: Corpus, tmp_path: Path) -> None:
    before, after = run(silu, corpus, tmp_path, "dense", 1.0, 1.0, 1.0)
    assert after == before.of_families([])


def test_other_weights_are_counted_again(relu: Model, corpus: Corpus, tmp_path: Path) -> None:
    before, after = run(relu, corpus, tmp_path, "predictor", 0.2, 0.2, 0.2, weights_sha256="1" * 64)
    assert after is not before
    assert after.exact_zeros
    assert after.weights_sha256 == "1" * 64
    for layer in range(LAYERS):  # the weights are in truth the same, so the zeros are
        assert np.array_equal(active_of(after, layer, "neuron"), active_of(before, layer, "neuron"))


def test_each_token_has_the_chosen_number_of_units(silu: Model, corpus: Corpus, tmp_path: Path) -> None:
    _, after = run(silu, corpus, tmp_path, "topk", 0.5, 0.31, 1.0)
    assert not after.exact_zeros
    for layer, wanted in enumerate((0.5, 0.31, 1.0)):
        for family, units in (("mlp_in", 64), ("mlp_mid", 160)):
            active = active_of(after, layer, family)
            assert set(active.sum(axis=0)) == {topk.num_selected(units, wanted)}
            found = after.layers[layer].family(family)
            assert found.density == pytest.approx(round(wanted * units) / units)
            counts = load_arrays(found.arrays, "counts")["counts"]
            assert np.array_equal(counts, active.sum(axis=1))


def test_how_much_of_a_choice_the_layer_before_chose(silu: Model, corpus: Corpus, tmp_path: Path) -> None:
    """Only of units that go with entries of the hidden state; layer 1 uses fewer, and layer 2 uses all."""
    _, after = run(silu, corpus, tmp_path, "topk", 0.5, 0.25, 1.0)
    own = [active_of(after, layer, "mlp_in") for layer in range(LAYERS)]
    for layer in range(LAYERS):
        inner, inputs = (after.layers[layer].family(family) for family in ("mlp_mid", "mlp_in"))
        assert inner.in_layer_before is None
        if layer:
            both = sum(np.count_nonzero(a & b) for a, b in zip(own[layer].T, own[layer - 1].T, strict=True))
            assert inputs.in_layer_before == pytest.approx(both / np.count_nonzero(own[layer]))
            assert 0.25 <= inputs.in_layer_before < 1
        else:
            assert inputs.in_layer_before is None


def test_the_pass_goes_on_with_what_is_left(silu: Model, corpus: Corpus, tmp_path: Path) -> None:
    """Token by token through the selector of the runtime and plain numpy, from the MLP's input that was kept."""
    _, after = run(silu, corpus, tmp_path, "topk", 0.5, 0.5, 0.5)
    tokens = load_arrays(corpus.split("calibration").arrays)["tokens"]
    stream = LayerStream(silu)
    kept: list[np.ndarray] = []

    keep = {"mlp_input": lambda part: kept.append(part.numpy().copy())}
    stream.run_layer(0, stream.embed(tokens[:1]), lambda block: keep)
    x = kept[0]
    gate, up = (read_role(silu, f"layers.0.{name}_proj.weight") for name in ("gate", "up"))
    for token in range(24):
        ids = topk.Plugin().select(x[token], fit("topk", 64, 0.5), nothing_cached(64))
        assert np.array_equal(np.flatnonzero(active_of(after, 0, "mlp_in")[:, token]), ids)
        part = gate[:, ids] @ x[token, ids]
        inner = part / (1 + np.exp(-part)) * (up[:, ids] @ x[token, ids])
        expected = topk.Plugin().select(inner.astype(np.float32), fit("topk", 160, 0.5), nothing_cached(160))
        found = np.flatnonzero(active_of(after, 0, "mlp_mid")[:, token])
        assert len(np.setdiff1d(found, expected)) <= 1  # a tie within rounding may go either way


def test_the_second_layer_sees_the_masked_first(silu: Model, corpus: Corpus, tmp_path: Path) -> None:
    before, after = run(silu, corpus, tmp_path, "topk", 0.2, 0.2, 0.2)

    def inputs(found: Activations, layer: int) -> np.ndarray:
        return load_arrays(found.layers[layer].inputs, "mlp_inputs")["mlp_inputs"].astype(np.float32)

    assert np.array_equal(inputs(before, 0), inputs(after, 0))
    assert np.abs(inputs(before, 1) - inputs(after, 1)).max() > 0.01


def test_neurons_of_a_model_without_zeros_are_the_largest(silu: Model, corpus: Corpus, tmp_path: Path) -> None:
    _, after = run(silu, corpus, tmp_path, "predictor", 0.25, 0.25, 0.25)
    assert set(active_of(after, 1, "neuron").sum(axis=0)) == {40}


def test_threads_change_no_byte(silu: Model, corpus: Corpus, tmp_path: Path) -> None:
    _, one = run(silu, corpus, tmp_path, "topk", 0.5, 0.4, 0.3)
    _, two = run(silu, corpus, tmp_path, "topk", 0.5, 0.4, 0.3, threads=2)
    for a, b in zip(one.layers, two.layers, strict=True):
        assert [family.arrays.sha256 for family in a.families] == [family.arrays.sha256 for family in b.families]
        assert a.inputs.sha256 == b.inputs.sha256


def test_of_several_budgets_the_smallest_one_s_units_are_counted(silu: Model, corpus: Corpus, tmp_path: Path) -> None:
    """The largest budget uses every unit, so that counting for it would say nothing."""
    before = first(silu, corpus, tmp_path, "topk")
    few = sparsity(tmp_path / "few", "topk", silu, 0.5, 0.31, 0.2)
    both = with_smaller(sparsity(tmp_path / "all", "topk", silu, 1.0, 1.0, 1.0), [few])
    together, alone = (
        recalibrate.run(RecalibrateConfig(), silu, corpus, chosen, before, Workspace(tmp_path / name, "test"), 1)
        for name, chosen in (("together", both), ("alone", few))
    )
    for layer in range(LAYERS):
        for family in few.families:
            np.testing.assert_array_equal(active_of(together, layer, family), active_of(alone, layer, family))
