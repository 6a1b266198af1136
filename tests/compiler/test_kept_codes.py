"""All matrices of a quantized file keep its codes in a dense build, in the types that the file has them in."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from coldpress.compiler.activity.calibration_pass import PassConfig, count_activity
from coldpress.compiler.activity.forward import LayerStream
from coldpress.compiler.activity.layer_counts import ActivityRule, countable_families
from coldpress.compiler.activity.rounded import Rounded
from coldpress.compiler.activity.sensitivity import Sensitivity
from coldpress.compiler.checkpoint.tensors import read_codes
from coldpress.compiler.cost_model import slice_bytes, unit_bytes
from coldpress.compiler.io import Workspace, load_record
from coldpress.compiler.kept_codes import keeping, own_layers
from coldpress.compiler.llama_cpp.formats import type_of
from coldpress.compiler.quality.passes import Passes
from coldpress.compiler.rounding._matrix import NEAREST
from coldpress.compiler.search import judge
from coldpress.compiler.search.settings import AllocateConfig
from coldpress.compiler.stages import allocate, explore
from coldpress.compiler.stages.allocate import _finalists, _formats, _mixed
from coldpress.compiler.stages.explore import ExploreConfig
from coldpress.compiler.stages.export._stored import StoredModel
from coldpress.compiler.stages.report import figures, page_charts
from coldpress.runtime.generate.session import Session
from coldpress.schemas.activations import Activations
from coldpress.schemas.corpus import Corpus
from coldpress.schemas.curves import Curves, FormatLoss, HeadLoss, MatrixLoss
from coldpress.schemas.errors import DoesNotFitError
from coldpress.schemas.families import (
    BLOCKS,
    WHOLE_MLP,
    FamilyName,
    FormatName,
    Formats,
    LayerFormats,
    kept_of,
    layer_formats,
    num_units,
)
from coldpress.schemas.model import Model
from coldpress.schemas.sparsity import Sparsity
from tests.support.checkpoints import run
from tests.support.curves import NO_LOSS
from tests.support.gguf_cases import exported, quantized
from tests.support.product import Case, Source, compiled, with_text
from tests.support.statistics import device_of

LAYERS = 11
FORMATS = {"attn_v": "q6_k", "attn_q": "q5_k", "token_embd": "q5_0", "output": "q6_k"}
"""Formats by GGUF's name; all other matrices have q4_k, but for the down projections of some layers."""
FINE = (0, 3, 10)
"""Layers whose down projections have q6_k."""
ROLES = {"q_proj": "q5_k", "v_proj": "q6_k"}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    folder = tmp_path_factory.mktemp("source")
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
    _, file = exported(folder, "llama", sizes | {"head_dim": 64}, layers=LAYERS)

    def of_tensor(name: str) -> str:
        _, *block, matrix, _ = ["", *name.split(".")]
        is_fine = matrix == "ffn_down" and int(block[1]) in FINE
        return type_of("q6_k" if is_fine else FORMATS.get(matrix, "q4_k"))

    mixed = quantized(file, folder / "mixed.gguf", of_tensor)
    return with_text(folder, mixed, run(mixed, folder / "ingest"))


def kept(model: Model, layers: str) -> dict[str, str]:
    return {role: one.format for one in kept_of(keeping(model, layers)) for role in one.roles}


def of_all_layers(formats: dict[str, str]) -> dict[str, str]:
    return {f"layers.{layer}.{role}.weight": name for layer in range(LAYERS) for role, name in formats.items()}


def test_they_are_kept_in_the_file_s_format_or_where_they_are_smaller(source: Source) -> None:
    embeddings = {"embed_tokens.weight": "q5_0", "lm_head.weight": "q6_k"}
    assert kept(source.model, "q4_k") == embeddings | of_all_layers(ROLES)
    assert kept(source.model, "q5_k") == embeddings | of_all_layers({"k_proj": "q4_k", "o_proj": "q4_k"})
    assert kept(source.model, "q4_1") == embeddings | of_all_layers({"k_proj": "q4_k", "o_proj": "q4_k"})


