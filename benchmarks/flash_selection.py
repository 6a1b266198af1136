"""Compares modelled device seconds of choices that know the flash with top-k's, at equal perplexity on test text.

The inputs of all matrices of the MLP are pruned; each layer keeps a share of its units in an LRU cache that begins
empty, or none. The runtime's planner makes the reads, the device's law their seconds. `top-k` collapses reads over the
gap, of four, that takes least on validation text; `use_read_units` has the same reads and computes with all units that
they bring; `flash` is the product's selector with one density for all layers. A curve has one point per density;
between points milliseconds are linear in log perplexity. All choices must match top-k's perplexity at two densities.
"""

import itertools
import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.evaluation.evaluate import Sparse, evaluate
from benchmarks.evaluation.reads import Reading
from benchmarks.harness import Benchmark, Cell, Figures, Row, Rows, main, option
from benchmarks.shared.cases import WITH_MIXTURES
from benchmarks.shared.flash_setting import (
    FAMILIES_PRUNED,
    UNIT_BYTES,
    Known,
    Orders,
    Setting,
    at_ppl,
    known_of,
)
from coldpress.compiler.stages.order import ripple
from coldpress.runtime.profiles.devices import load_device
from coldpress.runtime.sparsity import topk
from tests.support.statistics import task_of

ORDERS = ("structural", "coactivation")
"""The model's own order, and Ripple's Algorithm 1 on the units that top-k at half of them uses of calibration text."""
TOPK, ALONG, FLASH = CURVES = ("top-k", "use_read_units", "flash")
OURS = {ALONG: "_use_read_units", FLASH: ""}
"""Curve -> suffix of the names of its gains over top-k."""
EQUAL_TO = (0.5, 0.3)
"""Densities of top-k whose perplexity the others must match."""
GAPS = (0.0, 0.25, 0.5, 1.0)
"""Shares of the break-even gap; the best one at the first of EQUAL_TO is taken."""
TOPK_DENSITIES = (0.2, 0.3, 0.4, 0.5, 0.6)
FLASH_DENSITIES = (0.25, 0.35, 0.45, 0.6, 0.75)
LOW_DENSITIES = (0.1, 0.2)
"""Further densities of `flash` with a cache, whose units it uses besides."""
Point = dict[str, float]
"""Perplexity, and milliseconds of a token's reads (`ms`) and of its requests, computing included (`token_ms`)."""


def point(setting: Setting, split: str, num_blocks: int, sparse: Sparse, reading: Reading) -> Point:
    """Evaluates a choice on the first blocks of a text."""
    tokens = setting.known.case.splits[split][:num_blocks]
    cache = setting.cache() if setting.slots else None
    found = evaluate(setting.known.case.stream, tokens, sparse, cache, reading=reading)
    return {"ppl": found.ppl, "ms": 1e3 * found.flash_s / tokens.size, "token_ms": 1e3 * found.request_s / tokens.size}


def top_k(known: Known, density: float) -> Sparse:
    """Fits top-k at a share of the units that a token may use."""
    selector = topk.Plugin()
    arrays = {
        key: selector.fit(norms.size, known.used * density, {}, topk.Options()) for key, norms in known.norms.items()
    }
    return Sparse(selector, FAMILIES_PRUNED, arrays)


def curves_of(setting: Setting, num_blocks: int) -> dict[str, list[Point]]:
    """Returns the curves of CURVES, in their order; those of top-k cover TOPK_DENSITIES."""
    half, even = top_k(setting.known, EQUAL_TO[0]), setting.flash.break_even_gap_bytes
    gap = min(
        (share * even for share in GAPS),
        key=lambda gap: point(setting, "validation", num_blocks, half, setting.reading(gap, False))["ms"],
    )
    choices = [top_k(setting.known, density) for density in TOPK_DENSITIES]
    found = {
        name: [point(setting, "test", num_blocks, choice, setting.reading(gap, name == ALONG)) for choice in choices]
        for name in (TOPK, ALONG)
    }
    densities, reading = FLASH_DENSITIES, setting.reading(setting.kept_together, True)
    densities = (*LOW_DENSITIES, *densities) if setting.slots else densities
    ours = [point(setting, "test", num_blocks, setting.flash_selector(density), reading) for density in densities]
    return found | {FLASH: ours}


