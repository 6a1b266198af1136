"""Modelled device seconds of choices that know the flash, against top-k, at equal perplexity on test text.

The inputs of all matrices of the MLP are pruned. There are as many units as the model has, each of the size that it has
in a 7B (hidden 4096, inner 11008) in int4; each layer keeps a share of them in an LRU cache that begins empty, or none.
Reads are the runtime's planner's, seconds the device's. `top-k` collapses reads over the gap, of four, that takes least
on validation text; `use_read_units` has the same reads and computes with all they bring; `greedy` takes contiguous
chunks by importance over seconds, after the description of Neuron Chunking (2511.18692); `flash` is the product's
selector with one density for all layers; `by loss` the same with the densities of `density_allocation=greedy`, from
which prices per layer and family follow. A curve has one point per density; between points milliseconds are linear in
log perplexity, and all are held to top-k's perplexity at two densities.
"""

import dataclasses
import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.harness import Benchmark, Cell, Figures, Row, Rows, main, option
from benchmarks.harness.places import ROOT
from benchmarks.shared.cases import WITH_MIXTURES
from benchmarks.shared.flash_curves import Curve, TopK, flash_curve, greedy_curve, topk_curves
from benchmarks.shared.flash_setting import UNIT_BYTES, Orders, Setting, known_of, top_k
from coldpress.compiler.profiles import load_device
from coldpress.compiler.stages.order import ripple
from tests.support.statistics import task_of

METHODS: Mapping[str, Callable[[Setting], Curve]] = {
    "greedy": greedy_curve,
    "flash": lambda setting: flash_curve(setting, by_loss=False),
    "by loss": lambda setting: flash_curve(setting, by_loss=True),
}
ORDERS = ("structural", "coactivation")
"""The model's own, and Ripple's Algorithm 1 on what top-k at half of the units uses of calibration text."""
PLAIN = ("top-k", "use_read_units")
CURVES = (*PLAIN, *METHODS)
OURS = {"use_read_units": "_use_read_units", "flash": "", "by loss": "_by_loss"}
"""Curve -> the end of the names of its gains."""
OVER = {"top-k": "topk", "greedy": "greedy"}
EQUAL_TO = (0.5, 0.3)
"""Densities of top-k whose perplexity the others are held to."""


def ms_at(curve: Curve, ppl: float, what: str) -> float:
    """Milliseconds where a curve has that perplexity; NaN outside of it."""
    points = sorted((math.log(row["ppl"]), row[what]) for row in curve)
    x, y = zip(*points, strict=True)
    return float(np.interp(math.log(ppl), x, y)) if x[0] <= math.log(ppl) <= x[-1] else math.nan


class Prepared:
    """A model, top-k's masks of it, and the orders that were made so far."""

    def __init__(self, name: str, folder: Path, blocks: int) -> None:
        self.known = known_of(name, folder, blocks)
        self.masks = TopK(self.known)
        self._settings: dict[tuple[str, int, str], Setting] = {}

    def setting(self, device: str, groups: int, order: str) -> Setting:
        """How units lie and are read, without a cache."""
        if (device, groups, order) not in self._settings:
            profile = load_device(ROOT / "profiles/devices" / f"{device}.yaml")
            self._settings[device, groups, order] = Setting(self.known, profile, groups, self._orders(order))
        return self._settings[device, groups, order]

    def _orders(self, order: str) -> Orders:
        if order == "structural":
            return {key: np.arange(norms.size) for key, norms in self.known.norms.items()}
        tasks = {
            key: task_of(top_k(signal, 0.5).T, unit_bytes=UNIT_BYTES[key[1]])
            for key, signal in self.known.signals.items()
        }
        return {key: ripple.Plugin().arrange(task).order for key, task in tasks.items()}


