"""quote: what a model will do on a device, before anything is built and without its weights."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import kurtosis

from benchmarks.shared.reference import moment
from coldpress.cli.main import main
from coldpress.compiler.checkpoint.shapes import read_shapes
from coldpress.compiler.io import Workspace, load_arrays, save_arrays, save_record
from coldpress.compiler.needs import Build as Needed
from coldpress.compiler.quote import reference, sources
from coldpress.compiler.quote.decide import CLEARLY, NEARLY
from coldpress.compiler.quote.records import Quote
from coldpress.compiler.quote.show import WORDS, shown
from coldpress.compiler.quote.sources import activations_of, expert_shares, find
from coldpress.compiler.search.density import AllocationInputs
from coldpress.compiler.search.dram_shares import divided
from coldpress.compiler.search.judge import BudgetJudge
from coldpress.compiler.search.replay import Replays
from coldpress.compiler.search.settings import AllocateConfig
from coldpress.compiler.seconds import TokenCost
from coldpress.compiler.stages import calibrate, ingest
from coldpress.compiler.stages.calibrate import CalibrateConfig
from coldpress.compiler.stages.ingest import IngestConfig
from coldpress.compiler.stages.preflight import budget
from coldpress.compiler.workflow.settings import of_all_stages, resolve
from coldpress.runtime.artifact.integrity import verify_artifact
from coldpress.runtime.artifact.reader import open_artifact
from coldpress.runtime.device_profiles.devices import load_device
from coldpress.schemas.activations import Activations
from coldpress.schemas.curves import FormatLoss
from coldpress.schemas.errors import ColdpressError
from coldpress.schemas.model import Model
from tests.support.artifacts import change_manifest
from tests.support.curves import curves_of
from tests.support.models import write_model
from tests.support.records import Build
from tests.support.shapes import spec_7b
from tests.support.statistics import device_of, few_blocks, model_of
from tests.support.tiny import tiny_spec

LAYERS = 11
RATIOS = {"topk": {0.3: 1.3, 0.5: 1.01, 0.9: 1.0}, "gate": {0.3: 1.2, 0.7: 1.01, 0.9: 1.0}}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of its own, and signals of few tokens for models that were not measured."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sources, "DRAWN_TOKENS", 24)


@pytest.fixture(scope="module")
def config_alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with config.json and nothing else."""
    made, alone = tmp_path_factory.mktemp("made"), tmp_path_factory.mktemp("alone")
    write_model(made, num_hidden_layers=LAYERS, hidden_size=256, intermediate_size=640)
    (alone / "config.json").write_bytes((made / "config.json").read_bytes())
    return alone


def quoted(capsys: pytest.CaptureFixture[str], model: object, *arguments: str, device: str = "pixel6") -> Any:
    """The JSON of a quote; the exit code says whether any device holds the model."""
    status = main(["quote", str(model), "--device", device, *arguments, "--json"])
    out, err = capsys.readouterr()
    assert status in (0, 2), err
    found = Quote.model_validate_json(out)
    assert status == (0 if any(one.fits for one in found.devices) else 2)
    return json.loads(out)


def refused(capsys: pytest.CaptureFixture[str], model: object, *arguments: str) -> str:
    assert main(["quote", str(model), *arguments]) == 2
    return capsys.readouterr().err


@pytest.mark.slow
def test_a_quote_estimates_drafts_apart_from_its_other_figures(
    capsys: pytest.CaptureFixture[str], config_alone: Path, tmp_path: Path
) -> None:
    write_model(tmp_path, num_hidden_layers=1, hidden_size=64, intermediate_size=64)
    asked = (config_alone, "--dram-budget", "80%", "--method", "dense")
    (device,) = quoted(capsys, *asked, "--draft-model", str(tmp_path))["devices"]
    figure = device["figures"].pop("drafted_tokens_per_s")
    assert 0 < figure["low"] < figure["value"] < figure["high"]
    assert "tokens a pass" in figure["basis"]
    (alone,) = quoted(capsys, *asked)["devices"]
    assert {name: each["value"] for name, each in device["figures"].items()} == {
        name: each["value"] for name, each in alone["figures"].items()
    }


