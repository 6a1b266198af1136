"""relufy: the model has exact zeros, comes closer to what it was, and is an ordinary model for every later stage."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from coldpress.compiler.activity.forward import LayerStream
from coldpress.compiler.checkpoint.tensors import read_role
from coldpress.compiler.io import Workspace
from coldpress.compiler.stages import ingest, relufy
from coldpress.compiler.stages.ingest import IngestConfig
from coldpress.compiler.stages.relufy import RelufyConfig
from coldpress.compiler.training.loop import _Judge
from coldpress.compiler.training.memory import Size
from coldpress.compiler.workflow import settings
from coldpress.schemas.errors import ColdpressError, DoesNotFitError
from coldpress.schemas.model import Model
from tests.compiler.test_distill_recipes import SEVEN_BILLION, size_of
from tests.compiler.test_distill_resume import Killed, dying
from tests.support.distilling import corpus_at, load, model_at
from tests.support.product import Case, compiled, difference, source_of
from tests.support.statistics import model_of, workspace

QUICK = RelufyConfig(
    relufy="relu",
    relufy_steps=6,
    distill_blocks=4,
    validation_blocks=8,
    distill_evaluations=3,
    compute_device="cpu",
)
TOKENS = np.random.default_rng(9).integers(2, 320, (4, 32)).astype(np.int32)


def made(config: RelufyConfig, model: Model, folder: Path, name: str = "relufied", threads: int = 1) -> Model:
    return relufy.run(config, model, corpus_at(folder), workspace(folder / name), threads)


def zeros(model: Model) -> float:
    """Share of the activation that is exactly zero on text of its own, over all layers."""
    seen: list[float] = []
    LayerStream(model).last_hidden(
        TOKENS, lambda layer: lambda block: {"mlp_activation": lambda x: seen.append((x == 0).double().mean().item())}
    )
    return float(np.mean(seen))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "activation"),
    [("llama", "relu"), ("phi3", "relu2"), ("opt", "relu"), ("gemma2", "relu"), ("falcon", "relu")],
)
def test_transformers_loads_what_is_written(kind: str, activation: str, tmp_path: Path) -> None:
    source = model_at(tmp_path, kind)
    found = made(QUICK.model_copy(update={"relufy": activation, "relufy_steps": 2}), source, tmp_path)
    with torch.no_grad():
        expected = load(found)(input_ids=torch.from_numpy(TOKENS).long()).logits.numpy()
    logits = LayerStream(found).logits(TOKENS)
    assert np.abs(logits - expected).max() < 1e-5
    assert np.abs(logits - LayerStream(source).logits(TOKENS)).max() > 1e-3
    assert (source.spec.exact_zeros, found.spec.exact_zeros, found.spec.hidden_act) == (False, True, activation)
    assert (zeros(source), zeros(found) > 0.3) == (0, True)
    again = ingest.run(IngestConfig(model=found.folder), Workspace(tmp_path / "again", "test"))
    assert again.spec == found.spec


@pytest.mark.slow
def test_fatrelu_is_zero_below_its_threshold(tmp_path: Path) -> None:
    """By hand, on transformers' own modules; and a folder that says so is understood."""
    config = QUICK.model_copy(update={"relufy": "fatrelu", "relufy_steps": 1})
    found = made(config, model_at(tmp_path), tmp_path)
    whole: Any = load(found)
    for layer in whole.model.layers:
        layer.mlp.act_fn.forward = lambda x: x * (x >= relufy.FATRELU_THRESHOLD)
    with torch.no_grad():
        expected = whole(input_ids=torch.from_numpy(TOKENS).long()).logits.numpy()
    assert np.abs(LayerStream(found).logits(TOKENS) - expected).max() < 1e-5
    assert zeros(found) > zeros(
        made(QUICK.model_copy(update={"relufy_steps": 1}), model_at(tmp_path / "b"), tmp_path, "r")
    )
    again = ingest.run(IngestConfig(model=found.folder), Workspace(tmp_path / "again", "test"))
    assert (again.spec.hidden_act, again.spec.activation_threshold) == ("fatrelu", relufy.FATRELU_THRESHOLD)
    assert settings.resolve({"model": found.folder}).model.exact_zeros


@pytest.mark.slow
def test_the_runtime_has_the_threshold(tmp_path: Path) -> None:
    """An artifact of such a model, compiled and run: its zeros are exact, too."""
    case = Case("llama", "relu", "fp16")
    source = source_of(tmp_path / "source", case.architecture, relu=True, relu_threshold=0.3)
    assert source.model.spec.hidden_act == "fatrelu"
    found = difference(compiled(source, case, tmp_path / "build"), source, tmp_path / "codes")
    assert found.equal, found
    plain = source_of(tmp_path / "plain", case.architecture, relu=True)
    logits = [LayerStream(model).logits(source.tokens) for model in (source.model, plain.model)]
    assert np.abs(logits[0] - logits[1]).max() > 100 * found.median * np.abs(logits[0]).max()


