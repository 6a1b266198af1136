"""Compares units in planes with units that are left out and with dense runs, at equal DRAM and equal loss.

Real models are explored as `method=auto` does: each selector's KL divergence from the source by density, on validation
text, and again on test text. The divergences of format and selector add up. Seconds are those of a 7B by each device's
law: it has a 7B's units, signals drawn with the statistics of the real model's, and the search of a build. Under each
DRAM budget every selector takes the format, density and cache with the fewest seconds whose divergence on validation
text keeps a limit. Codes are chosen by each of two algorithms: all formats' to nearest, or those in planes for each of
the planes and all others' by GPTQ, by Gram matrices of calibration text.
"""

import functools
import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from benchmarks.harness import Benchmark, Cell, Figures, Row, Rows, main, option
from benchmarks.plan_search import SHAPE_CONTEXT, source_of
from benchmarks.shared.cases import Case, case_of
from benchmarks.shared.grams import gram_of
from benchmarks.shared.reference import as_large, kind_from
from coldpress.compiler.activity.calibration_pass import PassConfig, count_activity
from coldpress.compiler.activity.layer_counts import Activity, countable_families, exact_families
from coldpress.compiler.io import Workspace
from coldpress.compiler.quote.sources import Source, curves_like
from coldpress.compiler.quote.trace import activations_of
from coldpress.compiler.rounding._matrix import Rounding
from coldpress.compiler.rounding._weights import Algorithm, Axis
from coldpress.compiler.search import Judged, Space
from coldpress.compiler.stages.allocate import AllocateConfig, Floor, Inputs, searched
from coldpress.compiler.stages.allocate._judge import BudgetJudge
from coldpress.compiler.stages.allocate._replay import Replays
from coldpress.compiler.stages.explore import ExploreConfig, explored
from coldpress.runtime.plugins import load
from coldpress.runtime.profiles.devices import device_names, load_device
from coldpress.schemas.activations import Activations
from coldpress.schemas.curves import Curves
from coldpress.schemas.families import FormatName
from coldpress.schemas.model import Model

METHODS = ("dense", "topk", "flash", "dip", "refine")
REFINES = METHODS[-1]
AS_LARGE = {
    "prose7m": "llama-7b-shape",
    "prose7m-relu": "relu-7b-shape",
    "tinystories-mixtral-8x": "mixtral-8x7b-shape",
    "tinystories656k": "llama-7b-shape",
    "stories260k": "llama-7b-shape",
}
"""Real model -> the shape whose seconds are compared."""
CACHES, CALIBRATION_BLOCKS = ("static", "lfu"), 16
CODES = ("rtn", "nested")
DEVICES = tuple(device_names())


@dataclass(frozen=True)
class Options:
    models: tuple[str, ...] = option(
        ("prose7m",), smoke=("stories260k",), full=tuple(AS_LARGE), choices=tuple(AS_LARGE), help="models"
    )
    codes: tuple[str, ...] = option(CODES, smoke=CODES[1:], choices=CODES, help="how codes are chosen")
    devices: tuple[str, ...] = option(DEVICES, smoke=("pixel6",), choices=DEVICES, help="devices")
    dram_shares: tuple[float, ...] = option(
        (0.8, 0.9),
        smoke=(0.8,),
        full=(0.75, 0.8, 0.85, 0.9),
        help="DRAM, as a share of weights and KV cache in int4_group32",
    )
    limits: tuple[float, ...] = option((0.01, 0.03), smoke=(0.3,), help="KL divergences that are allowed, nats")
    methods: tuple[str, ...] = option(
        METHODS, smoke=("dense", REFINES), choices=METHODS, help="selectors; dense and refine are needed"
    )
    blocks: int = option(2, smoke=1, full=8, help="blocks of 256 tokens of validation and of test text")


@dataclass(frozen=True)
class Kept(Rounding):
    """Chooses codes once for all texts."""

    chosen: dict[tuple[str, Axis, FormatName], np.ndarray] = field(default_factory=dict)

    def codes(self, model: Model, role: str, axis: Axis, format_name: FormatName) -> np.ndarray:
        """See `Rounding`."""
        key = (role, axis, format_name)
        if key not in self.chosen:
            self.chosen[key] = super().codes(model, role, axis, format_name)
        return self.chosen[key]