def test_a_draft_model_as_large_as_the_model_brings_nothing(
    capsys: pytest.CaptureFixture[str], config_alone: Path
) -> None:
    asked = (config_alone, "--dram-budget", "60%", "--method", "dense", "--draft-model", str(config_alone))
    (device,) = quoted(capsys, *asked)["devices"]
    figure = device["figures"]["drafted_tokens_per_s"]
    assert (figure["value"], figure["basis"]) == (None, "none: the draft model leaves too little DRAM")


@pytest.mark.slow
def test_a_model_is_quoted_by_config_json_alone(capsys: pytest.CaptureFixture[str], config_alone: Path) -> None:
    found = quoted(capsys, config_alone, "--dram-budget", "60%")
    assert (found["source"], found["basis"], found["context_length"]) == ("config", "same kind of model", 256)
    (device,) = found["devices"]
    assert device["fits"]
    assert set(device["figures"]) == set(WORDS) - {"drafted_tokens_per_s"}
    for name, figure in device["figures"].items():
        assert figure["basis"], name
        if figure["low"] is not None:
            assert figure["low"] <= figure["value"] <= figure["high"]
    commands = {figure["verify"] for figure in device["figures"].values()} - {None}
    assert commands == {f"coldpress build {config_alone} --device pixel6 --dram-budget 60%"}
    assert device["figures"]["token_energy_j"]["value"] is None
    speed = device["figures"]["tokens_per_s"]
    assert (speed["low"], speed["high"], speed["is_most"]) == (None, None, True)  # pixel6 has no rates of computing
    (measured,) = quoted(capsys, config_alone, "--dram-budget", "60%", device="macbook-m1-max")["devices"]
    speed = measured["figures"]["tokens_per_s"]
    assert speed["high"] > speed["value"] > speed["low"] > 0
    assert not speed["is_most"]
    assert quoted(capsys, config_alone, "--dram-budget", "60%") == found


@pytest.mark.parametrize(
    ("asked", "more"), [(("--method", "dense"), 0.0), (("--method", "topk", "--density", "0.5"), 0.3)]
)
def test_an_interval_spans_single_tokens_and_is_wider_with_the_zeros_of_another_model(
    capsys: pytest.CaptureFixture[str],
    config_alone: Path,
    monkeypatch: pytest.MonkeyPatch,
    asked: tuple[str, ...],
    more: float,
) -> None:
    """Tokens of 1 to 101 ms have their 5th, 50th and 95th percentiles at 6, 51 and 96 ms."""
    tokens = [TokenCost(ms / 1000, 0.0, 0.0, 0.0, 0, 0) for ms in range(1, 102)]
    real = BudgetJudge.tokens
    monkeypatch.setattr(BudgetJudge, "tokens", lambda self, candidate: (real(self, candidate)[0], tokens))
    (device,) = quoted(capsys, config_alone, "--dram-budget", "60%", *asked, device="macbook-m1-max")["devices"]
    wide = 1 + load_device("macbook-m1-max").modelled_error + more
    speed = device["figures"]["tokens_per_s"]
    assert speed["value"] == pytest.approx(1000 / 51)
    assert (speed["low"], speed["high"]) == (pytest.approx(1000 / 96 / wide), pytest.approx(1000 / 6 * wide))


@pytest.mark.slow
def test_the_commands_of_a_quote_name_the_file_of_a_device(
    capsys: pytest.CaptureFixture[str], config_alone: Path, tmp_path: Path
) -> None:
    """Its name alone would be unknown to a build."""
    file = tmp_path / "my-phone.json"
    save_record(load_device("pixel6").model_copy(update={"name": "my-phone"}), file)
    for device, named in ((str(file), str(file)), ("pixel6", "pixel6")):
        (found,) = quoted(capsys, config_alone, "--dram-budget", "6MB", device=device)["devices"]
        commands = [one["verify"] for one in found["figures"].values() if one["verify"]]
        assert commands
        assert all(f" --device {named} " in command for command in commands)