@pytest.mark.slow
def test_it_comes_closer_and_a_penalty_makes_more_of_it_zero(tmp_path: Path) -> None:
    source = model_at(tmp_path)
    config = QUICK.model_copy(update={"relufy_steps": 20, "relufy_rate": 2e-3})
    plain, penal = (
        made(config.model_copy(update={"relufy_penalty": penalty}), source, tmp_path, f"p{penalty}")
        for penalty in (0.0, 20.0)
    )
    assert plain.relufication is not None
    assert penal.relufication is not None
    curve = plain.relufication.curve
    assert curve[-1].validation_kl < 0.7 * curve[0].validation_kl
    assert {point.validation_penalty for point in curve} == {0.0}
    penalties = [point.validation_penalty for point in penal.relufication.curve]
    assert penalties[-1] < 0.8 * penalties[0]
    assert zeros(penal) > zeros(plain) + 0.05


def test_the_penalty_is_the_mean_magnitude(tmp_path: Path) -> None:
    """Before the first step, on the validation blocks: 3 times the mean over layers, tokens and units."""
    source = model_at(tmp_path)
    found = made(
        QUICK.model_copy(update={"relufy_steps": 1, "relufy_penalty": 3.0, "relufy_rate": 1e-30}), source, tmp_path
    )
    assert found.relufication is not None
    seen: list[float] = []
    blocks = np.random.default_rng(0).integers(2, 320, (3, 48, 32)).astype(np.int32)[1][:8]
    LayerStream(found).last_hidden(
        blocks, lambda layer: lambda block: {"mlp_activation": lambda x: seen.append(x.abs().mean().item())}
    )
    assert found.relufication.curve[0].validation_penalty == pytest.approx(3 * np.mean(seen), rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("penalty", [0.0, 2.0])
def test_a_killed_run_goes_on_to_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, penalty: float
) -> None:
    """On other numbers of threads, and with layers that run again in the backward pass, too."""
    source, config = model_at(tmp_path), QUICK.model_copy(update={"relufy_penalty": penalty})
    whole = made(config, source, tmp_path, "whole")
    with monkeypatch.context() as patched:
        patched.setattr(Workspace, "save", dying(1))
        with pytest.raises(Killed):
            made(config, source, tmp_path, "killed")
    monkeypatch.setattr("coldpress.compiler.training.memory.KEPT_BYTES", 0)
    resumed = made(config, source, tmp_path, "killed", threads=3)
    assert resumed.weights_sha256 == whole.weights_sha256
    assert resumed.relufication == whole.relufication


def test_a_model_with_zeros_is_refused(tmp_path: Path) -> None:
    model = model_at(tmp_path, relu=True)
    with pytest.raises(ColdpressError, match=r"relufy=relu was asked for.*is relu, which has exact zeros already"):
        made(QUICK, model, tmp_path)


