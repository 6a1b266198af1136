"""All matrices of a quantized file with experts keep its codes in a dense build, and come back out of it."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import pytest

from coldpress.compiler.activity.calibration_pass import PassConfig, count_activity
from coldpress.compiler.activity.forward import LayerStream
from coldpress.compiler.activity.layer_counts import ActivityRule, countable_families
from coldpress.compiler.activity.rounded import Rounded
from coldpress.compiler.checkpoint.tensors import read_codes
from coldpress.compiler.io import Workspace, load_record
from coldpress.compiler.kept_codes import keeping, own_layers
from coldpress.compiler.llama_cpp.formats import formats
from coldpress.compiler.quality.passes import Passes
from coldpress.compiler.rounding._matrix import NEAREST
from coldpress.compiler.search.density import AllocationInputs
from coldpress.compiler.search.replay import Replays, calibrated
from coldpress.compiler.search.settings import AllocateConfig
from coldpress.compiler.stages import allocate, explore, export
from coldpress.compiler.stages.allocate import _formats, _mixed
from coldpress.compiler.stages.explore import ExploreConfig
from coldpress.compiler.stages.export import ExportConfig
from coldpress.compiler.stages.export._stored import StoredModel
from coldpress.runtime.artifact.reader import open_artifact
from coldpress.runtime.dram.budget import least_budget_bytes, whole_bytes
from coldpress.runtime.generate.session import Session
from coldpress.schemas.activations import Activations
from coldpress.schemas.corpus import Corpus
from coldpress.schemas.curves import Curves, FormatLoss
from coldpress.schemas.families import BLOCKS, WHOLE_MLP, FamilyName, Formats, layer_formats, layers_of, num_units
from coldpress.schemas.package import Package
from coldpress.schemas.sparsity import Sparsity
from tests.support.checkpoints import run
from tests.support.gguf_cases import exported, quantized
from tests.support.product import Case, Source, compiled, with_text
from tests.support.statistics import device_of

LAYERS = 11
FINE = (1, 3, 10)
"""Layers whose down projections have another type."""


class Kind(NamedTuple):
    architecture: str
    keys: dict[str, Any]
    coarse: str
    """The type of most matrices of the layers."""
    fine: str
    """That of attention's values, and of the down projections of some layers."""
    own: str | tuple[str, ...]
    """The formats that it has here."""
    neurons: int
    """Neurons of a block."""
    fine_layers: tuple[int, ...] = FINE


def mixed(coarse: str, fine: str) -> tuple[str, ...]:
    return tuple(f"{coarse}+{coarse}+{fine}" if layer in FINE else coarse for layer in range(LAYERS))


LARGE = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
KINDS = {
    "q8_0": Kind("mixtral", {"sliding_window": None}, "Q8_0", "Q8_0", "int8_group32", 32),
    "q4_0": Kind("olmoe", {"num_key_value_heads": 4}, "Q4_0", "Q4_1", mixed("int4_group32", "q4_1"), 32),
    "q4_1 with shared experts": Kind("qwen2_moe", {}, "Q4_1", "Q5_0", mixed("q4_1", "q5_0"), 32),
    "q5_1 with layers without experts": Kind(
        "glm4_moe",
        {"first_k_dense_replace": 3, "n_routed_experts": 5, "num_experts_per_tok": 3, "n_shared_experts": 1},
        *("Q5_1", "Q8_0"),
        tuple("q5_1+q5_1+int8_group32" if layer in FINE[1:] else "q5_1" for layer in range(LAYERS)),
        32,
    ),
    "q4_k": Kind("qwen3_moe", LARGE | {"moe_intermediate_size": 512}, "Q4_K", "Q6_K", mixed("q4_k", "q6_k"), 256),
    "q4_k with narrow experts": Kind(
        *("qwen3_moe", LARGE | {"moe_intermediate_size": 96}, "Q4_K", "Q5_0"),
        *(("q4_k+q4_k+q5_0",) * LAYERS, 32, tuple(range(LAYERS))),
    ),
}


SIMILAR, SLOW = set(KINDS) - {"q4_k"}, (pytest.mark.slow,)


def type_in(kind: Kind, name: str) -> str:
    _, *block, matrix, _ = ["", *name.split(".")]
    is_fine = matrix == "attn_v" or (matrix.startswith("ffn_down") and int(block[1]) in kind.fine_layers)
    return kind.fine if is_fine else kind.coarse


@pytest.fixture(scope="module", params=[pytest.param(name, marks=SLOW * (name in SIMILAR)) for name in KINDS])
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


@pytest.fixture(scope="module")
def source(kind: Kind, tmp_path_factory: pytest.TempPathFactory) -> Source:
    folder = tmp_path_factory.mktemp("source")
    _, plain = exported(folder, kind.architecture, kind.keys, layers=LAYERS)
    file = quantized(plain, folder / "quantized.gguf", partial(type_in, kind))
    return with_text(folder, file, run(file, folder / "ingest"))


