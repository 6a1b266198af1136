"""verify: a sound artifact passes with figures that make sense, and every kind of unsound one is refused."""

import hashlib
import json
import math
import statistics
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from coldpress.compiler.activity.source_logits import SourceLogits
from coldpress.compiler.block_statistics import perplexity, with_error
from coldpress.compiler.checkpoint.tensors import read_role, rotary_inv_freq
from coldpress.compiler.io import Workspace, load_arrays
from coldpress.compiler.publishing import point
from coldpress.compiler.run_command import run_command
from coldpress.compiler.stages import ingest
from coldpress.compiler.stages.verify import (
    QUESTION,
    VerifyConfig,
    blocks_of_test_text,
    decoded,
    first_words,
    num_measured,
    process_bytes,
    run,
    write_sample,
)
from coldpress.compiler.stages.verify.decoded import ReadLengths, ReplayedSession, adapting, decode
from coldpress.compiler.stages.verify.divergence import Compared, DenseComparison, SourceComparison
from coldpress.runtime.artifact.reader import open_artifact
from coldpress.runtime.generate.likelihood import sum_nll
from coldpress.runtime.generate.session import Session
from coldpress.runtime.store.facts import Purpose
from coldpress.runtime.trace import FETCH, Recorder
from coldpress.schemas.errors import ArtifactError, ColdpressError, CorruptPageError
from coldpress.schemas.manifest import FLASH_FILE
from tests.support.artifacts import Recipe, build_artifact
from tests.support.command_line import speaking_artifact
from tests.support.data import ROOT, data_folder
from tests.support.models import write_model
from tests.support.records import Build
from tests.support.shapes import small_spec
from tests.support.tiny import describe, tensor_shapes, tiny_spec

SPEC = tiny_spec(num_hidden_layers=3)
CONFIG = VerifyConfig(test_tokens=64)


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    made = Build(tmp_path_factory.mktemp("verify"), method="topk", spec=SPEC)
    made.package()
    return made


@pytest.fixture(scope="module")
def verified(build):
    return run(CONFIG, build.model, build.model, build.corpus, build.record)


@pytest.fixture(autouse=True)
def _no_process_of_its_own(monkeypatch):
    """The memory of a process is measured for `verified` and where it is asked for: starting one takes long."""
    monkeypatch.setattr("coldpress.compiler.stages.verify.process_bytes", lambda _: 1)


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["lru", "lfu", "static"])
def test_a_dense_fp16_artifact_is_its_source(tmp_path, cache):
    build = Build(tmp_path, method="dense", format_name="fp16", spec=SPEC, cache=cache, budget_share=0.3)
    found = run(CONFIG, build.model, build.model, build.corpus, build.package())
    assert found.max_logit_error < 2e-3
    assert found.ppl_artifact == pytest.approx(found.ppl_source, rel=2e-3)
    assert found.top1_agreement > 0.95
    assert found.simulated_equals_real
    assert found.num_test_tokens == 2 * 31
    assert found.run.num_tokens == 2 * 30  # the first token of each block is the prompt, the second its prediction
    lookups = 60 * SPEC.num_hidden_layers * SPEC.intermediate_size
    assert found.run.hits + found.run.misses == lookups
    assert found.run.dram_used_bytes <= found.run.dram_budget_bytes


def test_a_plan_that_adapts_is_held_to_a_simulation_by_modelled_seconds(tmp_path):
    """Measured ones would have it read otherwise each time."""
    build = Build(tmp_path, method="topk", spec=SPEC, collapse="adaptive", budget_share=0.3)
    build.package()
    folder = str(build.artifact)
    assert Session(folder).plan.collapse == "adaptive"
    assert adapting(folder, np.arange(32).reshape(1, 32)).equals()