def test_weights_are_those_of_the_lowest_loss_penalty_included(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the last that are better than the start, nor those of the lowest divergence."""
    figures = iter([(1.0, 1.0), (0.6, 0.6), (0.5, 0.9)])
    seen: list[dict[str, torch.Tensor]] = []

    def judge(found: _Judge) -> tuple[float, float]:
        seen.append({name: value.detach().clone() for name, value in found.lesson.student.named_parameters()})
        return next(figures)

    monkeypatch.setattr(_Judge, "__call__", judge)
    config = QUICK.model_copy(update={"relufy_steps": 2, "distill_evaluations": 2, "relufy_penalty": 0.1})
    written = dict(load(made(config, model_at(tmp_path), tmp_path)).named_parameters())
    assert all(torch.equal(value, written[name]) for name, value in seen[1].items())
    assert not all(torch.equal(value, written[name]) for name, value in seen[2].items())


def test_a_loss_that_is_no_number_names_the_rate_of_this_stage(tmp_path: Path) -> None:
    config = QUICK.model_copy(update={"relufy_rate": 1e30, "distill_patience": 20})
    with pytest.raises(ColdpressError, match=r"loss of relufy is nan at step 2.*lower relufy_rate, which is 1e\+30"):
        made(config, model_at(tmp_path), tmp_path)


def test_memory_is_two_models_and_what_training_keeps(tmp_path: Path) -> None:
    model = model_at(tmp_path)
    size = Size.of(model, corpus_at(tmp_path), 1)
    whole = relufy.ram_bytes(size, 0)
    assert whole > 7 * 4 * model.num_parameters  # with a gradient of the block that runs
    assert relufy.ram_bytes(replace(size, threads=2), 0) > whole + 4 * model.num_parameters


ADAPTED = QUICK.model_copy(update={"relufy_rank": 4, "relufy_rate": 5e-3})


@pytest.mark.parametrize(
    ("kind", "activation", "rate"),
    [
        ("llama", "fatrelu", 5e-3),
        pytest.param("phi3", "relu2", 5e-3, marks=pytest.mark.slow),
        ("opt", "relu", 5e-4),
        pytest.param("gemma3_text", "relu", 5e-3, marks=pytest.mark.slow),
    ],
)
def test_adapters_learn_in_place_of_weights(kind: str, activation: str, rate: float, tmp_path: Path) -> None:
    """The source is its teacher with its own activation, and what is written is the student that was judged."""
    source = model_at(tmp_path, kind, dtype="bfloat16")
    config = ADAPTED.model_copy(update={"relufy": activation, "relufy_rate": rate})
    found, whole = (
        made(config.model_copy(update={"relufy_rank": rank}), source, tmp_path, f"rank{rank}") for rank in (4, 0)
    )
    assert found.relufication is not None
    assert whole.relufication is not None
    curve = found.relufication.curve
    assert curve[0].validation_kl == pytest.approx(whole.relufication.curve[0].validation_kl, rel=0.01)
    assert curve[-1].validation_kl < 0.95 * curve[0].validation_kl
    blocks = np.random.default_rng(0).integers(2, 320, (3, 48, 32)).astype(np.int32)[1][:8]
    logits = [torch.from_numpy(LayerStream(model).logits(blocks)) for model in (source, found)]
    taught, learned = (torch.log_softmax(values, dim=-1) for values in logits)
    divergence = (taught.exp() * (taught - learned)).sum(dim=-1).mean().item()
    assert min(point.validation_kl for point in curve) == pytest.approx(divergence, rel=0.02)
    assert (found.spec.hidden_act, zeros(found) > 0.3) == (activation, True)
    for role in source.tensors:
        change = (read_role(found, role) - read_role(source, role)).astype(np.float64)
        if role.startswith("layers.") and change.ndim > 1:
            values = np.linalg.svd(change, compute_uv=False)
            assert 0 < values[4] < 1e-3 * values[0] or values[0] == 0, role
        else:
            assert not change.any(), role


@pytest.mark.slow
def test_adapters_go_on_to_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, config = model_at(tmp_path), ADAPTED.model_copy(update={"relufy_penalty": 2.0})
    whole = made(config, source, tmp_path, "whole", threads=2)
    with monkeypatch.context() as patched:
        patched.setattr(Workspace, "save", dying(1))
        with pytest.raises(Killed):
            made(config, source, tmp_path, "killed")
    resumed = made(config, source, tmp_path, "killed", threads=3)
    assert resumed.weights_sha256 == whole.weights_sha256
    assert resumed.relufication == whole.relufication


def test_adapters_of_seven_billion_parameters_fit_into_24_gb() -> None:
    """Llama-2-7B in bfloat16, rank 32 on all matrices of its layers, blocks of 512 tokens."""
    model = model_of(**SEVEN_BILLION)
    size = size_of(model, (), 512, 1, 2 * model.num_parameters)
    adapters = 32 * 32 * (4 * (4096 + 4096) + 3 * (4096 + 11008))
    least = 2 * model.num_parameters + 4 * 6 * adapters  # weights; adapters, gradients twice, two moments, the best
    assert least < relufy.ram_bytes(size, 32) < 24e9
    assert relufy.ram_bytes(size, 64) == relufy.ram_bytes(size, 32) + 4 * 6 * adapters
    two = replace(size, threads=2)  # blocks at a time, each with its gradient
    assert relufy.ram_bytes(two, 64) == relufy.ram_bytes(two, 32) + 4 * 7 * adapters
    assert relufy.ram_bytes(size, 0) > 180e9
    assert relufy.disk_bytes(size, 32) == 4 * model.num_parameters + 2 * 4 * 4 * adapters


def test_a_model_too_large_to_be_trained_whole_is_told_of_adapters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coldpress.compiler.device.memory.free_dram_bytes", lambda: 1 << 20)
    with pytest.raises(DoesNotFitError, match=r"relufy=relu, .* build with relufy_rank=32, a smaller block_tokens"):
        made(QUICK, model_at(tmp_path), tmp_path)


def test_the_dag_knows_that_zeros_will_be_exact(tmp_path: Path) -> None:
    model_at(tmp_path)
    folder = str(tmp_path / "checkpoint")
    assert not settings.resolve({"model": folder}).model.exact_zeros
    assert settings.resolve({"model": folder, "relufy": "relu2", "method": "relu"}).model.exact_zeros


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"hidden_act": "silu", "relu_threshold": 0.1}, "relu_threshold is 0.1 with the activation silu"),
        ({"hidden_act": "relu", "relu_threshold": -1}, "relu_threshold is -1, expected a number above 0"),
        ({"hidden_act": "relu", "relu_threshold": "much"}, "relu_threshold is 'much', expected a number above 0"),
    ],
)
def test_a_threshold_that_cannot_be_is_refused(tmp_path: Path, values: dict[str, Any], expected: str) -> None:
    model_at(tmp_path)
    file = tmp_path / "checkpoint" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))
    with pytest.raises(ColdpressError, match=expected):
        ingest.run(IngestConfig(model=str(file.parent)), Workspace(tmp_path / "work", "test"))
