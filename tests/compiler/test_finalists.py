"""allocate measures what can still win: its choice is that of the whole measurement, and losers are dropped early."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coldpress.compiler.activity.calibration_pass import PassConfig, count_activity
from coldpress.compiler.activity.layer_counts import ActivityRule, countable_families, exact_families
from coldpress.compiler.io import Workspace
from coldpress.compiler.quality import trace
from coldpress.compiler.quality.passes import Passes
from coldpress.compiler.search import judge
from coldpress.compiler.search.settings import AllocateConfig
from coldpress.compiler.stages import allocate, explore, ingest
from coldpress.compiler.stages.allocate import _finalists, _formats
from coldpress.compiler.stages.allocate._finalists import hopeful
from coldpress.compiler.stages.explore import ExploreConfig
from coldpress.compiler.stages.ingest import IngestConfig
from coldpress.runtime.sparsity import flash
from coldpress.schemas.activations import Activations
from coldpress.schemas.corpus import SPLITS, Corpus, Split
from coldpress.schemas.curves import Curve, Curves, FormatLoss, HeadLoss, Point
from coldpress.schemas.errors import ColdpressError, DoesNotFitError
from coldpress.schemas.memory import OverBudgetError
from coldpress.schemas.model import Model
from coldpress.schemas.sparsity import Sparsity
from tests.support.curves import NO_LOSS
from tests.support.models import write_model
from tests.support.statistics import corpus_of_tokens, device_of

RNG = np.random.default_rng(6)
TOKENS: dict[Split, np.ndarray] = {split: RNG.integers(0, 384, (12, 32)).astype(np.int32) for split in SPLITS}
NUM_TOKENS, FEW_TOKENS = 128, 64
METHODS = ("dense", "dip", "dip_ca", "glu", "topk")


@pytest.fixture(scope="module", autouse=True)
def _few_candidates() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flash, "DRAWN_UNITS", 1 << 10)
        patch.setattr(trace, "TRACE_TOKENS", FEW_TOKENS)
        for module in (explore, _finalists, judge):
            patch.setattr(module, "candidates", lambda *_: METHODS)
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("model")
    write_model(folder / "model", num_hidden_layers=3)
    return ingest.run(IngestConfig(model=str(folder / "model")), Workspace(folder / "ingest", "test"))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return corpus_of_tokens(tmp_path_factory.mktemp("corpus"), TOKENS)


@pytest.fixture(scope="module")
def activations(model: Model, corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Activations:
    families = countable_families(model.spec)
    activity = ActivityRule(exact_families(families, model.spec))
    work = Workspace(tmp_path_factory.mktemp("activations"), "test")
    return count_activity(PassConfig(), model, corpus, families, activity, work, 1)


def explored(model: Model, corpus: Corpus, activations: Activations, folder: Path, measured: str) -> Curves:
    config = ExploreConfig(method="auto", explore_tokens=NUM_TOKENS, explore=measured)
    return explore.run(config, model, corpus, activations, Workspace(folder, "test"), 1)


@pytest.fixture(scope="module")
def whole(model: Model, corpus: Corpus, activations: Activations, tmp_path_factory: pytest.TempPathFactory) -> Curves:
    return explored(model, corpus, activations, tmp_path_factory.mktemp("whole"), "whole")


@pytest.fixture(scope="module")
def formats(model: Model, corpus: Corpus, activations: Activations, tmp_path_factory: pytest.TempPathFactory) -> Curves:
    return explored(model, corpus, activations, tmp_path_factory.mktemp("formats"), "needed")


class Building:
    """Runs `allocate` on curves, and counts the tokens of its passes."""

    def __init__(self, model: Model, corpus: Corpus, activations: Activations, folder: Path) -> None:
        self._records, self._folder, self.passes = (model, corpus, activations), folder, dict[str, int]()

    def run(self, curves: Curves, budget: str | int, patch: pytest.MonkeyPatch, **settings: Any) -> Sparsity:
        values = {"method": "auto", "format": "auto", "dram_budget": budget, "context_length": 64}
        values |= {"density_allocation": "uniform", "max_ppl_ratio": 1.05, "explore_tokens": NUM_TOKENS}
        work = Workspace(self._folder / f"{budget}-{curves.num_tokens}", "test")
        (model, corpus, activations), measured = self._records, Passes.differences

        def counted(passes: Passes, title: str, *rest: Any) -> Any:
            self.passes[title] = passes.tokens.size
            return measured(passes, title, *rest)

        patch.setattr(Passes, "differences", counted)
        config = AllocateConfig(**values | settings)
        return allocate.run(config, model, activations, device_of(), work, corpus, curves=curves)


@pytest.fixture
def building(model: Model, corpus: Corpus, activations: Activations, tmp_path: Path) -> Building:
    return Building(model, corpus, activations, tmp_path)


@pytest.mark.slow
def test_explore_measures_formats_alone(formats: Curves, whole: Curves) -> None:
    assert {loss.format for loss in formats.formats} == {loss.format for loss in whole.formats}
    assert (formats.curves, formats.unexplored) == ((), ())
    assert [loss.kv_cache for loss in formats.kv_caches] == [loss.kv_cache for loss in whole.kv_caches]
    assert formats.num_tokens == FEW_TOKENS < whole.num_tokens == NUM_TOKENS
    assert formats.trace.sha256 == whole.trace.sha256, "the trace is no longer than that"


@pytest.mark.slow
def test_where_the_whole_model_fits_nothing_is_measured(
    building: Building, formats: Curves, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = building.run(formats, "100%", monkeypatch)
    assert (found.method, found.is_whole) == ("dense", True)
    assert {title.split("-")[0] for title in building.passes} <= {"format", "head"}
    assert found.curves is not None
    assert found.curves.curves == ()
    reasons = {entry.method: entry.reason for entry in found.curves.unexplored}
    assert reasons.keys() == set(METHODS)
    assert reasons["topk"] == "was not measured: the whole model fits in DRAM"


def test_what_cannot_fit_is_refused_before_a_selector_is_measured(
    building: Building, formats: Curves, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DoesNotFitError, match="are needed before any unit is cached"):
        building.run(formats, "10%", monkeypatch)
    assert {title.split("-")[0] for title in building.passes} <= {"format", "head"}


@pytest.mark.parametrize(
    "budget", [pytest.param("55%", marks=pytest.mark.slow), "70%", pytest.param("85%", marks=pytest.mark.slow)]
)
def test_the_choice_is_that_of_the_whole_measurement(
    building: Building, formats: Curves, whole: Curves, budget: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = building.run(whole, budget, monkeypatch)
    assert not building.passes, "everything is known"
    found = building.run(formats, budget, monkeypatch)
    assert found.tried[0].token_s == pytest.approx(expected.tried[0].token_s, rel=0.02)
    assert (found.method, found.format) == (expected.method, expected.format)
    assert found.curves is not None
    known = {curve.method for curve in found.curves.curves} | {entry.method for entry in found.curves.unexplored}
    assert known >= set(METHODS)
    for curve in found.curves.curves:  # what counts was measured on all tokens
        (same,) = (one for one in whole.curves if one.model_copy(update={"points": curve.points}) == curve)
        points = {point.density: point for point in same.points}
        assert all(points[point.density].ppl_ratio == pytest.approx(point.ppl_ratio) for point in curve.points)


def test_a_selector_that_is_slower_than_a_dense_run_whatever_it_loses_is_not_measured(
    building: Building, formats: Curves, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = building.run(formats, "70%", monkeypatch, max_ppl_ratio=1 + 1e-3, format="fp16")
    assert not {title for title in building.passes if title.startswith("curve")}
    assert found.method == "dense"
    skipped = {entry.method: entry.skipped for entry in found.tried}
    assert skipped["glu"] == "does not fit in DRAM"
    assert skipped["dip"] is not None
    assert skipped["dip"].endswith(" times as fast as a dense run, even if it lost nothing")


@pytest.mark.slow
def test_a_selector_that_loses_too_much_is_measured_coarsely_alone(
    building: Building, formats: Curves, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_finalists, "_gain", lambda *_: 2.0)  # a law under which every selector might win
    found = building.run(formats, "70%", monkeypatch, max_ppl_ratio=1 + 1e-9, format="fp16")
    curves = {title: tokens for title, tokens in building.passes.items() if title.startswith("curve")}
    assert curves
    assert set(curves.values()) == {FEW_TOKENS}
    assert found.method == "dense"
    skipped = {entry.method: entry.skipped for entry in found.tried}
    assert skipped["topk"] is not None
    assert "times the perplexity at a density of 0.9" in skipped["topk"]
    coarse = {title for title in curves if title.startswith("curve-dip_ca-0.25-resident")}
    assert coarse, "measured"
    assert not {title for title in curves if title.startswith("curve-dip_ca") and "without" not in title}, (
        "no cache is in the loop before it can win"
    )


@pytest.fixture
def attentive(corpus: Corpus, tmp_path: Path) -> tuple[Building, Curves]:
    """A model that is mostly attention, and its formats."""
    write_model(tmp_path / "model", num_hidden_layers=2, hidden_size=256, intermediate_size=64)  # mostly attention
    model = ingest.run(IngestConfig(model=str(tmp_path / "model")), Workspace(tmp_path / "ingest", "test"))
    families = countable_families(model.spec)
    work, exact = Workspace(tmp_path / "activations", "test"), exact_families(families, model.spec)
    activations = count_activity(PassConfig(), model, corpus, families, ActivityRule(exact), work, 1)
    formats = explored(model, corpus, activations, tmp_path / "formats", "needed")
    return Building(model, corpus, activations, tmp_path), formats


@pytest.mark.slow
def test_a_run_that_fits_only_without_attention_is_measured_as_it_is_rounded(
    attentive: tuple[Building, Curves], monkeypatch: pytest.MonkeyPatch
) -> None:
    building, formats = attentive
    with pytest.raises(DoesNotFitError) as refused:
        building.run(formats, "10%", monkeypatch, format="int8_group32")
    assert isinstance(refused.value, OverBudgetError)
    least = refused.value.needed_bytes
    found = building.run(formats, least, monkeypatch, format="int8_group32")
    assert (found.method, found.families) == ("dense", ("block", "attn_in", "attn_out"))
    assert found.budget.held.num_bytes + found.budget.cache_bytes == least
    assert "format-int8_group32-rtn-block-attn_in-attn_out" in building.passes
    assert not {title for title in building.passes if title.startswith("curve")}, "nothing that cannot fit is measured"
    assert found.tried[0].reason is not None
    assert "attention's are read from flash, too" in found.tried[0].reason


@pytest.mark.slow
def test_larger_formats_are_measured_where_attention_on_flash_loses_too_much(
    attentive: tuple[Building, Curves], monkeypatch: pytest.MonkeyPatch
) -> None:
    building, formats = attentive
    small, large = "int4_group32", "int8_group32"
    lossless = next(loss for loss in formats.formats if loss.format == small).model_copy(
        update=NO_LOSS | {"ppl_ratio": 1.0}
    )
    formats = formats.model_copy(update={"formats": (lossless,), "heads": ()})
    measured, asked = Passes.format, list[tuple[Any, ...]]()

    def lossy(passes: Passes, name: Any, *families: str) -> FormatLoss:
        is_good = name == large or (name == small and "attn_out" not in families)
        ratio = 1.01 if is_good else 1.2
        asked.append((name, *families))
        return measured(passes, name, *families).model_copy(update={"ppl_ratio": ratio, "ppl_ratio_error": 0.0})

    monkeypatch.setattr(Passes, "format", lossy)
    monkeypatch.setattr(_formats, "larger_formats_of", lambda _: (large, "fp16"))
    with pytest.raises(DoesNotFitError) as refused:
        building.run(formats, "10%", monkeypatch)
    assert isinstance(refused.value, OverBudgetError)
    found = building.run(formats, refused.value.needed_bytes * 9 // 8, monkeypatch)
    assert (found.format, found.families) == (large, ("block", "attn_in", "attn_out"))
    assert found.tried[0].ppl_ratio == pytest.approx(1.01)
    streamed = [one for one in asked if "attn_out" in one]
    assert streamed == [(name, "block", "attn_in", "attn_out") for name in (small, large)], "no format in vain"


@pytest.mark.slow
def test_a_head_that_is_taken_is_measured_on_more_text(
    building: Building, formats: Curves, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the text that is asked for, and on all of it where that leaves the floor open."""
    settings: dict[str, Any] = {"format": "fp16", "max_ppl_ratio": 3.0}
    with pytest.raises(DoesNotFitError) as refused:
        building.run(formats, "10%", monkeypatch, **settings)
    assert isinstance(refused.value, OverBudgetError)
    least = refused.value.needed_bytes
    lucky = tuple(
        HeadLoss(format=one.format, ppl_ratio=1.0, **NO_LOSS | {"ppl_ratio_error": 0.02}) for one in formats.heads
    )
    rough = formats.model_copy(update={"heads": lucky})
    building.passes.clear()
    found = building.run(rough, least, monkeypatch, **settings)
    assert found.head is not None, "with the head in fp16 it does not fit"
    title = f"head-{found.head.format}"
    assert [building.passes.get(f"head-{one.format}") for one in lucky if one.format != found.head.format] == [None] * 2
    assert building.passes[title] == NUM_TOKENS
    assert found.curves is not None
    errors = {one.format: one.ppl_ratio_error for one in found.curves.heads}
    assert [name for name, error in errors.items() if error != 0.02] == [found.head.format], "others are as rough"
    monkeypatch.setattr(_formats, "ERRORS", 1e4)
    building.run(rough, least, monkeypatch, **settings)  # now its error reaches beyond the floor
    assert building.passes[title] == TOKENS["validation"].size