@pytest.mark.needs_data
@pytest.mark.parametrize("name", ["stories260k", "tinystories656k-relu", "tinystories-opt-0.9m"])
def test_a_real_checkpoint_is_its_source(tmp_path, name):
    work = Workspace(tmp_path / "ingest", "f")
    model = ingest.run(ingest.IngestConfig(model=str(data_folder() / "models" / name)), work)
    build = Build(tmp_path, method="dense", format_name="fp16", source=model, budget_share=0.5, num_pinned=0)
    found = run(CONFIG, model, model, build.corpus, build.package())
    assert found.max_logit_error < 2e-3
    assert found.top1_agreement > 0.95


@pytest.mark.parametrize("method", ["relu", "predictor", "topk"])
def test_a_sparse_artifact_reads_what_it_selects(tmp_path, method):
    build = Build(tmp_path, method=method, spec=SPEC)
    found = run(CONFIG, build.model, build.model, build.corpus, build.package())
    assert found.simulated_equals_real
    assert (
        0
        < found.run.hits + found.run.misses
        < 60 * SPEC.num_hidden_layers * (SPEC.intermediate_size + SPEC.hidden_size)
    )
    assert found.max_logit_error < 0.05  # dense logits: what int8 costs, whatever the selector
    (hybrid,) = [step for step in found.ladder if step.name == "hybrid"]
    assert found.dense is not None
    assert hybrid.tokens_per_s == found.dense.tokens_per_s  # one dense speed in a report
    assert found.artifact_sha256 == build.package().manifest_sha256


@pytest.mark.slow
@pytest.mark.parametrize("predictor_format", ["fp16", "int8_group32", "int4_group32"])
def test_a_layer_without_a_predictor_uses_all_its_units(tmp_path, predictor_format):
    """Nothing is left out there, so there is nothing to predict; the other layers use what they predict."""
    build = Build(tmp_path, method="predictor", spec=SPEC, whole_layers=(0, 2), predictor_format=predictor_format)
    artifact = build.package()
    manifest = open_artifact(artifact.folder).manifest
    assert [(entry.layer, entry.format) for entry in manifest.predictors] == [(1, predictor_format)]
    found = run(CONFIG, build.model, build.model, build.corpus, artifact)
    assert found.simulated_equals_real
    recorder = Recorder()
    Session(artifact.folder, recorder=recorder).generate([1, 2, 3], 4, ignore_eos=True)
    sizes = {(event.layer, event.ids.size) for event in recorder.events if event.kind == FETCH}
    assert {size for layer, size in sizes if layer != 1} == {SPEC.intermediate_size}
    assert all(1 <= size < SPEC.intermediate_size for layer, size in sizes if layer == 1)


def test_the_perplexity_of_the_source_is_that_of_transformers(build, verified):
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    model = transformers.AutoModelForCausalLM.from_pretrained(build.model.folder, dtype=torch.float32)
    (test,) = (part for part in build.corpus.splits if part.split == "test")
    tokens = load_arrays(test.arrays, "tokens")["tokens"]
    assert tokens.shape == (4, 32)
    blocks = torch.from_numpy(tokens[:2].astype(np.int64))  # 64 tokens of test text
    with torch.no_grad():
        loss = model(input_ids=blocks, labels=blocks).loss
    assert verified.ppl_source == pytest.approx(float(loss.exp()), rel=1e-4)


def test_what_other_weights_cost_is_held_against_the_original(build, verified, tmp_path):
    """The artifact is of another model, as after `relufy`: sound, and far from the source."""
    spec = SPEC.model_copy(update={"hidden_act": "silu"})
    other = Build(tmp_path, method="dense", format_name="fp16", spec=spec)
    found = run(CONFIG, other.model, build.model, other.corpus, other.package())
    alone = run(CONFIG, other.model, other.model, other.corpus, other.package())
    assert found.max_logit_error == pytest.approx(alone.max_logit_error, rel=0.01)  # as decoded, and as a prompt
    assert found.max_logit_error < 2e-3
    assert found.ppl_artifact == alone.ppl_artifact
    assert found.ppl_source == verified.ppl_source != alone.ppl_source
    assert found.divergence.mean_kld > 100 * alone.divergence.mean_kld
    assert found.top1_agreement < alone.top1_agreement