@pytest.mark.slow
def test_a_build_stores_and_computes_them(source: Source, tmp_path: Path) -> None:
    artifact = compiled(source, Case("llama", "dense", "q4_k"), tmp_path / "build")
    sparsity = load_record(tmp_path / "build" / "allocate.json", Sparsity)
    assert sparsity.formats == keeping(source.model, "q4_k")
    session = Session(artifact)
    stored = {tensor.role: tensor.format for tensor in session.artifact.manifest.resident}
    assert of_all_layers(ROLES).items() <= stored.items()
    for role in of_all_layers(ROLES):
        np.testing.assert_array_equal(session.artifact.resident[role], read_codes(source.model, role))
    (table,) = session.artifact.manifest.flash.tables
    assert (table.role, table.format) == ("embed_tokens.weight", "q5_0")
    rounding = replace(NEAREST, activations=load_record(tmp_path / "build" / "calibrate.json", Activations))
    expected = Rounded(LayerStream(source.model), sparsity.formats, rounding, (BLOCKS,)).logits(source.tokens[:1])[0]
    session.decoder.begin(len(expected))
    found = np.stack([session.decoder.decode(int(token)) for token in source.tokens[0]])
    assert np.abs(found - expected).max() < 2e-3 * np.abs(expected).max()


def test_a_dense_build_is_the_file(source: Source, tmp_path: Path) -> None:
    own = own_layers(source.model)
    assert own == tuple("q4_k+q4_k+q6_k" if layer in FINE else "q4_k" for layer in range(LAYERS))
    formats = keeping(source.model, own)
    artifact = compiled(source, Case("llama", "dense", "q4_k", layer_formats=own), tmp_path / "build")
    assert load_record(tmp_path / "build" / "allocate.json", Sparsity).formats == formats
    session = Session(artifact)
    assert [entry.family for entry in session.artifact.manifest.families] == ["block"]
    stored = StoredModel(session.artifact)
    matrices = [role for role, tensor in source.model.tensors.items() if len(tensor.shape) == 2]
    assert len(matrices) == 7 * LAYERS + 2
    for role in matrices:
        np.testing.assert_array_equal(stored.codes(role), read_codes(source.model, role), role)
    expected = LayerStream(source.model).logits(source.tokens[:1])[0]
    session.decoder.begin(len(expected))
    found = np.stack([session.decoder.decode(int(token)) for token in source.tokens[0]])
    assert np.abs(found - expected).max() < 2e-3 * np.abs(expected).max()


def test_what_keeps_all_codes_loses_nothing(source: Source) -> None:
    stream, own = LayerStream(source.model), own_layers(source.model)
    assert own is not None
    assert Rounded(stream, keeping(source.model, own), NEAREST, (BLOCKS,)).is_exact
    assert not Rounded(stream, keeping(source.model, own), NEAREST, (WHOLE_MLP,)).is_exact
    assert not Rounded(stream, keeping(source.model, "q4_k"), NEAREST, (BLOCKS,)).is_exact


@pytest.fixture(scope="module")
def explored(source: Source, tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, Corpus, Activations, Curves]:
    model, corpus = source.model, load_record(source.folder / "tokenize.json", Corpus)
    folder, families = tmp_path_factory.mktemp("explored"), countable_families(model.spec)
    counting = families, ActivityRule(frozenset()), Workspace(folder / "calibrate", "test"), 1
    activations = count_activity(PassConfig(), model, corpus, *counting)
    work = Workspace(folder / "explore", "test")
    return model, corpus, activations, explore.run(ExploreConfig(method="auto"), model, corpus, activations, work, 1)


