"""quote of several DRAM budgets: each has the choice of one build of them all."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coldpress.cli.main import main
from coldpress.compiler.io import Workspace, save_record
from coldpress.compiler.quote.decide import QuoteSettings, Quoting
from coldpress.compiler.quote.records import DeviceQuote
from coldpress.compiler.quote.sources import QuoteSource, activations_of
from coldpress.compiler.search.settings import AllocateConfig
from coldpress.compiler.stages import allocate
from coldpress.schemas.compute import Compute, Figure, KernelRate
from coldpress.schemas.device import DeviceProfile
from coldpress.schemas.sparsity import Sparsity
from tests.support.curves import curves_of
from tests.support.models import write_model
from tests.support.records import Build
from tests.support.statistics import device_of, model_of
from tests.support.tiny import tiny_spec

LAYERS, CONTEXT_LENGTH, TOKENS = 11, 128, 24
BUDGETS = ("100%", "60%")
RATIOS = {"topk": {0.3: 1.045, 0.5: 1.03, 0.9: 1.01}}
FORMATS = {"int8_group32": 1.001, "int4_group32": 1.03}
RATES = {"fp16": 1e10, "int4_group32": 4e9, "int8_group32": 1e10}


def device(**flash: Any) -> DeviceProfile:
    """A device on which products of int4 take longer than those of int8, for fewer bytes."""
    rates = tuple(KernelRate(format=name, density=1.0, bytes_per_s=rate) for name, rate in RATES.items())
    return device_of(**flash).model_copy(update={"compute": Compute(rates=Figure(value=rates, source="a test"))})


@pytest.fixture
def source(tmp_path: Path) -> QuoteSource:
    model = model_of(LAYERS, 256, 640, hidden_act="silu")
    curves = curves_of(model, tmp_path / "curves", RATIOS, FORMATS, TOKENS)
    activations = activations_of(curves, model.spec, tmp_path / "counted")
    scratch = tmp_path / "quote"
    given = {"model": "planted"}
    auto = dict.fromkeys(("method", "format", "kv_cache", "routing", "cache"), "auto")
    settings = {**auto, "context_length": CONTEXT_LENGTH}
    return QuoteSource("build", model, activations, curves, "measured", "", settings, given, scratch, None)


def quoted(source: QuoteSource, on: DeviceProfile, *budgets: str, quick: bool = True) -> tuple[DeviceQuote, ...]:
    settings = {**source.settings, "dram_budget": ",".join(budgets)}
    given = {**source.given, "dram_budget": ",".join(budgets)}
    given_source = replace(source, settings=settings, given=given)
    return Quoting(given_source, on, QuoteSettings(quick, with_steps=True)).quotes()


def built(source: QuoteSource, on: DeviceProfile, folder: Path, *budgets: str) -> Sparsity:
    """What `allocate` records for a build of these budgets."""
    config = AllocateConfig(
        method="auto",
        format="auto",
        kv_cache="auto",
        cache="auto",
        dram_budget=",".join(budgets),
        context_length=CONTEXT_LENGTH,
        density_allocation="uniform",
    )
    work = Workspace(folder, config.to_json())
    return allocate.run(config, source.model, source.activations, on, work, curves=source.curves)


@pytest.mark.parametrize("latency_s", [pytest.param(1e-6, marks=pytest.mark.slow), 1e-4])
def test_each_budget_is_quoted_as_the_build_of_all_takes_it(
    source: QuoteSource, tmp_path: Path, latency_s: float
) -> None:
    on = device(latency_s=latency_s)
    found = quoted(source, on, *reversed(BUDGETS), quick=False)
    sparsity = built(source, on, tmp_path / "built", *BUDGETS)
    assert len(found) == len(sparsity.decisions) == len(BUDGETS)
    for quote, decision in zip(found, sparsity.decisions, strict=True):
        assert quote.choice is not None
        assert quote.dram_budget_bytes == decision.budget.dram_budget_bytes
        taken = (quote.choice.method, quote.choice.format, quote.choice.kv_cache)
        assert taken == (sparsity.method, sparsity.format, sparsity.kv_cache)
        assert quote.choice.cache == decision.cache
        assert quote.choice.density == pytest.approx(decision.tried[0].density)
        assert quote.choice.reason == decision.tried[0].reason


@pytest.mark.slow
def test_a_budget_alone_may_take_what_the_build_of_all_does_not(source: QuoteSource) -> None:
    """Where all fits, int8 is the faster one, and plans share one image."""
    on = device(latency_s=1e-6)
    together = quoted(source, on, *BUDGETS)
    alone = [one for budget in BUDGETS for one in quoted(source, on, budget)]
    formats = [[one.choice.format for one in quotes if one.choice is not None] for quotes in (together, alone)]
    assert len(set(formats[0])) == 1
    assert formats[1] == ["int8_group32", "int4_group32"]
    assert any("all budgets share" in one.choice.reason for one in together if one.choice is not None)


def test_commands_are_of_the_build_of_all(source: QuoteSource) -> None:
    found = quoted(source, device(), *BUDGETS)
    sizes = [one.dram_budget_bytes for one in found]
    assert sizes == sorted(sizes, reverse=True)
    command = f"coldpress build planted --device test --dram-budget {','.join(BUDGETS)}"
    for one in found:
        assert one.figures["tokens_per_s"].verify == command
        assert not one.steps
    (alone,) = quoted(source, device(), BUDGETS[0])
    assert alone.steps


def test_a_build_is_refused_for_one_of_its_budgets(source: QuoteSource) -> None:
    large, small = quoted(source, device(), "100%", "1000")
    assert not large.fits
    assert not small.fits
    assert small.refusal is not None
    assert small.refusal.startswith("a DRAM budget of 1,000 bytes was asked for")
    assert large.refusal == f"a build of all budgets is refused: {small.refusal}"
    _, small, smallest = quoted(source, device(), "100%", "2000", "1000")
    for one in (small, smallest):
        assert one.refusal is not None
        assert one.refusal.startswith(f"a DRAM budget of {one.dram_budget_bytes:,} bytes was asked for")


# The command line


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    build = Build(tmp_path / "build", spec=tiny_spec(num_hidden_layers=LAYERS))
    build.package(curves=curves_of(build.model, tmp_path / "curves", RATIOS, num_tokens=TOKENS))
    return build.artifact


def told(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    status = main(["quote", *map(str, arguments)])
    out, err = capsys.readouterr()
    assert status == 0, err
    return out


@pytest.mark.slow
def test_an_artifact_is_quoted_for_several_budgets(capsys: pytest.CaptureFixture[str], artifact: Path) -> None:
    asked = (artifact, "--device", "pixel6", "--dram-budget", "90%,100%")
    found = json.loads(told(capsys, *asked, "--json"))["devices"]
    assert [one["device"] for one in found] == ["pixel6"] * 2
    assert found[0]["dram_budget_bytes"] > found[1]["dram_budget_bytes"]
    text = told(capsys, *asked)
    assert text.count("pixel6 with ") == 2
    for words in ("tokens/s", "least DRAM", "verify with", "--dram-budget"):
        assert words in text


@pytest.mark.slow
def test_config_json_alone_is_quoted_for_several_budgets_and_devices(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save_record(device(), tmp_path / "planted.json")
    folder = write_model(tmp_path / "made", num_hidden_layers=LAYERS, hidden_size=256, intermediate_size=640)
    asked = (folder, "--device", "planted.json,pixel6", "--dram-budget", "60%,80%")
    found = json.loads(told(capsys, *asked, "--json"))["devices"]
    assert [one["device"] for one in found][::2] == [one["device"] for one in found][1::2]
    assert found[0]["device"] != found[2]["device"] == "pixel6"
    for quotes in (found[:2], found[2:]):
        assert len({(one["choice"]["method"], one["choice"]["format"]) for one in quotes}) == 1
    assert main(["quote", str(folder), "--device", "pixel6", "--dram-budget", "60%,60%"]) == 2
    assert "give each budget once" in capsys.readouterr().err