def test_test_blocks_are_cut_to_the_context(build):
    assert blocks_of_test_text(build.corpus, 64).shape == (4, 32)
    assert blocks_of_test_text(build.corpus, 20).shape == (4, 20)
    with pytest.raises(ColdpressError, match="test blocks of 2 tokens leave nothing to decode"):
        blocks_of_test_text(build.corpus, 2)


@pytest.mark.parametrize(
    ("test_tokens", "num_parameters", "expected"),
    [
        (64, 10**6, 2),
        (5, 10**6, 1),
        (4096, 7 * 10**9, 128),  # what is said holds, however large the model is
        (None, 4 * 10**6, 70_312),  # all that there are, and more
        (None, 7 * 10**9, 40),
        (None, 10**12, 4),
    ],
)
def test_how_many_blocks_are_measured(test_tokens, num_parameters, expected):
    assert num_measured(VerifyConfig(test_tokens=test_tokens), 32, num_parameters) == expected


@pytest.mark.slow
def test_every_block_is_measured_with_its_own_figures(build):
    """Against the figures of one block at a time, and the standard error by the statistics module's deviation."""
    whole = run(VerifyConfig(), build.model, build.model, build.corpus, build.package())
    assert (len(whole.blocks), whole.num_test_blocks, whole.num_test_tokens) == (4, 4, 4 * 31)
    tokens = blocks_of_test_text(build.corpus, 64)
    session = Session(build.artifact)
    for block, found in zip(tokens, whole.blocks, strict=True):
        assert found.nll_artifact == pytest.approx(session.perplexity(block[None], sparse=True).mean_nll, rel=1e-6)
        assert found.nll_dense == pytest.approx(session.perplexity(block[None], sparse=False).mean_nll, rel=1e-4)
    for name, nll in (
        ("source", [block.nll_source for block in whole.blocks]),
        ("artifact", [block.nll_artifact for block in whole.blocks]),
        ("ratio", [block.nll_artifact - block.nll_source for block in whole.blocks]),
    ):
        figure = math.exp(statistics.mean(nll))
        assert getattr(whole, f"ppl_{name}") == pytest.approx(figure)
        assert getattr(whole, f"ppl_{name}_error") == pytest.approx(figure * statistics.stdev(nll) / 2)
    assert whole.ppl_ratio_error < whole.ppl_artifact_error / whole.ppl_source  # blocks differ more than models do


@pytest.mark.slow
@pytest.mark.parametrize(("small_error", "expected"), [(1.0, 2), (0.0, 4)])
def test_few_blocks_are_enough_where_they_tell_the_quality(build, monkeypatch, small_error, expected):
    """By the error of the ratio of perplexities; the figures are those of the first blocks."""
    monkeypatch.setattr("coldpress.compiler.stages.verify.FEWEST_BLOCKS", 2)
    monkeypatch.setattr("coldpress.compiler.stages.verify.SMALL_ERROR", small_error)
    found = run(VerifyConfig(), build.model, build.model, build.corpus, build.package())
    assert (len(found.blocks), found.num_test_blocks) == (expected, 4)
    asked = run(VerifyConfig(test_tokens=32 * expected), build.model, build.model, build.corpus, build.package())
    assert found.blocks == asked.blocks


def test_one_block_says_nothing_of_its_error(build):
    found = run(VerifyConfig(test_tokens=2), build.model, build.model, build.corpus, build.package())
    assert (len(found.blocks), found.num_test_blocks) == (1, 4)
    assert np.isnan([found.ppl_source_error, found.ppl_artifact_error, found.ppl_ratio_error]).all()


@pytest.mark.slow
def test_the_sample_is_what_a_user_gets(build, verified):
    """The same prompt and options on the command line give the same text."""
    sample = verified.sample
    assert sample is not None
    command = run_command([sys.executable, "-m", "coldpress"], str(build.artifact), sample) + " --json"
    done = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["text"] == sample.text


