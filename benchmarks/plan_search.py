"""Compares the search of `method=auto` with a sweep over all candidates, a dense run, and ActiveFlow's choice.

A case is a model on a device under a DRAM budget and a quality floor. Real models are calibrated and explored. Shapes
of large models borrow quality curves of a small model of the same kind, and signals drawn with its statistics
(compiler/quote/reference.py), so they measure speed, not quality. A widened real model has quality and the units of a
large one. A mixture's shape takes its experts, and what other routing costs, from the largest real mixture. All
searches have the same candidates, law, curves and tokens (compiler/search); the sweep judges every selector, format and
cache at the `--densities` lowest densities that keep the floor. Seconds are modelled. Some budgets of tiny models hold
only what is always in DRAM: such a cell has no row.
"""

import json
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Benchmark, Cell, Figures, Row, Rows, main, option
from benchmarks.shared.builds import SHORT, build, settings
from benchmarks.shared.searches import activeflow, exhaustive
from coldpress.compiler.io import Workspace, load_arrays, save_arrays
from coldpress.compiler.quote.reference import kind_of
from coldpress.compiler.quote.sources import QuoteSource, find
from coldpress.compiler.search import Goal, Judged, Space
from coldpress.compiler.search.density import AllocationInputs
from coldpress.compiler.search.floor import Floor
from coldpress.compiler.search.judge import searched
from coldpress.compiler.search.settings import AllocateConfig
from coldpress.runtime.device_profiles.devices import load_device
from coldpress.runtime.dram.kv_cache import formats_of
from coldpress.runtime.routers import router_of
from coldpress.runtime.sparsity import used_experts
from coldpress.schemas.curves import Curves
from coldpress.schemas.errors import ColdpressError
from coldpress.schemas.families import WHOLE_MLP, activity_of, num_units
from coldpress.schemas.model import ModelSpec
from tests.support import planted
from tests.support._planted_tensors import config
from tests.support.widened import widen

SHAPE_CONTEXT, REAL_CONTEXT = 512, 128
"""Context lengths in tokens; a real model's is short so that its KV cache does not outweigh its weights."""
REAL = ("prose7m", "prose7m-relu", "stories260k", "tinystories656k", "tinystories656k-relu", "tinystories-mixtral-8x")
UNTIED = {"tie_word_embeddings": False, "torch_dtype": "float16"}
LLAMA_7B = config(planted.SHAPES["llama-2-7b"]) | UNTIED
WIDENED_TIMES, SUFFIX = 16, "-wide"
WIDE = f"prose7m{SUFFIX}"
"""prose7m with units of a 7B's bytes (tests/support/widened.py)."""
MIXTURE_MODEL = "tinystories-mixtral-8x"
MIXTURE = {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2, "hidden_act": "silu"}
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "llama-7b-shape": LLAMA_7B | {"hidden_act": "silu"},
    "relu-7b-shape": LLAMA_7B | {"hidden_act": "relu"},
    "mixtral-8x7b-shape": config(planted.SHAPES["mistral-7b"]) | UNTIED | MIXTURE,
}
"""Name -> config.json."""


@dataclass(frozen=True)
class Options:
    models: tuple[str, ...] = option(
        ("llama-7b-shape",),
        smoke=("relu-7b-shape",),
        full=(*SHAPES, *REAL),
        choices=(*SHAPES, *REAL, WIDE),
        help="models",
    )
    devices: tuple[str, ...] = option(
        ("pixel6", "iphone-a18"),
        smoke=("pixel6",),
        full=("pixel6", "oneplus12", "iphone-a18", "macbook-m1-max", "pc-high", "pc-low"),
        help="device profiles",
    )
    budgets: tuple[str, ...] = option(("50%",), full=("30%", "50%", "75%"), help="values of dram_budget=")
    floors: tuple[float, ...] = option((1.05,), full=(1.01, 1.02, 1.05), help="quality floors: values of max_ppl_ratio")
    formats: tuple[str, ...] = option(
        ("auto", "int4_group32"), smoke=("auto",), help="values of format=; auto searches every format"
    )
    densities: int = option(1, full=2, help="lowest densities of each selector that the sweep judges")
    caches: tuple[str, ...] = option(
        ("lfu", "lru", "static"),
        smoke=("static",),
        full=("lfu", "linked", "lru", "s3fifo", "static", "window"),
        help="cache policies that are candidates",
    )