@pytest.mark.slow
def test_a_profile_is_quoted_without_a_commit_of_its_corpus(
    capsys: pytest.CaptureFixture[str], config_alone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on the first page of the documentation; its text is a dataset of the hub."""
    monkeypatch.setattr(sources, "snapshot", lambda *_, **__: config_alone)
    found = quoted(capsys, "mistral-7b", "--dram-budget", "3MB")
    assert (found["model"], found["source"]) == ("mistral-7b", "config")


@pytest.mark.slow
@pytest.mark.parametrize(("head_dim", "kv_cache"), [(32, "int8"), (16, "fp16")])
def test_keys_are_smaller_where_dram_is_short_and_the_heads_have_a_smaller_format(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, head_dim: int, kv_cache: str
) -> None:
    heads = {"num_attention_heads": 128 // head_dim, "num_key_value_heads": 128 // head_dim, "head_dim": head_dim}
    folder = write_model(
        tmp_path / "made", num_hidden_layers=LAYERS, hidden_size=128, intermediate_size=320, overrides=heads
    )
    (folder / "model.safetensors").unlink()
    (device,) = quoted(capsys, folder, "--dram-budget", "92%", "--context-length", "256")["devices"]
    assert device["choice"]["kv_cache"] == kv_cache


@pytest.mark.slow
def test_the_first_token_grows_with_its_prompt(capsys: pytest.CaptureFixture[str], config_alone: Path) -> None:
    def of(*prompt: str) -> tuple[int, dict[str, Any]]:
        found = quoted(capsys, config_alone, "--dram-budget", "60%", *prompt)
        return found["prompt_tokens"], found["devices"][0]["figures"]["first_token_s"]

    (usual, given), (few, short), (many, long) = of(), of("--prompt-tokens", "1"), of("--prompt-tokens", "255")
    assert (few, usual, many) == (1, 128, 255)
    assert short["value"] < given["value"] < long["value"]
    assert "a prompt of 128 tokens" in given["basis"]
    assert "lower bound" in given["basis"]  # the profile has no rates
    for tokens in ("0", "256"):
        assert "expected 1 to 255" in refused(capsys, config_alone, "--device", "pixel6", "--prompt-tokens", tokens)


@pytest.mark.slow
def test_build_time_is_an_estimate_by_parameters_and_tokens(
    capsys: pytest.CaptureFixture[str], config_alone: Path
) -> None:
    found = quoted(capsys, config_alone, "--dram-budget", "60%")["devices"][0]["figures"]["build_s"]
    assert "an estimate" in found["basis"]
    assert "100 GFLOP/s" in found["basis"]
    assert found["low"] < found["value"] < found["high"]


@pytest.mark.slow
def test_config_json_alone_needs_no_transformers(config_alone: Path) -> None:
    """It takes seconds to import, of the five that a quote may take."""
    script = (
        "import sys; from coldpress.cli.main import main; status = main(sys.argv[1:]); "
        "sys.exit(status or 10 * bool({'torch', 'transformers', 'datasets', 'pandas'} & {*sys.modules}))"
    )
    asked = ("quote", str(config_alone), "--device", "pixel6", "--dram-budget", "60%", "--json")
    done = subprocess.run([sys.executable, "-c", script, *asked], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_least_dram_fits_and_a_byte_less_does_not(capsys: pytest.CaptureFixture[str], config_alone: Path) -> None:
    (device,) = quoted(capsys, config_alone)["devices"]
    least = round(device["figures"]["least_dram_bytes"]["value"])
    (exact,) = quoted(capsys, config_alone, "--dram-budget", str(least))["devices"]
    (less,) = quoted(capsys, config_alone, "--dram-budget", str(least - 1))["devices"]
    assert exact["fits"]
    assert not less["fits"]
    assert less["choice"] is None
    assert "are needed before any unit is cached" in less["refusal"]
    assert less["next_budget"]["dram_budget_bytes"] >= least


@pytest.mark.slow
def test_more_dram_is_recommended_only_while_it_buys_speed(
    capsys: pytest.CaptureFixture[str], config_alone: Path
) -> None:
    (device,) = quoted(capsys, config_alone, "--dram-budget", "80%")["devices"]
    steps = device["steps"]
    budgets = [one["dram_budget_bytes"] for one in steps]
    assert budgets == sorted(set(budgets))
    recommended = device["figures"]["recommended_dram_bytes"]["value"]
    for one in steps:
        enough = one["tokens_per_s"] >= NEARLY * steps[-1]["tokens_per_s"]
        assert one["dram_budget_bytes"] >= recommended or not enough
    larger = [one for one in steps if one["dram_budget_bytes"] > device["dram_budget_bytes"]]
    own = device["figures"]["tokens_per_s"]["value"]
    gains = [one for one in larger if one["ratio"] >= CLEARLY]
    assert device["next_budget"] == (gains[0] if gains else None)
    assert all(one["ratio"] > 1 for one in larger if one["tokens_per_s"] > 1.05 * own)


@pytest.mark.slow
def test_the_quality_of_a_model_that_was_not_measured_is_unknown(
    capsys: pytest.CaptureFixture[str], config_alone: Path
) -> None:
    """Curves of a model of 7M parameters promise less than a build of a language model loses."""
    for ratio, format_name, words in (
        ("1.05", "iq4_nl", "formats by matrix: 1.03"),
        ("1.01", "int8_group32", "int8_group32: 1.00"),
    ):
        (device,) = quoted(capsys, config_alone, "--dram-budget", "80%", "--max-ppl-ratio", ratio)["devices"]
        assert (device["choice"]["method"], device["choice"]["format"]) == ("dense", format_name)
        quality = device["figures"]["ppl_ratio"]
        assert quality["value"] is quality["low"] is None
        assert quality["basis"].startswith(f"unknown until built (SmolLM2-135M (135M parameters) in {words}")
    assert all("unknown until a build measures it" in one["skipped"] for one in device["tried"] if one["skipped"])
    (named,) = quoted(capsys, config_alone, "--method", "dip", "--format", "int4_group32", "--dram-budget", "80%")[
        "devices"
    ]
    assert named["choice"]["format"] == "int4_group32"
    assert re.search(
        r"in int4_group32: 1\.\d+; a 7M model of this kind, density", named["figures"]["ppl_ratio"]["basis"]
    )


def test_formats_are_those_that_keep_a_language_model_of_this_size() -> None:
    real = reference.reference().real
    sizes = [one.num_parameters for one in real]
    assert sizes == sorted(sizes)
    assert reference.real_like(1) is real[0]
    for one in real:
        assert reference.real_like(one.num_parameters) is reference.real_like(one.num_parameters + 1) is one
        losses = {loss.format: loss.ppl_ratio for loss in one.formats}
        assert losses["int8_group32"] < min(1.05, losses["int4_group32"])


@pytest.mark.parametrize("bits", [2.0, 4.0, 4.5, 20.0])
def test_formats_by_layer_have_the_bits_of_a_measured_mix(bits: float) -> None:
    spec, name = spec_7b(32, 32_000, "silu"), "q3_k"
    known = reference.reference().real[0]
    assert known.heads
    assert known.mix is not None
    mix = known.mix.model_copy(update={"bits": bits, "ppl_ratio": 1.04})
    real = known.model_copy(update={"mix": mix})
    found = real.losses(spec)
    loss = found["formats"][-1]
    assert isinstance(loss, FormatLoss)
    assert (loss.family, loss.ppl_ratio, len(loss.format)) == ("block", 1.04, 32)
    mean_bits = sum(map(reference.bits_of, loss.format)) / 32
    assert mean_bits == pytest.approx(min(max(bits, 2.625), 16.0), abs=1.1 / 32)
    assert (name in loss.format) == (bits == 4.0)
    assert real.losses(spec.model_copy(update={"intermediate_size": 11_009})) == {"formats": known.formats, "heads": ()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("keys", "taken"),
    [
        (("--method", "dense"), ("dense", "int4_group32", "fp16")),
        (("--method", "topk", "--density", "0.5", "--format", "int8_group32"), ("topk", "int8_group32", "fp16")),
        (("--kv-cache", "int8", "--format", "int4_group32"), ("dense", "int4_group32", "int8")),
    ],
)
def test_every_key_of_a_build_is_one_of_a_quote(
    capsys: pytest.CaptureFixture[str],
    config_alone: Path,
    tmp_path: Path,
    keys: tuple[str, ...],
    taken: tuple[str, ...],
) -> None:
    """And the least DRAM is that of the build."""
    (device,) = quoted(capsys, config_alone, *keys, "--context-length", "64")["devices"]
    choice = device["choice"]
    assert tuple(choice[name] for name in ("method", "format", "kv_cache")) == taken
    assert choice["density"] == pytest.approx(0.5 if "--density" in keys else 1.0, abs=0.02)
    least = round(device["figures"]["least_dram_bytes"]["value"])
    build = resolve(
        {"model": str(config_alone), "device": "pixel6", "context_length": 64}
        | {key.removeprefix("--").replace("-", "_"): value for key, value in zip(keys[::2], keys[1::2], strict=True)}
    )
    shapes = read_shapes(config_alone / "config.json")
    stages = of_all_stages(build)
    asked = Needed(shapes, stages, {}, load_device("pixel6"), 1024, 256, 1)
    assert least == pytest.approx(min(need.least_bytes for need in budget.least_needs(asked)), rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(("model_type", "relu"), [("mixtral", False), ("opt", True), ("qwen3", False)])
def test_other_architectures_are_quoted(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, model_type: str, relu: bool
) -> None:
    folder = write_model(tmp_path / "made", model_type, num_hidden_layers=LAYERS, relu=relu)
    (device,) = quoted(capsys, folder, "--dram-budget", "4MB")["devices"]
    assert device["fits"]
    methods = {one["method"] for one in device["tried"] if one["skipped"] is None}
    assert "dense" in methods
    assert ("relu" in methods) == relu


@pytest.mark.slow
def test_a_model_of_no_measured_kind_is_quoted_dense_and_without_quality(
    capsys: pytest.CaptureFixture[str], config_alone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coldpress.compiler.quote.sources.kind_of", lambda spec: None)
    found = quoted(capsys, config_alone, "--dram-budget", "80%")
    (device,) = found["devices"]
    assert (found["basis"], device["choice"]["method"]) == ("none", "dense")
    assert device["figures"]["ppl_ratio"]["value"] is None
    assert all(one["skipped"] for one in device["tried"] if one["method"] != "dense")


@pytest.mark.slow
def test_several_devices_are_quoted_in_the_order_given(capsys: pytest.CaptureFixture[str], config_alone: Path) -> None:
    devices = quoted(capsys, config_alone, "--dram-budget", "70%", device="oneplus12,pixel6")["devices"]
    assert [one["device"] for one in devices] == ["oneplus12", "pixel6"]
    assert devices[0]["figures"]["tokens_per_s"] != devices[1]["figures"]["tokens_per_s"]


@pytest.mark.slow
def test_people_get_a_table_with_units(capsys: pytest.CaptureFixture[str], config_alone: Path) -> None:
    assert main(["quote", str(config_alone), "--device", "pixel6", "--dram-budget", "60%"]) == 0
    text = capsys.readouterr().out
    for words in ("tokens/s", "perplexity ratio", "least DRAM", "MB", "unknown until built", "verify with"):
        assert words in text
    assert max(map(len, text.splitlines())) <= 80 + len(str(config_alone))  # the command is one line
    assert "lower bound" not in text
    assert main(["quote", str(config_alone), "--device", "pixel6", "--dram-budget", "60%", "--why"]) == 0
    assert "lower bound" in capsys.readouterr().out


@pytest.mark.slow
def test_an_artifact_is_quoted_for_another_device_without_torch(tmp_path: Path) -> None:
    """The curves travel with it, and every byte of them is checked."""
    build = Build(tmp_path / "build", spec=tiny_spec(num_hidden_layers=LAYERS))
    curves = curves_of(build.model, tmp_path / "curves", RATIOS)
    build.package(curves=curves)
    verify_artifact(open_artifact(build.artifact))
    script = (
        "import sys; from coldpress.cli.main import main; status = main(sys.argv[1:]); "
        "sys.exit(status or 10 * ('torch' in sys.modules))"
    )
    asked = ("quote", str(build.artifact), "--device", "oneplus12", "--dram-budget", "90%", "--json")
    done = subprocess.run([sys.executable, "-c", script, *asked], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["source"], found["basis"]) == ("artifact", "measured")
    assert {"topk", "gate"} <= {one["method"] for one in found["devices"][0]["tried"]}
    size = sum(path.stat().st_size for path in build.artifact.rglob("*") if path.is_file())
    manifest = (build.artifact / "manifest.json").stat().st_size
    assert found["devices"][0]["figures"]["disk_bytes"]["value"] == size - manifest

    damaged = build.artifact / "trace.safetensors.zst"
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    done = subprocess.run([sys.executable, "-c", script, *asked], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "trace.safetensors.zst" in done.stderr


def test_curves_of_an_older_version_are_refused_in_a_sentence(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    build = Build(tmp_path / "build", spec=tiny_spec(num_hidden_layers=LAYERS))
    build.package(curves=curves_of(build.model, tmp_path / "curves", RATIOS))
    file = build.artifact / "curves.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"layer_gains": []}))
    change_manifest(build.artifact, lambda manifest: None, relist=True)
    assert main(["quote", str(build.artifact), "--device", "oneplus12"]) == 2
    assert "curves.json: layer_gains: Extra inputs are not permitted" in (told := capsys.readouterr().err)
    assert "build it again" in told


def test_an_artifact_without_curves_is_quoted_by_those_of_its_kind(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    build = Build(tmp_path / "build")
    build.package()
    found = quoted(capsys, build.artifact, "--dram-budget", "90%")
    assert (found["source"], found["basis"]) == ("artifact", "same kind of model")


@pytest.mark.slow
@pytest.mark.parametrize(("budget", "said"), [("least", True), ("100%", False)])
def test_a_budget_that_serves_experts_badly_is_named(
    budget: str, said: bool, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """In a build folder, by the curve of its calibration."""
    folder = tmp_path / "build"
    write_model(tmp_path / "made", "mixtral", num_hidden_layers=LAYERS)
    model = ingest.run(IngestConfig(model=str(tmp_path / "made")), Workspace(folder / "ingest", "test"))
    corpus = few_blocks(tmp_path / "corpus")
    activations = calibrate.run(CalibrateConfig(), model, corpus, Workspace(folder / "calibrate", "test"), 1)
    for record, name in (
        (model, "ingest"),
        (activations, "calibrate"),
        (curves_of(model, folder / "explore", {}), "explore"),
    ):
        save_record(record, folder / f"{name}.json")
    if budget == "least":
        figures = quoted(capsys, folder, "--dram-budget", "100%")["devices"][0]["figures"]
        budget = str(int(figures["least_dram_bytes"]["value"]) + 4096)
    found = quoted(capsys, folder, "--dram-budget", budget)
    assert ("fewer than the 2 of one token" in found["devices"][0]["choice"]["reason"]) == said


def test_what_cannot_be_quoted_is_refused_in_one_sentence(
    capsys: pytest.CaptureFixture[str], config_alone: Path, tmp_path: Path
) -> None:
    assert "pixel7" in refused(capsys, config_alone, "--device", "pixel7")
    assert "max_ppl_ratio" in refused(capsys, config_alone, "--device", "pixel6", "--max-ppl-ratio", "0")
    assert "dnse" in refused(capsys, config_alone, "--device", "pixel6", "--method", "dnse")
    assert "lower dram_budget" in refused(capsys, config_alone, "--device", "pixel6", "--dram-budget", "1TB")
    assert "model" in refused(capsys, "no-such-model", "--device", "pixel6")
    begun = tmp_path / "begun"
    begun.mkdir()
    save_record(model_of(2, 64, 160), begun / "ingest.json")
    assert "explore.json" in refused(capsys, begun, "--device", "pixel6")


# What stands behind


def records_of(folder: Path) -> tuple[Model, AllocationInputs]:
    """A model of 11 layers with random signals, its activations counted in the trace."""
    model = model_of(LAYERS, 256, 640)
    curves = curves_of(model, folder, RATIOS)
    activations = activations_of(curves, model.spec, folder / "counted")
    return model, AllocationInputs(model, activations, device_of(), Workspace(folder / "work", "test"), None, 1, curves)


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["static", "lfu"])
def test_figures_of_single_tokens_have_the_mean_that_the_search_saw(tmp_path: Path, cache: str) -> None:
    _, inputs = records_of(tmp_path)
    asked = {"method": "topk", "format": "int8_group32", "dram_budget": "80%", "context_length": 128}
    config = AllocateConfig(**asked, density=0.5, cache=cache, density_allocation="uniform")
    division, replays = divided(config, inputs), Replays(inputs)
    tokens, whole = replays.tokens(division), replays.of(division)
    assert len(tokens) > 3
    assert np.mean([token.token_s for token in tokens]) == pytest.approx(whole.token_s)
    hits, misses = (sum(getattr(token, name) for token in tokens) for name in ("hits", "misses"))
    assert hits / (hits + misses) == pytest.approx(whole.hit_rate)


def test_activations_counted_in_a_trace_are_those_of_its_signals(tmp_path: Path) -> None:
    model = model_of(LAYERS, 256, 640)
    assert model.spec.exact_zeros
    kind = reference.kind_of(model.spec)
    assert kind is not None
    trace = reference.drawn_trace(model.spec, kind, (3,), 96)
    curves = curves_of(model, tmp_path, {})
    curves = curves.model_copy(update={"trace": save_arrays(tmp_path / "t.safetensors", trace), "trace_layers": (3,)})
    found: Activations = activations_of(curves, model.spec, tmp_path / "counted")
    assert [entry.layer for entry in found.layers] == list(range(LAYERS))
    active = trace["3.mlp_inner"] != 0
    for entry in found.layers:
        family = entry.family("neuron")
        assert family is not None
        assert family.density == pytest.approx(active.mean())
        arrays = load_arrays(family.arrays)
        bits = np.unpackbits(arrays["bits"], axis=1, count=len(active), bitorder="little").astype(bool)
        assert np.array_equal(bits.T, active)
        assert arrays["magnitude_histogram"].sum() == active.size


def test_a_trace_shows_how_often_experts_are_used(tmp_path: Path) -> None:
    spec = model_of(LAYERS, 64, 32, num_experts=4, num_experts_per_tok=2).spec
    used = np.array([[1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 0]], bool)
    values = (np.repeat(used, 32, axis=1) * np.random.default_rng(0).uniform(1, 2, (3, 128))).astype(np.float16)
    curves = curves_of(model_of(LAYERS, 256, 640), tmp_path, {})
    trace = save_arrays(tmp_path / "t.safetensors", {"3.mlp_inner": values, "7.mlp_inner": values[:2]})
    found = expert_shares(curves.model_copy(update={"trace": trace, "trace_layers": (3, 7)}), spec)
    assert found is not None
    assert found.tolist() == [pytest.approx([1, 2 / 3, 1 / 3, 0]), [1, 0.5, 0.5, 0]]
    assert expert_shares(curves, model_of(LAYERS, 256, 640).spec) is None


@pytest.mark.parametrize("name", ["smooth", "exact_zeros"])
def test_drawn_signals_have_the_statistics_of_the_measured_ones(name: str) -> None:
    kind: reference.Kind = getattr(reference.reference(), name)
    for signal, known in kind.signals.items():
        values = reference.drawn(known, 512, 1024, np.random.default_rng(3)).astype(np.float64)
        scale = np.sqrt((values**2).mean(axis=0))
        assert np.log(scale[scale > 0]).std() == pytest.approx(known.log_scale_std, abs=0.08), signal
        assert (values != 0).mean() == pytest.approx(known.density, abs=0.03), signal
        if known.density == 1:
            tails = kurtosis((values / scale).ravel(), fisher=False)
            expected = moment(4 * known.power) / moment(2 * known.power) ** 2
            assert tails == pytest.approx(expected, rel=0.25), signal
            following = [np.corrcoef(values[1:, unit], values[:-1, unit])[0, 1] for unit in range(0, 1024, 16)]
            assert np.mean(following) == pytest.approx(known.correlation, abs=0.06), signal


def test_only_measured_kinds_have_curves() -> None:
    kinds = {
        spec: reference.kind_of(tiny_spec(**dict(spec)))
        for spec in (
            (("hidden_act", "relu"),),
            (("hidden_act", "silu"),),
            (("hidden_act", "gelu"), ("gated_mlp", False)),
        )
    }
    relu, smooth, none = kinds.values()
    assert none is None
    assert relu is reference.reference().exact_zeros
    assert smooth is reference.reference().smooth


def test_a_build_folder_of_other_weights_is_refused(tmp_path: Path) -> None:
    model, inputs = records_of(tmp_path / "records")
    curves = inputs.curves
    assert curves is not None
    for record, name in ((model, "ingest"), (inputs.activations, "calibrate")):
        save_record(record, tmp_path / f"{name}.json")
    save_record(curves.model_copy(update={"weights_sha256": "1" * 64}), tmp_path / "explore.json")
    with pytest.raises(ColdpressError, match="belongs to other weights"):
        find(str(tmp_path), {}, tmp_path / "scratch")


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("build_s", 1351.0, "1,351 s"),
        ("build_s", 4000.0, "1.1 h"),
        ("first_token_s", 0.0805, "0.0805 s"),
        ("tokens_per_s", 28812.3, "28,812"),
        ("tokens_per_s", 104.26, "104.3"),
        ("ppl_ratio", 1.0266, "1.027"),
    ],
)
def test_no_figure_is_a_power_of_ten(name: str, value: float, text: str) -> None:
    assert shown(name, value) == text