@pytest.mark.slow
def test_a_chat_model_answers_a_question(tmp_path):
    """By its template, and not with a page of Python's documentation; the command gives the same answer."""
    template = "<q>{{ messages[0].content }}</q>"
    built = speaking_artifact(tmp_path, context_length=512, template=template, max_position_embeddings=512)
    sample = write_sample(str(built.path), np.arange(32))
    assert sample is not None
    assert (sample.is_chat, sample.prompt) == (True, QUESTION)
    command = run_command([sys.executable, "-m", "coldpress"], str(built.path), sample) + " --json"
    done = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["answer"] == sample.text


def test_a_prompt_is_whole_words_on_one_line():
    assert first_words("Never \x1b[2J\nsay  nev") == "Never [2J say"
    assert first_words("Nev") == "Nev"
    assert first_words("") == ""


def test_nll_by_hand():
    logits = np.log(np.array([[0.5, 0.25, 0.25], [0.1, 0.1, 0.8]], np.float32)) + 3
    assert sum_nll(logits, np.array([1, 2])) == pytest.approx(np.log(4) + np.log(1.25))


def test_a_flipped_bit_is_found(tmp_path):
    build = Build(tmp_path, spec=SPEC)
    package = build.package()
    path = build.artifact / FLASH_FILE
    data = bytearray(path.read_bytes())
    data[5000] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptPageError, match=r"flash\.img: page 1 at byte 4096 has the checksum \w{8}, expected"):
        run(CONFIG, build.model, build.model, build.corpus, package)


def test_another_artifact_in_its_place(build):
    package = build.package().model_copy(update={"manifest_sha256": "f" * 64})
    with pytest.raises(ColdpressError, match=r"the package says ffffffffffff; run package again"):
        run(CONFIG, build.model, build.model, build.corpus, package)


@pytest.mark.parametrize("decision", ["evictions", "extents_sha256"])
def test_a_simulation_that_differs_is_noticed(tmp_path, monkeypatch, decision):
    build = Build(tmp_path, method="topk", spec=SPEC, budget_share=0.3)
    build.package()
    blocks = blocks_of_test_text(build.corpus, 64)
    monkeypatch.setattr(decoded, "MAX_TOKENS", 40)
    replayed = ReplayedSession(str(build.artifact))
    replayed.session.perplexity(blocks, sparse=True, on_logits=replayed)
    assert replayed.equals()
    assert replayed._decisions["misses"] < replayed.session.store.counters.misses, "the first 40 tokens alone"
    simulate = decoded.simulate

    def wrong(*arguments):
        found = simulate(*arguments)
        return found.model_copy(update={decision: getattr(found, decision) * 2 or 1})

    monkeypatch.setattr(decoded, "simulate", wrong)
    assert not replayed.equals()


def test_what_several_tokens_at_once_give_is_what_one_by_one_gives(build, monkeypatch):
    """And what a run takes is told by tokens that were decoded one by one."""
    monkeypatch.setattr(decoded, "MAX_TOKENS", 40)
    blocks = blocks_of_test_text(build.corpus, 64)[:4]
    source = SourceLogits(build.model, blocks)
    watches = [SourceComparison(source, blocks), SourceComparison(source, blocks)]
    alone, together = (
        decode(str(build.artifact), build.model, blocks, watch, bool(way)) for way, watch in enumerate(watches)
    )
    assert together.simulated_equals_real
    assert alone.run.num_tokens == 4 * 30
    assert together.run.num_tokens == 2 * 30
    np.testing.assert_allclose(together.block_nll, alone.block_nll, rtol=1e-4)
    np.testing.assert_allclose(watches[1].kld, watches[0].kld, rtol=1e-3, atol=1e-5)