def compared(setting: Setting, num_blocks: int) -> Iterator[Row]:
    """Yields a row per perplexity: milliseconds of every choice, and of a dense run in the same DRAM."""
    curves = curves_of(setting, num_blocks)

    def at(ppl: float, what: str) -> Row:
        return {name: at_ppl([(point["ppl"], point[what]) for point in curve], ppl) for name, curve in curves.items()}

    for density in EQUAL_TO:
        ppl = curves[TOPK][TOPK_DENSITIES.index(density)]["ppl"]
        row = {"density": density, "ppl": ppl, "dense_token_ms": setting.dense_ms}
        yield row | at(ppl, "ms") | {"token_ms": at(ppl, "token_ms")}


def summary(rows: Rows) -> Row:
    """Returns gains over top-k, where both curves reach the perplexity; `_token` covers whole requests."""
    found: Row = {}
    for (ours, suffix), unit in itertools.product(OURS.items(), ("", "_token")):
        pairs = [(at.get(TOPK), at.get(ours)) for at in (row["token_ms"] if unit else row for row in rows)]
        gained = [before / after for before, after in pairs if before is not None and after is not None]
        name = f"gain_over_topk{suffix}{unit}"
        found |= {f"median_{name}": statistics.median(gained) if gained else None}
        found |= {f"worst_{name}": min(gained, default=None), f"num_{name}": len(gained)}
    return found


@dataclass(frozen=True)
class Options:
    models: tuple[str, ...] = option(
        ("prose7m",),
        smoke=("stories260k",),
        full=("prose7m", "tinystories656k", "stories260k"),
        choices=WITH_MIXTURES,
        help="models to prune",
    )
    devices: tuple[str, ...] = option(("pixel6",), full=("pixel6", "infinix-zero30"), help="device profiles")
    orders: tuple[str, ...] = option(
        ("structural",), smoke=("coactivation",), full=ORDERS, choices=ORDERS, help="orders of units on flash"
    )
    groups: tuple[int, ...] = option((1,), full=(1, 4), help="consecutive layers whose units lie together on flash")
    slots: tuple[float, ...] = option((0.0,), full=(0.0, 1 / 3), help="share of the units in an LRU cache; 0: no cache")
    blocks: int = option(2, smoke=1, full=4, help="blocks of 256 tokens of validation and of test text")


class Plugin(Benchmark[Options]):
    keys = {
        "rows[].density": "density of top-k whose perplexity the others match",
        "rows[].ppl": "perplexity of top-k at this density",
        "rows[].dense_token_ms": "modelled milliseconds per token of a dense run in the same DRAM",
        "rows[].model": "model",
        "rows[].order": "order of units on flash",
        "rows[].device": "device profile",
        "rows[].groups": "consecutive layers whose units lie together on flash",
        "rows[].slots": "share of the units that an LRU cache holds",
        **{f"rows[].{name}?": f"milliseconds of reads per token, {name}; null: ppl not reached" for name in CURVES},
        **{f"rows[].token_ms.{name}?": f"milliseconds of reading and computing, {name}" for name in CURVES},
        **{
            f"{figure}_gain_over_topk{suffix}{unit}{mark}": f"{meaning} of {ours} over top-k in milliseconds of {of}"
            for ours, suffix in OURS.items()
            for unit, of in (("", "reads"), ("_token", "requests"))
            for figure, meaning, mark in (
                ("median", "median gain", "?"),
                ("worst", "worst gain", "?"),
                ("num", "number of gains", ""),
            )
        },
    }
    needs_data = True
    full_minutes = 240

    def cells(self) -> Iterator[Cell]:
        options = self.options
        for model, order, device, groups, slots in itertools.product(
            options.models, options.orders, options.devices, options.groups, options.slots
        ):
            if groups == 1 or order == "structural":  # a group has one order for all its layers
                yield {"model": model, "order": order, "device": device, "groups": groups, "slots": slots}

    def measure(self, cell: Cell) -> Iterator[Row]:
        """Yields a row per perplexity."""
        known, orders = self.once((cell["model"], cell["order"]), lambda: self._prepared(cell["model"], cell["order"]))
        setting = Setting(known, load_device(cell["device"]), cell["groups"], orders, cell["slots"])
        yield from compared(setting, self.options.blocks)

    def _prepared(self, name: str, order: str) -> tuple[Known, Orders]:
        known = known_of(name, self.folder / f"{name}-{order}")
        if order == "structural":
            return known, known.structural
        selector, half = topk.Plugin(), top_k(known, 0.5).arrays
        tasks = {
            key: task_of(selector.select_many(signal, half[key]).T, unit_bytes=UNIT_BYTES[key[1]])
            for key, signal in known.signals.items()
        }
        return known, {key: ripple.Plugin().arrange(task).order for key, task in tasks.items()}

    def figures(self, rows: Rows) -> Figures:
        return summary(rows)


if __name__ == "__main__":
    main("flash_selection")