@dataclass(eq=False)
class Prepared:
    """A model, explored on two texts, and the shape of a 7B of its kind."""

    case: Case
    methods: tuple[str, ...]
    blocks: int
    shape: Source

    @functools.cached_property
    def activations(self) -> Activations:
        """What calibration text tells."""
        case, spec = self.case, self.case.model.spec
        families = countable_families(spec)
        known, work = Activity(exact_families(families, spec)), Workspace(case.folder / "calibrate", "benchmark")
        return count_activity(PassConfig(), case.model, case.corpus(), families, known, work, case.stream.threads)

    @functools.cache  # noqa: B019 - the object lives only while its model is measured
    def rounding(self, codes: str) -> Rounding:
        """Returns how codes are chosen."""
        algorithm = load("coldpress.compiler.rounding", Algorithm, codes)
        return Kept(algorithm, gram_of(self.case) if algorithm.NEEDS_GRAM else None)

    @functools.cache  # noqa: B019 - the object lives only while its model is measured
    def curves(self, codes: str, split: str) -> Curves:
        """Returns the shape's curves and signals, as measured on a text; selectors that leave units out are measured
        once for all codes. A ratio of perplexities is e to the divergence."""
        case, config = self.case, ExploreConfig(method="auto", explore_tokens=self.blocks * 256)
        text = replace(case, splits={**case.splits, "validation": case.splits[split]}, folder=case.folder / split)
        work = Workspace(text.folder / "explore", "benchmark")
        inputs = case.model, text.corpus(), self.activations, work, case.stream.threads
        found = explored(self.methods, config, *inputs, as_large(case.model.spec), self.rounding(codes))
        folder = case.folder / f"{split}-{codes}-as-large"
        folder.mkdir(parents=True, exist_ok=True)
        return curves_like(kind_from(_in_nats(found), case.model.num_parameters), self.shape.model, folder)


def _in_nats(curves: Curves) -> Curves:
    """Returns curves whose ratio of perplexities is e to the divergence, so that a floor limits the divergence.
    Runs that draft are not compared."""

    def changed(losses):
        return tuple(
            loss.model_copy(update={"ppl_ratio": math.exp(loss.mean_kld), "ppl_ratio_error": loss.mean_kld_error})
            for loss in losses
        )

    return curves.model_copy(
        update={
            "curves": tuple(one.model_copy(update={"points": changed(one.points)}) for one in curves.curves),
            "formats": changed(curves.formats),
            "kv_caches": (),
            "drafts": (),
        }
    )