def test_a_choice_that_sees_what_is_in_dram_is_made_token_by_token(tmp_path):
    """Also of much text; other settings would have it choose otherwise, so it has no ladder."""
    spec = small_spec(num_hidden_layers=2)
    built = build_artifact(tmp_path / "a", Recipe(spec, method="dip_ca"))
    model = describe(spec, tensor_shapes(spec), built.path / "model.safetensors")
    blocks = np.arange(64, dtype=np.int32).reshape(2, 32)
    found = decode(
        str(built.path), model, blocks, SourceComparison(lambda block: np.zeros((32, 96), np.float32), blocks), True
    )
    assert (found.run.num_tokens, found.ladder) == (60, ())
    assert found.simulated_equals_real


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 3])
def test_runs_side_by_side_begin_with_a_cache_that_the_text_before_has_filled(tmp_path, monkeypatch, threads):
    """The figures are those of a session for each run, whatever the number of cores; blocks keep their order."""
    monkeypatch.setattr(decoded, "WARMING", 8)
    spec = small_spec(num_hidden_layers=2)
    built = build_artifact(tmp_path / "a", Recipe(spec, method="dip_ca", slots_share=0.2))
    model = describe(spec, tensor_shapes(spec), built.path / "model.safetensors")
    blocks = np.random.default_rng(0).integers(0, spec.vocab_size, (7, 14)).astype(np.int32)
    source = np.random.default_rng(1).normal(size=(7, 14, spec.vocab_size)).astype(np.float32)
    watch, alone = (SourceComparison(source.__getitem__, blocks) for _ in range(2))
    found = decode(str(built.path), model, blocks, watch, True, threads)
    expected, cold = [], []
    for first, stop in ((0, 2), (2, 4), (4, 6), (6, 7)):
        session = Session(built.path)
        if first:
            session.perplexity(blocks[first - 1 : first, :10], sparse=True)
        receive = alone.begin(first)
        expected += session.perplexity(blocks[first:stop], sparse=True, on_logits=receive).block_nll
        cold += Session(built.path).perplexity(blocks[first:stop], sparse=True).block_nll
    assert list(found.block_nll) == expected != cold
    assert np.array_equal(watch.kld, alone.kld)
    assert np.array_equal(watch.same, alone.same)


def test_test_text_is_what_is_judged(build):
    """Not calibration or validation text, which the artifact was made from."""
    (test,) = (part for part in build.corpus.splits if part.split == "test")
    tokens = load_arrays(test.arrays, "tokens")["tokens"]
    for other in build.corpus.splits:
        if other.split != "test":
            assert not np.array_equal(load_arrays(other.arrays, "tokens")["tokens"], tokens)
    assert np.array_equal(blocks_of_test_text(build.corpus, 64), tokens)


def compare(source: list[np.ndarray], folder: str, blocks: np.ndarray) -> Compared:
    """The figures of all blocks, the last block first."""
    comparison = DenseComparison(folder, blocks)
    for index in reversed(range(len(blocks))):
        assert comparison.compared(source.__getitem__, index) is source[index]
    return comparison.result()