class Plugin(Benchmark[Options]):
    keys = {
        "rows[].method": "selector that the default search takes",
        "rows[].format": "format that the default search takes",
        "rows[].cache": "cache policy that the default search takes",
        "rows[].routing?": "routing that the default search takes; null: the model's own",
        "rows[].density": "density that the default search takes",
        "rows[].token_s": "modelled seconds per token of the search's choice",
        "rows[].ratio_to_sweep": "token_s over the least of all candidates that sweep or search judged; at least 1",
        "rows[].over_dense": "modelled speed of the choice over that of the fastest dense run that keeps the floor",
        "rows[].over_greedy?": "modelled speed over that of ActiveFlow's choice, or dense if faster; null: none fits",
        "rows[].search_s": "seconds that the search takes on this machine",
        "rows[].num_judged": "number of candidates that the search judged",
        "rows[].num_swept": "number of candidates that the sweep judged",
        "num_refused": "cells whose DRAM budget holds no candidate; they have no row",
        "worst_ratio_to_sweep": "largest ratio_to_sweep",
        "median_seconds": "median of search_s",
        "gain_over_dense.median": "median of over_dense",
        "gain_over_dense.worst": "least over_dense",
        "gain_over_greedy.median?": "median of over_greedy, where it is known",
        "gain_over_greedy.worst?": "least over_greedy",
    }
    is_timing = True
    over = {"model": "models", "device": "devices", "budget": "budgets", "floor": "floors", "formats": "formats"}
    full_minutes = 600

    def measure(self, cell: Cell) -> Iterator[Row]:
        source = self.once(cell["model"], lambda: source_of(cell["model"], self.folder))
        device, work = load_device(cell["device"]), Workspace(self.folder, "plan")
        inputs = AllocationInputs(source.model, source.activations, device, work, None, 2, source.curves)
        asked = AllocateConfig(
            method="auto",
            format=cell["formats"],
            cache="auto",
            routing="auto",
            dram_budget=cell["budget"],
            context_length=min(
                SHAPE_CONTEXT if cell["model"] in SHAPES else REAL_CONTEXT, source.settings["context_length"]
            ),
        )
        started = time.perf_counter()
        found = searched(asked, inputs, Floor(source.curves, cell["floor"]), self._of_options)
        search_s = time.perf_counter() - started
        best, goal = found.best, Goal()
        if best is None:
            nearest = min(found.judged, key=lambda one: one.needed_bytes or sys.maxsize)
            print(f"no candidate fits: {nearest.refusal}", file=sys.stderr)
            return
        space = self._lowest(found.judge.space)
        swept, greedy = (search(space, found.judge, goal) for search in (exhaustive, activeflow))
        dense = [one for one in (*found.judged, *swept) if one.is_whole and one.refusal is None]
        routing = best.candidate.routing
        yield {
            "method": best.candidate.method,
            "format": str(best.candidate.format),
            "cache": best.candidate.cache,
            "routing": routing and f"{routing.routing}:{routing.strength:g}",
            "density": best.density,
            "token_s": best.token_s,
            "ratio_to_sweep": best.token_s / seconds_of(goal, [*swept, *found.judged]),
            "over_dense": min(one.token_s for one in dense) / best.token_s,
            "over_greedy": seconds_of(goal, greedy) / best.token_s if goal.best(greedy) else None,
            "search_s": search_s,
            "num_judged": len(found.judged),
            "num_swept": len(swept),
        }

    def _of_options(self, space: Space) -> Space:
        return replace(space, caches=tuple(cache for cache in space.caches if cache in self.options.caches))

    def _lowest(self, space: Space) -> Space:
        """Returns the sweep's space: the lowest densities of each selector, and the strongest routing."""
        lowest = replace(
            space,
            densities=lambda *of: space.densities(*of)[: self.options.densities],
            routings=lambda *of: space.routings(*of)[:1],
        )
        return self._of_options(lowest)

    def figures(self, rows: Rows) -> Figures:
        if not rows:
            raise ColdpressError("no budget holds what these models need before any unit is cached; raise --budgets")
        return {
            "num_refused": len(list(self.cells())) - len(rows),
            "worst_ratio_to_sweep": max(row["ratio_to_sweep"] for row in rows),
            "median_seconds": statistics.median(row["search_s"] for row in rows),
            **{
                f"gain_{name}": {"median": statistics.median(known), "worst": min(known)}
                for name in ("over_dense", "over_greedy")
                if (known := [row[name] for row in rows if row[name] is not None])
            },
        }