@pytest.fixture(scope="module")
def artifact(kind: Kind, source: Source, tmp_path_factory: pytest.TempPathFactory) -> Path:
    case = Case(kind.architecture, "dense", formats()[kind.coarse], layer_formats=kind.own)
    folder = tmp_path_factory.mktemp("build") / "build"
    return compiled(source, case, folder)


def test_the_file_s_formats_are_known(kind: Kind, source: Source) -> None:
    assert own_layers(source.model) == kind.own


def test_experts_in_several_formats_are_rounded(kind: Kind, source: Source) -> None:
    """One in another, in one layer: units of a layer have one size."""
    role = "layers.10.experts.3.up_proj.weight"
    other = source.model.tensors[role].model_copy(update={"quantized": "Q2_K"})
    model = source.model.model_copy(update={"tensors": {**source.model.tensors, role: other}})
    assert own_layers(model) is None


@pytest.mark.slow
def test_an_artifact_is_the_file(kind: Kind, source: Source, artifact: Path) -> None:
    """Code for code, and so its logits are those of transformers with the file's values."""
    assert load_record(artifact.parent / "allocate.json", Sparsity).formats == keeping(source.model, kind.own)
    session = Session(artifact)
    spec = session.artifact.manifest.model
    assert [entry.family for entry in session.artifact.manifest.families] == [BLOCKS]
    assert num_units(BLOCKS, spec) == spec.num_experts * spec.intermediate_size // kind.neurons
    stored = StoredModel(session.artifact)
    kept = [role for role, tensor in source.model.tensors.items() if tensor.quantized]
    experts = 3 * spec.num_experts * (LAYERS - len(spec.dense_layers))
    assert len([role for role in kept if ".experts." in role]) == experts
    for role in kept:
        np.testing.assert_array_equal(stored.codes(role), read_codes(source.model, role), role)
    expected = LayerStream(source.model).logits(source.tokens[:1])[0]
    session.decoder.begin(len(expected))
    found = np.stack([session.decoder.decode(int(token)) for token in source.tokens[0]])
    assert np.abs(found - expected).max() < 2e-3 * np.abs(expected).max()
    session.decoder.begin(len(expected))
    prefilled = session.decoder.prefill(source.tokens[0])
    assert np.abs(prefilled - expected).max() < 2e-3 * np.abs(expected).max()


def test_the_file_comes_back(source: Source, artifact: Path, tmp_path: Path) -> None:
    """Tensor by tensor, in the types that it had."""
    package, path = load_record(artifact.parent / "package.json", Package), tmp_path / "back.gguf"
    export.run(ExportConfig(export="gguf", options={"gguf_tokenizer": False}, file=str(path)), package)
    given, back = ({one.name: one for one in gguf.GGUFReader(file).tensors} for file in (source.path, path))
    assert given.keys() == back.keys()
    for name, tensor in given.items():
        assert back[name].tensor_type == tensor.tensor_type, name
        np.testing.assert_array_equal(back[name].data, tensor.data, name)


def test_what_keeps_all_codes_loses_nothing(kind: Kind, source: Source) -> None:
    stream = LayerStream(source.model)
    assert Rounded(stream, keeping(source.model, kind.own), NEAREST, (BLOCKS,)).is_exact
    assert not Rounded(stream, keeping(source.model, kind.own), NEAREST, (WHOLE_MLP,)).is_exact


def test_tokens_together_have_what_each_has_alone(source: Source, artifact: Path) -> None:
    """Each computes with the blocks of its own experts; with everything in DRAM sums have one order."""
    tokens = source.tokens[0]
    session = Session(artifact, dram_budget_bytes=200_000_000)
    session.decoder.begin(len(tokens))
    expected = np.stack([session.decoder.decode(int(token)) for token in tokens])
    session.decoder.begin(len(tokens))
    found = np.concatenate([session.decoder.decode_many(part) for part in np.split(tokens, [1, 4, 12])])
    np.testing.assert_array_equal(found[:12], expected[:12])
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-3 * np.abs(expected).max())
    half = len(tokens) // 2
    session.decoder.begin_batch([half] * 2)
    pairs = zip(tokens[:half], tokens[half:], strict=True)
    each = np.stack([session.decoder.decode_each(np.array(pair)[:, None], [0, 1])[0] for pair in pairs])
    np.testing.assert_array_equal(each, expected[:half])


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_any_budget_gives_the_same(source: Source, artifact: Path, share: float) -> None:
    """From the least to one that holds everything."""
    manifest = open_artifact(artifact).manifest
    plan, tokens = manifest.plans[0], source.tokens[0, :12]
    least, most = least_budget_bytes(manifest, plan), whole_bytes(manifest, plan)
    expected = LayerStream(source.model).logits(tokens[None])[0]
    with Session(artifact, dram_budget_bytes=least + int(share * (most - least))) as session:
        session.decoder.begin(len(tokens))
        found = np.stack([session.decoder.decode(int(token)) for token in tokens])
        assert np.abs(found - expected).max() < 2e-3 * np.abs(expected).max()
        assert bool(session.store.counters.misses) == (share < 1)