@pytest.mark.slow
def test_columns_that_are_no_whole_blocks_are_not_measured(tmp_path: Path) -> None:
    """Rows of down are a whole block of q6_k, its columns a quarter: no unit of a selector can have the file's format,
    as in Qwen2.5-Coder-0.5B."""
    sizes = {"hidden_size": 64, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
    _, file = exported(tmp_path, "llama", sizes | {"head_dim": 16}, layers=2)
    mixed = quantized(file, tmp_path / "mixed.gguf", lambda name: type_of("q6_k" if "ffn_down" in name else "q5_0"))
    source = with_text(tmp_path, mixed, run(mixed, tmp_path / "ingest"))
    model, corpus = source.model, load_record(source.folder / "tokenize.json", Corpus)
    own = own_layers(model)
    assert own == ("q5_0+q5_0+q6_k",) * 2
    counting = countable_families(model.spec), ActivityRule(frozenset()), Workspace(tmp_path / "calibrate", "test"), 1
    activations = count_activity(PassConfig(), model, corpus, *counting)
    config, work = ExploreConfig(method="auto", explore="whole", explore_tokens=16), Workspace(tmp_path / "e", "test")
    curves = explore.run(config, model, corpus, activations, work, 1)
    assert own in {loss.format for loss in curves.formats if loss.family == BLOCKS}
    assert {loss.format for loss in curves.formats if loss.family == WHOLE_MLP} >= {"q5_1", "q4_1"}
    assert own not in {loss.format for loss in curves.formats if loss.family == WHOLE_MLP}
    assert curves.curves


@pytest.mark.slow
def test_the_file_s_formats_are_taken_unmeasured_where_they_fit(
    explored: tuple[Model, Corpus, Activations, Curves], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, corpus, activations, curves = explored
    own = own_layers(model)
    assert [(loss.format, loss.family, loss.ppl_ratio) for loss in curves.formats] == [(own, "block", 1.0)]
    assert curves.heads == ()
    titles, measured = set[str](), Passes.differences

    def counted(passes: Passes, title: str, *rest: Any) -> Any:
        titles.add(title)
        return measured(passes, title, *rest)

    monkeypatch.setattr(Passes, "differences", counted)
    for module in (_finalists, judge):
        monkeypatch.setattr(module, "candidates", lambda *_: ("dense", "topk"))

    def taken(budget: str) -> Sparsity:
        values = {"method": "auto", "format": "auto", "dram_budget": budget, "context_length": 64, "max_ppl_ratio": 3.0}
        config = AllocateConfig(**values, density_allocation="uniform")
        return allocate.run(
            config, model, activations, device_of(), Workspace(tmp_path / budget, "test"), corpus, curves=curves
        )

    whole = taken("100MB")
    assert not titles
    assert (whole.method, whole.formats) == ("dense", keeping(model, own))
    assert taken("3MB").budget.cache_bytes >= 0
    assert {title.split("-")[1] for title in titles if title.startswith("format")} == {"mix"}, "which fits in DRAM"
    tight = taken("1.8MB")
    assert {"format-int4_group32-rtn-block", "format-int4_group32-rtn-neuron", "head-int4_group32"} <= titles
    assert not {title for title in titles if title.endswith("-rtn-neuron") and "int4" not in title}, (
        "columns of 128 values are no whole block of q4_k"
    )
    assert tight.curves is not None
    assert {own, "int4_group32"} <= {loss.format for loss in tight.curves.formats}


def _lossy(measured: Callable[..., FormatLoss]) -> Callable[..., FormatLoss]:
    """Takes measured losses for .2 of the perplexity in one format everywhere, and .02 in formats by matrix."""

    def lossy(passes: Passes, formats: LayerFormats, *families: FamilyName) -> FormatLoss:
        ratio = 1.2 if isinstance(formats, str) else 1.02
        update = {"ppl_ratio": ratio, "ppl_ratio_error": 0.0, "mean_kld": ratio - 1}
        return measured(passes, formats, *families).model_copy(update=update)

    return lossy


def _expected(model: Model, effects: np.ndarray, value: str) -> Callable[..., Mapping[str, float]]:
    """Makes all matrices dear but down projections, and the values of one layer, in q4_k."""

    def expected(
        _: Any, __: Any, role: str, found: Sensitivity, names: Sequence[str], *___: Any
    ) -> Mapping[str, float]:
        assert found.outputs.shape + found.inputs.shape == model.tensors[role].shape
        own = effects[int(role.split(".")[1])] if role.endswith("down_proj.weight") else 1e-6 if role == value else 1.0
        return {name: own if name == "q4_k" else 1.0 for name in names}

    return expected


@pytest.mark.slow
def test_matrices_have_smaller_formats_where_the_file_s_own_do_not_fit(
    explored: tuple[Model, Corpus, Activations, Curves], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As few matrices as make the model fit, and those that lose least by it."""
    model, corpus, activations, curves = explored
    own = own_layers(model)
    assert isinstance(own, tuple)
    for module in (_finalists, judge):
        monkeypatch.setattr(module, "candidates", lambda *_: ("dense", "topk"))
    monkeypatch.setattr(Passes, "format", _lossy(Passes.format))
    effects = np.random.default_rng(3).permutation(LAYERS) / 1e4
    value = "layers.7.v_proj.weight"
    monkeypatch.setattr(_formats, "head_formats_of", lambda _: ())
    monkeypatch.setattr(_mixed, "expected_divergence", _expected(model, effects, value))

    def taken(budget: int, **more: Any) -> Sparsity:
        settings = {"method": "auto", "format": "auto", "context_length": 64, "max_ppl_ratio": 1.05}
        config = AllocateConfig(**settings, dram_budget=budget, density_allocation="uniform", **more)
        work = Workspace(tmp_path / str(budget), "test")
        return allocate.run(config, model, activations, device_of(), work, corpus, curves=curves)

    needed = taken(100_000_000).tried[0].dram_bytes
    assert needed is not None
    saved = [unit_bytes(BLOCKS, model.spec, one) - unit_bytes(BLOCKS, model.spec, "q4_k") for one in own]
    assert [layer for layer, nbytes in enumerate(saved) if nbytes] == list(FINE)
    rows, columns = model.tensors[value].shape
    of_value = rows * (slice_bytes(columns, "q6_k") - slice_bytes(columns, "q4_k"))
    fewer_bytes = 2 * saved[0] * num_units(BLOCKS, model.spec) + of_value
    found = taken(needed - fewer_bytes)
    dear = max(FINE, key=lambda layer: effects[layer])
    small = {*FINE} - {dear}
    assert found.layer_formats == tuple("q4_k" if layer in small else name for layer, name in enumerate(own))
    formats = {role: one.format for one in found.kept for role in one.roles}
    assert formats == {role: name for role, name in kept(model, "q4_k").items() if role != value}
    assert found.curves is not None
    loss = found.curves.format_loss(found.layer_formats, BLOCKS)
    assert loss is not None
    assert sum(one.mean_kld for one in loss.expected) == pytest.approx(sum(effects[layer] for layer in small) + 1e-6)
    best = found.tried[0]
    assert (best.ppl_ratio, best.method) == (pytest.approx(1.02), "dense")
    assert best.dram_bytes == needed - fewer_bytes, "everything is in DRAM"
    with monkeypatch.context() as patched:
        patched.setattr(_formats, "sensitivities", None)
        assert taken(needed - fewer_bytes) == found, "an interrupted run has left the expected losses"
    with monkeypatch.context() as patched:
        for module in (_finalists, judge):
            patched.setattr(module, "candidates", lambda *_: ("dense",))
        assert taken(needed - fewer_bytes, explore="whole").formats == found.formats, "where selectors are known, too"

    with monkeypatch.context() as patched:
        patched.setattr(_formats, "sensitivities", None)
        with pytest.raises(DoesNotFitError):
            taken(300_000)  # not even the smallest formats leave attention in DRAM, so none is measured

    read = taken(needed - 3 * fewer_bytes)
    assert {*read.layer_formats} == {"q4_k"}, "the smallest formats that keep the quality, where all must be read"
    formats = {role: one.format for one in read.kept for role in one.roles}
    assert formats == {role: name for role, name in kept(model, "q4_k").items() if role != value}
    assert read.tried[0].ppl_ratio == pytest.approx(1.02)


def mixed(
    explored: tuple[Model, Corpus, Activations, Curves], folder: Path, patch: pytest.MonkeyPatch, scale: float
) -> tuple[Sparsity, list[tuple[int, ...]]]:
    """Allocates where three layers may be in q4_k, and lose `scale` times what is expected; returns which were asked
    for, too."""
    model, corpus, activations, curves = explored
    for module in (_finalists, judge):
        patch.setattr(module, "candidates", lambda *_: ("dense", "topk"))
    effects = np.zeros(LAYERS)
    effects[list(FINE)] = 0.005, 0.01, 0.03
    asked, measured = list[tuple[int, ...]](), Passes.format

    def lossy(passes: Passes, formats: Formats, *families: FamilyName) -> FormatLoss:
        names = layer_formats(formats)
        small = tuple(layer for layer in FINE if names and names[layer] == "q4_k")
        asked.append(small)
        lost = scale * float(sum(effects[list(small)])) if names else 1.0
        update = {"ppl_ratio": float(np.exp(lost)), "ppl_ratio_error": 0.0, "mean_kld": lost}
        return measured(passes, formats, *families).model_copy(update=update)

    patch.setattr(Passes, "format", lossy)
    patch.setattr(_mixed, "expected_divergence", _expected(model, effects, "layers.7.v_proj.weight"))
    settings = {"method": "auto", "format": "auto", "context_length": 64, "max_ppl_ratio": 1.05}
    config = AllocateConfig(**settings, dram_budget=2_600_000, density_allocation="uniform")
    found = allocate.run(config, model, activations, device_of(), Workspace(folder, "test"), corpus, curves=curves)
    return found, asked


@pytest.mark.slow
def test_formats_by_matrix_are_finer_where_more_is_lost_than_was_expected(
    explored: tuple[Model, Corpus, Activations, Curves], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_formats, "head_formats_of", lambda _: ())
    found, asked = mixed(explored, tmp_path, monkeypatch, scale=3.5)
    assert asked[:2] == [FINE[:2], FINE[:1]]
    assert [layer for layer in FINE if found.layer_formats[layer] == "q4_k"] == list(FINE[:1])


@pytest.mark.slow
def test_formats_by_matrix_keep_the_quality_beside_their_head(
    explored: tuple[Model, Corpus, Activations, Curves], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = Passes.head

    def lossy(passes: Passes, name: FormatName) -> HeadLoss:
        update = {"ppl_ratio": 1.04, "ppl_ratio_error": 0.0, "mean_kld": 0.001}
        return measured(passes, name).model_copy(update=update)

    monkeypatch.setattr(Passes, "head", lossy)
    monkeypatch.setattr(_formats, "head_formats_of", lambda _: ("q3_k",))
    _, asked = mixed(explored, tmp_path, monkeypatch, scale=1.0)
    assert asked[:2] == [FINE[:2], FINE[:1]]


def test_a_dense_build_without_a_format_has_the_file_s(
    explored: tuple[Model, Corpus, Activations, Curves], tmp_path: Path
) -> None:
    model, _, activations, _ = explored
    own = own_layers(model)
    assert own is not None
    config = AllocateConfig(method="dense", format="auto", dram_budget="80%", context_length=64)
    found = allocate.run(config, model, activations, device_of(), Workspace(tmp_path, "test"))
    assert found.formats == keeping(model, own)


@pytest.mark.slow
def test_the_report_draws_bits_and_losses_by_layer_and_matrix(source: Source) -> None:
    model, own = source.model, own_layers(source.model)
    assert own is not None
    formats = keeping(model, own)
    bias = model.tensors["layers.0.q_proj.weight"].model_copy(update={"shape": (256,)})
    with_bias = model.model_copy(update={"tensors": {**model.tensors, "layers.0.q_proj.bias": bias}})
    bits = figures.matrix_bits(with_bias, formats)
    assert {kind: sorted(set(found.values())) for kind, found in bits.items()} == {
        "q": [5.5],
        "k and v": [(4.5 + 6.5625) / 2],
        "o": [4.5],
        "gate": [4.5],
        "up": [4.5],
        "down": [4.5, 6.5625],
    }
    assert {layer for layer, found in bits["down"].items() if found > 5} == {*FINE}
    losses = tuple(
        MatrixLoss(role=f"layers.{layer}.{matrix}.weight", format="q4_k", mean_kld=layer / 1000)
        for layer in range(LAYERS)
        for matrix in ("k_proj", "v_proj", "up_proj")
    )
    np.testing.assert_allclose(figures.expected_losses(losses, model.spec)["k and v"], np.arange(LAYERS) / 500)
    loss = FormatLoss(format=own, family=BLOCKS, expected=losses, **NO_LOSS | {"mean_kld": 0.2, "ppl_ratio": 1.2})
    curves = SimpleNamespace(format_loss=lambda *_: loss)
    inputs: Any = SimpleNamespace(model=model, sparsity=SimpleNamespace(formats=formats, curves=curves))
    drawn, costs = page_charts._formats_charts(inputs)
    assert "k and v" in drawn.svg
    assert "0.165 nats a token in all, 0.200 measured" in costs.caption