def seconds_of(goal: Goal, judged: Sequence[Judged]) -> float:
    """Returns the seconds of the best candidate."""
    best = goal.best(judged)
    assert best is not None
    return best.token_s


def source_of(model: str, folder: Path) -> QuoteSource:
    """Returns curves, trace and shapes: of a real model, calibrated and explored here, or of a shape's config."""
    scratch = folder / f"{model}-scratch"
    scratch.mkdir(parents=True, exist_ok=True)
    if model in SHAPES:
        (folder / model).mkdir(exist_ok=True)
        (folder / model / "config.json").write_text(json.dumps(SHAPES[model]), encoding="utf-8")
        found = find(str(folder / model), {}, scratch)
        shape = replace(found, curves=_as_its_kind(found.curves, found.model.spec))
        return routed_as(source_of(MIXTURE_MODEL, folder), shape, scratch) if shape.model.spec.is_mixture else shape
    asked = settings(model.removesuffix(SUFFIX))
    asked |= {"method": "auto", "preflight": "off", "evaluation_tokens": SHORT["evaluation_tokens"]}
    if model == WIDE:
        asked["model"] = widen(asked["model"], folder / f"{model}-checkpoint", WIDENED_TIMES)
    return find(str(build(folder / model, "explore", "device", **asked).parent), {}, scratch)


def _as_its_kind(curves: Curves, spec: ModelSpec) -> Curves:
    """Returns a shape's curves with the losses that a small model of its kind has."""
    kind = kind_of(spec)
    if kind is None:
        return curves
    measured = {one.method for one in (*kind.curves, *kind.unexplored)}
    others = (one for one in curves.unexplored if one.method not in measured)
    return curves.model_copy(
        update={
            "curves": kind.curves,
            "formats": kind.formats,
            "heads": (),
            "kv_caches": tuple(loss for loss in kind.kv_caches if loss.kv_cache in formats_of(spec)),
            "unexplored": (*kind.unexplored, *others),
        }
    )


def routed_as(real: QuoteSource, shape: QuoteSource, folder: Path) -> QuoteSource:
    """Returns a shape's source whose tokens use the experts, and have the router's scores, of a real mixture's traced
    layers in turn; the units of a token's experts keep their activity."""
    spec, (ours, theirs) = shape.model.spec, (load_arrays(one.curves.trace) for one in (shape, real))
    trace, router = dict(ours), router_of(spec)
    signal = activity_of(WHOLE_MLP, spec)
    for layer, donor in zip(shape.curves.trace_layers, cycle(real.curves.trace_layers)):
        activity = ours[f"{layer}.{signal}"].reshape(
            -1, spec.num_experts, num_units(WHOLE_MLP, spec) // spec.num_experts
        )
        scores = theirs[f"{donor}.router_scores"][: len(activity)]
        chosen, moved = router.choose(scores.astype(np.float32)), np.zeros_like(activity)
        moved[chosen] = activity[used_experts(ours[f"{layer}.{signal}"], spec.num_experts)]
        trace |= {f"{layer}.{signal}": moved.reshape(len(activity), -1), f"{layer}.router_scores": scores}
    kept = {"trace": save_arrays(folder / "routed.safetensors", trace), "routings": real.curves.routings}
    return replace(shape, curves=shape.curves.model_copy(update=kept))


if __name__ == "__main__":
    main("plan_search")