def explored(source: Source, folder: Path) -> tuple[Corpus, Activations, Curves]:
    model, corpus = source.model, load_record(source.folder / "tokenize.json", Corpus)
    counting = countable_families(model.spec), ActivityRule(frozenset()), Workspace(folder / "calibrate", "test"), 1
    activations = count_activity(PassConfig(), model, corpus, *counting)
    work = Workspace(folder / "explore", "test")
    return corpus, activations, explore.run(ExploreConfig(method="auto"), model, corpus, activations, work, 1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["q4_1 with shared experts"], indirect=True)
def test_the_choice_takes_the_file_s_formats_unmeasured(kind: Kind, source: Source, tmp_path: Path) -> None:
    """And counts the blocks of each token's experts, where DRAM holds a part of them."""
    model = source.model
    corpus, activations, curves = explored(source, tmp_path)
    assert [(loss.format, loss.family, loss.ppl_ratio) for loss in curves.formats] == [(kind.own, BLOCKS, 1.0)]
    work, device = Workspace(tmp_path / "allocate", "test"), device_of()
    given = {"context_length": 64, "density_allocation": "uniform", "routing": "top_k", "kv_cache": "fp16"}
    taken = AllocateConfig(method="auto", format="auto", dram_budget="100MB", max_ppl_ratio=1.05, **given)
    found = allocate.run(taken, model, activations, device, work, corpus, curves=curves)
    assert (found.method, found.families, found.formats) == ("dense", (BLOCKS,), keeping(model, kind.own))
    part = AllocateConfig(method="dense", format="auto", dram_budget="60%", **given)
    held = allocate.run(part, model, activations, device, work, corpus, curves=curves)
    inputs = AllocationInputs(model, activations, device, work, corpus, 1, curves)
    layers, spec = len(curves.trace_layers), model.spec
    of_token = layers * num_units(BLOCKS, spec) // spec.num_experts * spec.num_experts_per_tok
    tokens = Replays(inputs).tokens(held)
    assert {token.hits + token.misses for token in tokens} == {of_token}
    assert any(token.misses for token in tokens)
    each = num_units(BLOCKS, spec) // spec.num_experts
    counted = calibrated(held, activations.layers[3], BLOCKS, num_units(BLOCKS, spec), activations.num_tokens)
    assert {np.unique(ids // each).size for ids in counted.ids.values()} == {spec.num_experts_per_tok}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["q5_1 with layers without experts"], indirect=True)
def test_matrices_of_experts_have_smaller_formats_where_the_file_s_own_do_not_fit(
    kind: Kind, source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The up projections of one layer's experts, which lose nothing by it, but no other matrix."""
    model, device = source.model, device_of()
    corpus, activations, curves = explored(source, tmp_path)
    cheap, measured, asked, used = 7, Passes.format, list[tuple[str, ...]](), 0

    def expected(_: Any, __: Any, role: str, ___: Any, names: Sequence[str], num_alike: int) -> dict[str, float]:
        assert num_alike == (model.spec.num_experts if ".experts." in role else 1)
        nonlocal used
        is_cheap = role.startswith(f"layers.{cheap}.experts.") and role.endswith("up_proj.weight")
        used += is_cheap
        return dict.fromkeys(names, 1e-6 if is_cheap else 1.0)

    def good(passes: Passes, formats: Formats, *families: FamilyName) -> FormatLoss:
        asked.append(layer_formats(formats))
        update = {"ppl_ratio": 1.01, "ppl_ratio_error": 0.0, "mean_kld": 0.01}
        return measured(passes, formats, *families).model_copy(update=update)

    monkeypatch.setattr(_mixed, "expected_divergence", expected)
    monkeypatch.setattr(_formats, "head_formats_of", lambda _: ())
    monkeypatch.setattr(Passes, "format", good)
    given: dict[str, Any] = {"context_length": 64, "density_allocation": "uniform", "routing": "top_k"}

    def taken(budget: int) -> Sparsity:
        config = AllocateConfig(method="auto", format="auto", dram_budget=budget, max_ppl_ratio=1.05, **given)
        work = Workspace(tmp_path / str(budget), "test")
        return allocate.run(config, model, activations, device, work, corpus, curves=curves)

    needed = taken(100_000_000).tried[0].dram_bytes
    assert needed is not None
    assert not asked
    found = taken(needed - 1)
    small = found.layer_formats[cheap].split("+")[1]
    assert found.tried[0].dram_bytes is not None
    assert found.tried[0].dram_bytes < needed
    others = [layer for layer in layers_of(BLOCKS, model.spec) if layer != cheap]
    assert [found.layer_formats[layer] for layer in others] == [kind.own[layer] for layer in others]
    assert small != kind.own[cheap].split("+")[0]
    assert found.curves is not None
    loss = found.curves.format_loss(found.layer_formats, BLOCKS)
    assert loss is not None
    role = f"layers.{cheap}.experts.0.up_proj.weight"
    lost = [(one.role, one.format, one.mean_kld) for one in loss.expected if one.mean_kld]
    assert lost == [(role, small, pytest.approx(1e-6 * used))]