class Plugin(Benchmark[Options]):
    keys = {
        "rows[].model": "real model that gives losses and signals",
        "rows[].codes": "how codes are chosen; nested: GPTQ's in formats without planes",
        "rows[].device": "profile whose law gives the seconds",
        "rows[].dram_share": "DRAM of the 7B, as a share of its weights and KV cache in int4_group32",
        "rows[].limit": "KL divergence from the source that is allowed on validation text, nats",
        "rows[].method": "selector; dense uses every unit",
        "rows[].format?": "format with the fewest seconds; null where none keeps the limit",
        "rows[].density?": "share of the MLP's weights that a token uses or refines; null where none keeps the limit",
        "rows[].kl?": "divergence on test text, nats; null where none keeps the limit",
        "rows[].token_s?": "modelled seconds of a token; null where none keeps the limit",
        "gain_at_kl.*.*.*.over_best?": "by codes and limit: speed of refine over the fastest of all others, median "
        "over the models, devices and DRAM with which refine keeps the limit; null where it keeps none",
        "gain_at_kl.*.*.*.over_dense?": "the same over the fastest dense run",
        "gain_at_kl.*.*.*.kept": "share of models, devices and DRAM in which refine keeps the limit",
        "worst_over_dense?": "least speed of refine over the fastest dense run; null where it keeps no limit",
    }
    needs_data = True
    over = {"model": "models", "codes": "codes", "device": "devices"}
    full_minutes = 90

    def measure(self, cell: Cell) -> Iterator[Row]:
        """Yields a row per DRAM budget, limit and selector."""
        name, codes, device = cell["model"], cell["codes"], load_device(cell["device"])
        at = self.once(name, lambda: self._prepared(name))
        model, curves = at.shape.model, at.curves(codes, "validation")
        work = Workspace(at.case.folder / "plan", "benchmark")
        activations = activations_of(curves, model.spec, work.folder)
        inputs = Inputs(model, activations, device, work, None, 2, curves)
        replays = Replays(inputs, 1.0)
        for share in self.options.dram_shares:
            asked = AllocateConfig(
                method="auto",
                format="auto",
                cache="auto",
                dram_budget=f"{share:.0%}",
                context_length=SHAPE_CONTEXT,
            )
            for limit in self.options.limits:
                found = searched(asked, inputs, Floor(curves, math.exp(limit)), _narrowed, replays)
                budget = asked.model_copy(update={"dram_budget": found.judge.dram_budget_bytes})
                tested = BudgetJudge(budget, inputs, Floor(at.curves(codes, "test"), math.inf), replays)
                for method in self.options.methods:
                    best = _fastest(method, found.judged)
                    yield {
                        "dram_share": share,
                        "limit": limit,
                        "method": method,
                        "format": best and best.candidate.format,
                        "density": best and best.density,
                        "kl": best and math.log(tested(best.candidate).ppl_ratio or math.nan),
                        "token_s": best and best.token_s,
                    }

    def _prepared(self, name: str) -> Prepared:
        fit, test = slice(0, CALIBRATION_BLOCKS), slice(0, self.options.blocks)
        validation = slice(CALIBRATION_BLOCKS, CALIBRATION_BLOCKS + self.options.blocks)
        splits = {"calibration": ("fit", fit), "validation": ("fit", validation), "test": ("test", test)}
        case = case_of(name, self.folder / name, splits)
        return Prepared(case, self.options.methods, self.options.blocks, source_of(AS_LARGE[name], self.folder / name))

    def figures(self, rows: Rows) -> Figures:
        cells: dict[tuple[str, float, str, str, float], dict[str, float]] = {}
        for row in rows:
            cell = (row["codes"], row["limit"], row["model"], row["device"], row["dram_share"])
            seconds = cells.setdefault(cell, {})
            if row["token_s"] is not None:
                seconds[row["method"]] = row["token_s"]
        gains: dict[tuple[str, float], list[tuple[float, float] | None]] = {}
        for (codes, limit, *_), seconds in cells.items():
            own = seconds.pop(REFINES, None)
            kept = None if own is None else (min(seconds.values()) / own, seconds["dense"] / own)
            gains.setdefault((codes, limit), []).append(kept)
        at_kl: dict[str, dict[str, Any]] = {}
        for (codes, limit), found in gains.items():
            kept = [pair for pair in found if pair is not None]
            at_kl.setdefault(codes, {})[f"{limit}"] = {
                "over_best": statistics.median(best for best, _ in kept) if kept else None,
                "over_dense": statistics.median(dense for _, dense in kept) if kept else None,
                "kept": len(kept) / len(found),
            }
        every = [pair for found in gains.values() for pair in found if pair is not None]
        return {"gain_at_kl": at_kl, "worst_over_dense": min((dense for _, dense in every), default=None)}


def _narrowed(space: Space) -> Space:
    """Returns the space with two caches and the lowest density of each selector, nearly always the fastest."""
    return replace(
        space,
        caches=tuple(name for name in space.caches if name in CACHES),
        densities=lambda *of: space.densities(*of)[:1],
    )


def _fastest(method: str, judged: list[Judged]) -> Judged | None:
    """Returns a selector's fastest candidate."""
    built = [one for one in judged if one.candidate.method == method and one.refusal is None]
    return min(built, key=lambda one: one.token_s, default=None)


if __name__ == "__main__":
    main("graded")