def test_logits_that_are_all_0_have_no_relative_error(tmp_path):
    spec = small_spec(num_hidden_layers=2)
    roles = {role: np.zeros(shape, np.float32) for role, shape in tensor_shapes(spec).items()}
    roles |= dict.fromkeys(spec.frequencies.values(), np.ones(spec.rotary_dim // 2, np.float32))
    folder = build_artifact(tmp_path / "a.coldpress", Recipe(spec, method="dense"), roles).path
    blocks = np.arange(48, dtype=np.int32).reshape(2, 24)
    assert math.isnan(compare([np.zeros((24, spec.vocab_size), np.float32)] * 2, str(folder), blocks).max_logit_error)


@pytest.mark.parametrize(("nudge", "is_fault"), [(1e-5, False), (0.3, True)])
def test_experts_that_are_tied_are_no_fault(tmp_path, nudge, is_fault):
    """The first two experts have the same scores, and the packed weights prefer the second."""
    write_model(
        tmp_path / "tiny", "mixtral", num_hidden_layers=2, dtype="float16", overrides={"num_experts_per_tok": 1}
    )
    model = ingest.run(ingest.IngestConfig(model=str(tmp_path / "tiny")), Workspace(tmp_path / "work", "test"))
    roles = {role: read_role(model, role) for role in model.tensors}
    roles["layers.0.router.weight"][1] = roles["layers.0.router.weight"][0]
    roles |= {role: rotary_inv_freq(model, kind) for kind, role in model.spec.frequencies.items()}
    folder = build_artifact(tmp_path / "a.coldpress", Recipe(spec=model.spec, method="dense"), roles).path
    blocks = np.random.default_rng(0).integers(0, model.spec.vocab_size, (2, 24)).astype(np.int32)
    decoder, scores, logits = Session(folder).decoder, {0: [], 1: []}, []

    def prefer(layer, own):
        changed = own + np.float32(nudge) * (np.arange(own.shape[1]) == 1) if layer == 0 else own
        scores[layer].append(changed.copy())
        return changed

    for block in blocks:
        decoder.begin(len(block))
        decoder.prefill_prior = prefer
        logits.append(decoder.prefill(block.astype(np.int64)))
    errors = {}
    for known in ({}, scores):
        comparison = DenseComparison(str(folder), blocks, router_scores=known)
        for index in range(len(blocks)):
            comparison.compared(logits.__getitem__, index)
        errors[bool(known)] = comparison.result().max_logit_error
    assert errors[False] > 0.05
    assert (errors[True] > 0.05) == is_fault


def test_the_logit_error_is_the_worst_of_all_blocks(build):
    blocks = blocks_of_test_text(build.corpus, 64)[:2]
    exact = [SourceLogits(build.model, blocks)(block) for block in (0, 1)]

    def compared(*changed):
        return compare(list(changed), str(build.artifact), blocks).max_logit_error

    largest = max(float(np.abs(block).max()) for block in exact)
    for sign in (-1, 1):  # too small a logit is as wrong as too large a one
        wrong = [block.copy() for block in exact]
        for place in (0, 1):
            wrong[place][3, 5] += np.float32(sign * 0.5 * largest)
        assert compared(wrong[0], exact[1]) > 0.4
        assert compared(exact[0], wrong[1]) > 0.4
    assert compared(*exact) < 0.1


@pytest.mark.parametrize(("experts", "left_out"), [(4, 2), (1, 0)])
def test_a_hundredth_of_the_tokens_of_a_mixture_may_go_to_another_expert(tmp_path, experts, left_out):
    """Rounding decides between two that are equally good; of 250 tokens two are not looked at, and a third is."""
    spec = small_spec(num_experts=experts, num_experts_per_tok=1, max_position_embeddings=256)
    built = build_artifact(tmp_path / "a", Recipe(spec, method="dense", context_length=256))
    block = np.random.default_rng(0).integers(0, spec.vocab_size, 250)
    decoder = Session(built.path).decoder
    decoder.begin(block.size)
    logits = decoder.prefill(block)
    for wrong in range(4):
        moved = logits.copy()
        moved[np.arange(wrong) * 80, 3] += np.float32(0.5 * np.abs(logits).max())
        error = compare([moved], str(built.path), block[None]).max_logit_error
        assert (error > 0.3) == (wrong > left_out), wrong


def test_the_number_of_cores_changes_no_logit(build):
    blocks = blocks_of_test_text(build.corpus, 64)
    one, three = (SourceLogits(build.model, blocks, threads) for threads in (1, 3))
    assert all(np.array_equal(one(block), three(block)) for block in range(len(blocks)))


def test_agreement_is_with_the_source(build):
    """Whatever the artifact's own dense logits say."""
    blocks = blocks_of_test_text(build.corpus, 64)[:2]
    source = [SourceLogits(build.model, blocks)(block) for block in (0, 1)]
    watch = SourceComparison(source.__getitem__, blocks)
    Session(build.artifact).perplexity(blocks, sparse=True, on_logits=watch)
    watched: list[np.ndarray] = []
    Session(build.artifact).perplexity(blocks, sparse=True, on_logits=watched.extend)
    expected = np.concatenate([logits[:-1] for logits in source]).argmax(axis=1)
    same = (np.array(watched).argmax(axis=1) == expected).reshape(2, -1).mean(axis=1)
    found, error = watch.top1_agreement()
    assert found == pytest.approx(same.mean())
    assert error == pytest.approx(statistics.stdev(same.tolist()) / math.sqrt(2))


def test_the_record_says_on_what_text_it_stands(build, verified):
    found = verified.protocol
    test = build.corpus.split("test")
    assert found.tokens_sha256 == hashlib.sha256(Path(test.arrays.array_file).read_bytes()).hexdigest()
    assert (found.context_length, found.stride) == (32, test.block_tokens)
    assert (found.corpus, found.text_sha256) == (build.corpus.name, build.corpus.text_sha256)


def test_the_record_says_what_a_dense_run_would_take(build, verified):
    """In the artifact's format, within its plan's budget: every unit is read or pinned."""
    found = verified.dense
    assert found is not None
    unit_bytes = 3 * 2 * 34  # a row of gate, a row of up and a column of down, 64 values each in groups of 34 bytes
    everything = SPEC.num_hidden_layers * SPEC.intermediate_size * unit_bytes
    assert found.pinned_bytes + found.flash_bytes_per_token >= everything
    assert 0 < found.pinned_bytes + found.read_buffer_bytes < build.plans.plans[0].dram_budget_bytes
    assert found.dram_s > 0


@pytest.mark.parametrize("place", [0, 1])
def test_a_logit_that_is_no_number_is_no_small_error(build, place):
    blocks = blocks_of_test_text(build.corpus, 64)[:2]
    logits = [SourceLogits(build.model, blocks)(block).copy() for block in (0, 1)]
    logits[place][2, 7] = np.nan
    found = compare(logits, str(build.artifact), blocks)
    assert np.isnan(found.max_logit_error)
    assert np.isnan(found.nll_source[place])


def test_perplexity_by_hand():
    """Of 8 and 2, whose logarithms are 3 and 1 times that of 2: 4, and sqrt(2) ln 2 / sqrt(2) of it."""
    assert perplexity(np.log([8.0, 2.0])) == pytest.approx((4, 4 * math.log(2)))
    assert perplexity(np.log([8.0])) == pytest.approx((8, np.nan), nan_ok=True)


@pytest.mark.parametrize(("nll", "expected"), [(1e5, np.inf), (np.inf, np.inf), (np.nan, np.nan)])
def test_perplexity_beyond_what_a_float_holds(nll, expected):
    assert perplexity(np.array([nll, nll])) == pytest.approx((expected, np.nan), nan_ok=True)


@pytest.mark.parametrize(
    ("figure", "error", "digits", "shown"),
    [
        (27.554, 1.021, 2, "27.55 ± 1.02"),
        (1.000142, 0.0000321, 4, "1.000142 ± 0.000032"),
        (1.5, 0.0, 2, "1.50 ± 0.00"),
        (8.2, np.nan, 2, "8.20"),
    ],
)
def test_figures_are_shown_as_far_as_their_error_is(figure, error, digits, shown):
    assert with_error(figure, error, digits) == shown


@pytest.mark.slow
@pytest.mark.parametrize("much", [False, True])
def test_reads_are_counted_by_length_as_those_of_the_run(tmp_path, monkeypatch, much):
    """Against the store's own counters; of much text, only of the tokens that are decoded alone."""
    monkeypatch.setattr(decoded, "MAX_TOKENS", 20)
    if much:
        monkeypatch.setattr("coldpress.compiler.stages.verify.WORK_ONE_BY_ONE", 0)
    build = Build(tmp_path, method="topk", spec=SPEC, budget_share=0.1)
    found = run(CONFIG, build.model, build.model, build.corpus, build.package())
    assert found.run.num_tokens == (20 if much else 60)
    assert sum(each.reads for each in found.read_lengths) == found.run.reads > 0
    assert sum(each.read_bytes for each in found.read_lengths) == found.run.read_bytes
    bounds = [each.least_bytes for each in found.read_lengths]
    assert bounds == sorted(set(bounds))
    assert all(each.least_bytes <= each.read_bytes / each.reads < 2 * each.least_bytes for each in found.read_lengths)


def test_read_lengths_by_hand():
    counted = ReadLengths()
    for purpose, lengths in ((Purpose.REQUEST, (4096, 8191, 8192)), (Purpose.PRELOAD, (4096,)), (Purpose.LOAD, (9,))):
        extents = SimpleNamespace(lengths=np.array(lengths, np.int64))
        counted.began(purpose, SimpleNamespace(extents=extents))
    assert [(each.least_bytes, each.reads, each.read_bytes) for each in counted.found()] == [
        (4096, 3, 4096 + 8191 + 4096), (8192, 1, 8192),
    ]  # fmt: skip


@pytest.mark.slow
def test_the_memory_beside_the_budget_is_that_of_a_process_alone(build, verified):
    """More than a bare interpreter with numpy takes, and no part of what this process holds besides."""
    held = np.ones(1 << 28, np.uint8)  # 256 MiB that a child must not inherit
    found = process_bytes(str(build.artifact))
    assert verified.process_bytes == pytest.approx(found, rel=0.1)
    script = "import numpy; from coldpress.runtime.dram.memory import rss_bytes; print(rss_bytes())"
    bare = int(subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout)
    assert bare < found < held.nbytes


def test_a_process_that_cannot_measure_itself_is_a_sentence(tmp_path):
    with pytest.raises(ColdpressError, match="the process that measures its own memory ended with code 1"):
        process_bytes(str(tmp_path / "nowhere"))


def test_a_file_that_the_manifest_does_not_list_is_refused(tmp_path):
    build = Build(tmp_path, spec=SPEC)
    package = build.package()
    (build.artifact / "notes.txt").write_text("not of the compiler")
    with pytest.raises(ArtifactError, match=r"notes\.txt"):
        run(CONFIG, build.model, build.model, build.corpus, package)


@pytest.mark.slow
def test_a_published_artifact_is_verified_where_it_stands(tmp_path):
    build = Build(tmp_path, spec=SPEC)
    package = build.package()
    final = tmp_path / "final.coldpress"
    build.artifact.rename(final)
    with pytest.raises(ColdpressError, match=r"nothing stands there, the package says \w{12}; run package again"):
        run(CONFIG, build.model, build.model, build.corpus, package)
    point(build.artifact, final)  # as publish does
    assert run(CONFIG, build.model, build.model, build.corpus, package).artifact_sha256 == package.manifest_sha256


@pytest.mark.slow
def test_every_plan_is_measured_as_a_user_of_its_budget_has_it(tmp_path):
    """And what is said of the whole artifact is said of its largest plan."""
    build = Build(tmp_path, method="topk", spec=SPEC, budget_share=0.3, smaller=((0.1, 0.1),))
    found = run(CONFIG, build.model, build.model, build.corpus, build.package())
    large, small = found.plans
    plans = open_artifact(build.artifact).manifest.plans
    assert [plan.plan for plan in found.plans] == [plan.name for plan in plans]
    assert (large.ppl_artifact, large.ppl_ratio) == (found.ppl_artifact, pytest.approx(found.ppl_ratio))
    assert (large.dram_budget_bytes, large.top1_agreement) == (found.run.dram_budget_bytes, found.top1_agreement)
    blocks = blocks_of_test_text(build.corpus, 64)[:2]
    with Session(build.artifact, dram_budget_bytes=small.dram_budget_bytes) as session:
        alone = session.perplexity(blocks, sparse=True)
    assert small.ppl_artifact == pytest.approx(math.exp(alone.mean_nll), rel=1e-5)
    assert small.reads_per_token == alone.metrics.reads / alone.metrics.num_tokens
    assert (large.density, small.density) == (pytest.approx(0.25), pytest.approx(0.1))
    assert all(plan.simulated_equals_real for plan in found.plans)
    assert all(plan.dram_used_bytes <= plan.dram_budget_bytes for plan in found.plans)


def test_one_plan_alone_has_no_table(verified):
    assert verified.plans == ()
