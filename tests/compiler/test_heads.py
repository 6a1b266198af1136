"""The head in a format of its own: what it loses, when it is taken, and an artifact that has one."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from coldpress.compiler import cost_model
from coldpress.compiler.activity.forward import LayerStream
from coldpress.compiler.activity.rounded import RoundedHead
from coldpress.compiler.block_statistics import perplexity
from coldpress.compiler.io import Workspace, load_record
from coldpress.compiler.quality.passes import Passes
from coldpress.compiler.rounding._matrix import NEAREST
from coldpress.compiler.search.floor import Floor
from coldpress.compiler.search.settings import AllocateConfig
from coldpress.compiler.stages import allocate, ingest, verify
from coldpress.compiler.stages.ingest import IngestConfig
from coldpress.compiler.stages.verify import VerifyConfig
from coldpress.compiler.steps import Steps
from coldpress.runtime.artifact.reader import open_artifact
from coldpress.runtime.generate.session import Session
from coldpress.runtime.plugins import load
from coldpress.runtime.quantization import Format
from coldpress.schemas.activations import Activations
from coldpress.schemas.corpus import Corpus
from coldpress.schemas.curves import Curves, HeadLoss
from coldpress.schemas.families import HeadFormat, OwnFormats, with_own
from coldpress.schemas.model import Model
from coldpress.schemas.package import Package
from coldpress.schemas.sparsity import Sparsity
from tests.support.curves import NO_LOSS, curves_of
from tests.support.dense_codes import resident_values
from tests.support.models import write_model
from tests.support.product import Case, compiled, difference, source_of
from tests.support.records import Build
from tests.support.statistics import activations_of, device_of, model_of

NARROW = "int4_group32"
DECODED = (3, 14, 15, 9, 2, 6)
TOKENS = np.random.default_rng(3).integers(0, 384, (2, 32)).astype(np.int32)


# Its loss


@pytest.mark.parametrize("tied", [False, True])
def test_it_loses_what_its_rounded_rows_lose(tmp_path: Path, tied: bool) -> None:
    """Against transformers with the rounded weights: those of the head alone, or of the embeddings, too."""
    write_model(tmp_path / "model", num_hidden_layers=2, overrides={"tie_word_embeddings": tied})
    model = ingest.run(IngestConfig(model=str(tmp_path / "model")), Workspace(tmp_path / "ingest", "test"))
    assert model.spec.tie_word_embeddings == tied
    stream, source = LayerStream(model), AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    codec, ids = load("coldpress.runtime.quantization", Format, NARROW), torch.from_numpy(TOKENS.astype(np.int64))
    with torch.no_grad():
        weight = source.lm_head.weight.numpy()
        whole = source(ids).logits
        source.lm_head.weight.copy_(torch.from_numpy(codec.decode(codec.encode(weight), weight.shape[1])))
        rounded = source(ids).logits
    np.testing.assert_allclose(RoundedHead(stream, NARROW).logits(TOKENS), rounded.numpy(), atol=2e-5)
    work, steps = Workspace(tmp_path / "work", "test"), Steps("test", 1, "passes")
    found = Passes("test", stream, TOKENS, stream.last_hidden(TOKENS), work, steps, NEAREST).head(NARROW)
    losses = [
        torch.nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none").numpy()
        for logits in (rounded, whole)
    ]
    assert found.ppl_ratio == pytest.approx(perplexity((losses[0] - losses[1]).mean(axis=1))[0], abs=1e-4)
    assert found.mean_kld > 1e-5, "rounding shows"


@pytest.mark.parametrize("tied", [False, True])
def test_more_text_is_measured_from_where_less_ended(tmp_path: Path, tied: bool) -> None:
    write_model(tmp_path / "model", num_hidden_layers=2, overrides={"tie_word_embeddings": tied})
    model = ingest.run(IngestConfig(model=str(tmp_path / "model")), Workspace(tmp_path / "ingest", "test"))
    stream, steps = LayerStream(model), Steps("test", 1, "passes")

    def passes(name: str, tokens: np.ndarray) -> Passes:
        whole, work = stream.last_hidden(tokens), Workspace(tmp_path / name, "test")
        return Passes("test", stream, tokens, whole, work, steps, NEAREST)

    tokens = np.random.default_rng(4).integers(0, 384, (5, 32)).astype(np.int32)
    at_once, begun = passes("at-once", tokens), passes("begun", tokens[:2])
    extended = begun.extended(tokens, Workspace(tmp_path / "extended", "test"))
    assert extended.head(NARROW) == at_once.head(NARROW) != begun.head(NARROW)
    assert extended.format(NARROW, "neuron") == at_once.format(NARROW, "neuron") != begun.format(NARROW, "neuron")
    assert extended.kv_cache("int8") == at_once.kv_cache("int8") != begun.kv_cache("int8")
    asked = list[np.ndarray]()
    extended.differences("rest", lambda own, whole: (asked.append(own), whole)[1])
    assert [len(own) for own in asked] == [3, 2]
    begun.differences("known", lambda own, whole: whole)
    asked.clear()
    extended.differences("known", lambda own, whole: (asked.append(own), whole)[1])
    assert [len(own) for own in asked] == [3], "the first blocks are not run again"


# When it is taken


@pytest.fixture(scope="module")
def model() -> Model:
    """With a head that takes as much as two of its layers."""
    return model_of(4, 256, 480, hidden_act="silu", vocab_size=4096)


@pytest.fixture(scope="module")
def activations(tmp_path_factory: pytest.TempPathFactory) -> Activations:
    active = np.random.default_rng(1).random((512, 8)) < 0.5
    return activations_of(tmp_path_factory.mktemp("activations"), [{"neuron": active}] * 4, exact_zeros=False)


def known(model: Model, folder: Path, layers: float = 1.01, **heads: float) -> Curves:
    losses = tuple(HeadLoss(format=name, ppl_ratio=ratio, **NO_LOSS) for name, ratio in heads.items())
    return curves_of(model, folder, {}, {"int8_group32": layers}).model_copy(update={"heads": losses})


def test_losses_of_layers_and_head_multiply(model: Model, tmp_path: Path) -> None:
    curves = known(model, tmp_path, int4_group32=1.03, q4_1=1.2, int8_group32=1.0)
    (formats,) = Floor(curves, 1.05).with_heads("int8_group32", model.spec)
    assert formats == OwnFormats(layers="int8_group32", head=HeadFormat(role=model.spec.head_role, format=NARROW))
    assert Floor(curves, 1.05).format_ratio(formats) == pytest.approx(1.01 * 1.03)
    assert Floor(curves, 1.05).ratio("dense", formats, 1.0) == pytest.approx(1.01 * 1.03)
    assert Floor(curves, 1.04).with_heads("int8_group32", model.spec) == [], "too much together"
    assert len(Floor(curves, 1.22).with_heads("int8_group32", model.spec)) == 2
    assert Floor(curves, math.inf).with_heads("int8_group32", model.spec) == [], "nothing is asked of the quality"
    lucky = known(model, tmp_path, int4_group32=0.99)
    assert Floor(lucky, 1.05).format_ratio(formats) == 1.01, "a lucky rounding is no credit"


def allocated(model: Model, activations: Activations, curves: Curves, folder: Path, budget: str) -> Sparsity:
    values: dict[str, Any] = {"method": "auto", "format": "int8_group32", "cache": "static", "context_length": 64}
    config = AllocateConfig(**values, dram_budget=budget, max_ppl_ratio=1.05)
    return allocate.run(config, model, activations, device_of(), Workspace(folder / budget, "test"), curves=curves)


@pytest.mark.parametrize(("loss", "taken"), [(1.03, True), (1.045, False)])
def test_a_smaller_head_makes_room_for_units(
    model: Model, activations: Activations, tmp_path: Path, loss: float, taken: bool
) -> None:
    """Where its loss, times that of the layers, keeps the floor of 1.05."""
    plain = allocated(model, activations, known(model, tmp_path / "a"), tmp_path / "plain", "60%")
    found = allocated(model, activations, known(model, tmp_path / "b", int4_group32=loss), tmp_path / "headed", "60%")
    assert found.budget.dram_budget_bytes == plain.budget.dram_budget_bytes, "a share counts the default head"
    if not taken:
        assert found.head is None
        assert found.model_copy(update={"curves": None}) == plain.model_copy(update={"curves": None})
        return
    assert found.head == HeadFormat(role=model.spec.head_role, format=NARROW)
    saved = model.spec.vocab_size * (
        cost_model.slice_bytes(model.spec.hidden_size, "int8_group32")
        - cost_model.slice_bytes(model.spec.hidden_size, NARROW)
    )
    assert plain.budget.resident_bytes - found.budget.resident_bytes == saved
    gained = [one.budget.buffer_bytes + one.budget.cache_bytes for one in (found, plain)]
    assert gained[0] - gained[1] == saved
    assert found.tried[0].ppl_ratio == pytest.approx(1.01 * loss)
    assert (found.tried[0].token_s or 0) < 0.95 * (plain.tried[0].token_s or 0)
    assert "head" not in plain.model_dump()


def test_it_is_taken_where_the_default_one_does_not_fit(model: Model, activations: Activations, tmp_path: Path) -> None:
    formats = [with_own("int8_group32", head) for head in (None, HeadFormat(role=model.spec.head_role, format=NARROW))]
    sizes = [cost_model.resident_bytes(model, ("block",), one) for one in formats]
    plain = allocated(model, activations, known(model, tmp_path / "a"), tmp_path, "60%").budget
    needed = plain.dram_budget_bytes - plain.buffer_bytes - plain.cache_bytes
    budget = str(needed - (sizes[0] - sizes[1]) // 2)
    found = allocated(model, activations, known(model, tmp_path / "b", int4_group32=1.03), tmp_path, budget)
    assert found.head is not None
    assert found.tried[0].reason is not None
    assert found.tried[0].reason.endswith("since the default head does not fit")


# An artifact


def logits_of(folder: Path, head: str | None = None) -> tuple[np.ndarray, Build]:
    """Returns the logits of a few decoded tokens, [T, vocab_size], and the build."""
    build = Build(folder, method="dense", format_name="fp16", head=head)
    build.package()
    session = Session(build.artifact)
    session.decoder.begin(len(DECODED))
    return np.stack([session.decoder.decode(token) for token in DECODED]), build


def test_an_artifact_is_computed_with_its_codes(tmp_path: Path) -> None:
    """The same hidden states, which follow from the logits of a build in fp16, times the head's codes."""
    whole, plain = logits_of(tmp_path / "plain")
    found, build = logits_of(tmp_path / "headed", head=NARROW)
    artifacts = [open_artifact(one.artifact) for one in (plain, build)]
    assert artifacts[1].manifest.head == HeadFormat(role="lm_head.weight", format=NARROW)
    assert f"format.{NARROW}" in artifacts[1].manifest.features.required
    assert f"format.{NARROW}" not in artifacts[0].manifest.features.required
    sizes = [one.manifest.plans[0].resident_bytes for one in artifacts]
    formats = build.sparsity.formats
    assert sizes[1] == cost_model.resident_bytes(build.model, build.sparsity.families, formats) < sizes[0]
    weights = [resident_values(one)["lm_head.weight"] for one in artifacts]
    hidden = np.linalg.lstsq(weights[0], whole.T, rcond=None)[0]
    np.testing.assert_allclose(weights[0] @ hidden, whole.T, atol=1e-4 * np.abs(whole).max())
    np.testing.assert_allclose(found, (weights[1] @ hidden).T, atol=1e-4 * np.abs(whole).max())
    assert np.abs(found - whole).max() > 1e-2 * np.abs(whole).max(), "rounding shows"


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
def test_all_stages_count_it(tmp_path: Path, tied: bool) -> None:
    """All stages count its bytes, the runtime computes with its codes, and `verify` finds what they lose."""
    source = source_of(tmp_path, "llama", False, tie_word_embeddings=tied)
    method = "dense" if tied else "wina"  # with these embeddings wina has a near tie between two units
    path = compiled(source, Case("llama", method, "int8_group32", head=NARROW), tmp_path / "build")
    assert difference(path, source, tmp_path / "coded").equal
    manifest, spec = open_artifact(path).manifest, source.model.spec
    assert manifest.head == HeadFormat(role=spec.head_role, format=NARROW)
    assert f"format.{NARROW}" in manifest.features.required
    sparsity = load_record(tmp_path / "build/allocate.json", Sparsity)
    assert manifest.plans[0].resident_bytes == cost_model.resident_bytes(
        source.model, sparsity.families, sparsity.formats
    )
    corpus = load_record(source.folder / "tokenize.json", Corpus)
    package = load_record(tmp_path / "build/package.json", Package)
    found = verify.run(VerifyConfig(), source.model, source.model, corpus, package)
    assert found.simulated_equals_real