def compared(setting: Setting, masks: TopK, methods: Sequence[str]) -> Iterator[Row]:
    """A row per perplexity: milliseconds of every method, and of a dense run in the same DRAM."""
    curves: dict[str, Curve] = dict(zip(PLAIN, topk_curves(setting, masks), strict=True))
    curves |= {name: METHODS[name](setting) for name in methods}
    for density in EQUAL_TO:
        ppl = masks.ppl[density]
        row = {"density": density, "ppl": ppl, "dense_token_ms": setting.dense_ms}
        row |= {name: ms_at(curve, ppl, "ms") for name, curve in curves.items()}
        yield row | {"token_ms": {name: ms_at(curve, ppl, "token_ms") for name, curve in curves.items()}}


def gains(rows: Rows, over: str, ours: str) -> list[float]:
    """Seconds of a method over ours, where both curves reach the perplexity."""
    found = ((row.get(over), row.get(ours)) for row in rows)
    return [before / after for before, after in found if before is not None and after is not None]


def summary(rows: Rows) -> Row:
    """Gains of all rows; `_token`: of whole requests, not of their reads alone."""
    found: Row = {}
    whole = [row | row["token_ms"] for row in rows]
    for (ours, suffix), over, (measured, unit) in itertools.product(
        OURS.items(), OVER, ((rows, ""), (whole, "_token"))
    ):
        gained = gains(measured, over, ours)
        name = f"gain_over_{OVER[over]}{suffix}{unit}"
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
        help="models",
    )
    devices: tuple[str, ...] = option(("pixel6",), full=("pixel6", "infinix-zero30"), help="device profiles")
    orders: tuple[str, ...] = option(
        ("structural",), smoke=("coactivation",), full=ORDERS, choices=ORDERS, help="orders on flash"
    )
    groups: tuple[int, ...] = option((1,), full=(1, 4), help="layers that lie together")
    methods: tuple[str, ...] = option(
        ("greedy", "flash"),
        smoke=("flash",),
        full=tuple(METHODS),
        choices=METHODS,
        help="beside top-k; by loss takes longest",
    )
    slots: tuple[float, ...] = option((0.0,), full=(0.0, 1 / 3), help="shares of the units that an LRU cache keeps")
    blocks: int = option(2, smoke=1, full=4, help="blocks of 256 tokens of test text")


class Plugin(Benchmark[Options]):
    keys = {
        "rows[].model": "model",
        "rows[].device": "device profile",
        "rows[].groups": "layers that lie together",
        "rows[].order": "order of the units on flash",
        "rows[].slots": "share of the units that an LRU cache keeps",
        "rows[].density": "density of top-k",
        "rows[].ppl": "its perplexity, which all are held to",
        "rows[].dense_token_ms": "milliseconds of a dense token in the same DRAM",
        **{f"rows[].{name}?": f"milliseconds of a token's reads, {name}; null: out of reach" for name in CURVES},
        **{f"rows[].token_ms.{name}?": f"milliseconds of a token's requests, {name}" for name in CURVES},
        **{
            f"{figure}_gain_over_{OVER[over]}{suffix}{unit}{mark}": f"{meaning} of {ours} over {over}{of}"
            for (ours, suffix), over in itertools.product(OURS.items(), OVER)
            for unit, of in (("", ", reads"), ("_token", ", requests"))
            for figure, meaning, mark in (
                ("median", "median gain", "?"),
                ("worst", "worst gain", "?"),
                ("num", "number of gains", ""),
            )
        },
    }
    needs_data = True
    full_minutes = 480

    def cells(self) -> Iterator[Cell]:
        options = self.options
        for model, device, groups, order, slots in itertools.product(
            options.models, options.devices, options.groups, options.orders, options.slots
        ):
            if groups == 1 or order == "structural":  # a group has one order for all its layers
                yield {"model": model, "device": device, "groups": groups, "order": order, "slots": slots}

    def measure(self, cell: Cell) -> Iterator[Row]:
        """A row per perplexity."""
        name, options = cell["model"], self.options
        at = self.once(name, lambda: Prepared(name, self.folder / name, options.blocks))
        setting = at.setting(cell["device"], cell["groups"], cell["order"])
        yield from compared(dataclasses.replace(setting, slots=cell["slots"]), at.masks, options.methods)

    def figures(self, rows: Rows) -> Figures:
        return summary(rows)


if __name__ == "__main__":
    main("flash_selection")