@pytest.mark.slow
def test_a_text_of_few_tokens_is_measured_at_all_densities(
    building: Building, formats: Curves, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few densities first, then all of them, on the same tokens: the trial run of `preflight` has no others."""
    for module in (_finalists, judge):
        monkeypatch.setattr(module, "candidates", lambda *_: ("dense", "dip_ca"))
    settings = {"max_ppl_ratio": 3.0, "format": "fp16", "explore_tokens": FEW_TOKENS}
    found = building.run(formats, "75%", monkeypatch, **settings)
    assert found.curves is not None
    (densities,) = {tuple(point.density for point in curve.points) for curve in found.curves.of("dip_ca")}
    assert len(densities) > 2


def test_curves_that_are_missing_need_text(
    model: Model, activations: Activations, formats: Curves, tmp_path: Path
) -> None:
    config = AllocateConfig(method="auto", format="auto", dram_budget="70%", context_length=64)
    with pytest.raises(ColdpressError, match="give --corpus"):
        allocate.run(config, model, activations, device_of(), Workspace(tmp_path, "test"), curves=formats)


def test_the_least_loss_that_a_coarse_measurement_allows() -> None:
    """Its errors are taken off, and between two densities losses grow by equal factors."""
    losses = {0.5: 1.54, 0.9: 1.02}
    errors = {0.5: 0.02, 0.9: 0.005}
    points = tuple(
        Point(density=at, ppl_ratio=ratio, **NO_LOSS | {"ppl_ratio_error": errors[at]}) for at, ratio in losses.items()
    )
    found = hopeful(Curve(method="topk", points=points), (0.3, 0.5, 0.7, 0.9))
    assert [point.density for point in found.points] == [0.3, 0.5, 0.7, 0.9]
    lost = [point.ppl_ratio - 1 for point in found.points]
    assert lost == pytest.approx([0.5 * math.sqrt(50), 0.5, 0.1 / math.sqrt(2), 0.01])
    assert {point.ppl_ratio_error for point in found.points} == {None}
