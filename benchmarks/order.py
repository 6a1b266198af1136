"""Measures the worth of each order of flash, in modelled seconds on text that it was not made from, and its cost.

Orders are fitted on calibration text (its end decides `auto` and the collapse gap) and counted on later parts of the
same text and on another one, for several devices and formats, with the same pinned units and the same cache: DRAM for
three eighths of the units, about as many as fit where half of a 7B model's size is left for them; half of it for the
hottest, half for the runtime's lru cache. A case is a section of a model on a device in a format on a text; gain =
device seconds of ripple over device seconds of auto, each under its best gap; `headroom` leaves out cases where no
order at all could gain 5 %. `times` are of one layer in int4 on the first device on one core, times the layers of a
core, given the counts of pairs; counting is reported separately. Language models that anyone can have, small models of
this project and planted layers have figures of their own.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np

from benchmarks.harness import Benchmark, Cell, Figures, Row, Rows, interleaved, main, option, spread
from benchmarks.shared.cache_traces import PLANTED
from benchmarks.shared.order_sources import SOURCES, Source, Text, sources_of
from benchmarks.shared.real_models import MODELS
from coldpress.compiler.activity.packed_bits import adjacent_share, population
from coldpress.compiler.cost_model import unit_bytes
from coldpress.compiler.stages.order import auto, ripple
from coldpress.compiler.stages.order._task import (
    Activity,
    Arranged,
    Demand,
    Heuristic,
    OrderTask,
    least_seconds,
    modelled,
)
from coldpress.runtime.device_profiles.devices import load_device
from coldpress.runtime.plugins import load
from coldpress.schemas.device import DeviceProfile
from coldpress.schemas.families import FormatName

BASELINES = ("structural", "frequency", "ripple", "closest_friend", "misses")
ORDERS = (*BASELINES, "auto")
PINNED_SHARE = CACHED_SHARE = 3 / 16
HEADROOM = 1.05
"""Least ratio of ripple's time to the least that any order could take; below it no gain of 1.05 is possible."""
MODEL_LAYERS, CORES = 32, 2
KINDS = ("real", "small", "planted")
CASE = ("model", "family", "density", "device", "format", "text")
TIMED = ("counting", "ripple", "ours")


@dataclass(frozen=True)
class Fitted:
    """An order, the heuristic that `auto` took it from, and its best collapse gap."""

    name: str
    chosen: str
    order: np.ndarray
    gap_bytes: int


def demand_of(source: Source, text: Text) -> Demand:
    """Returns the reads that a text asks of flash, given the fitted text's pinned units; the same for any device."""
    num_units = len(source.fit.bits)
    pinned = np.zeros((1, num_units), bool)
    pinned[0, np.argsort(-population(source.fit.bits), kind="stable")[: round(PINNED_SHARE * num_units)]] = True
    return Demand(
        activity=Activity(text.bits, text.num_tokens, threads=CORES),
        pinned=pinned,
        cache="lru",
        cache_slots=(round(CACHED_SHARE * num_units),),
        search_tokens=4096,
    )


def rows_of(source: Source, device_names: Sequence[str], formats: Sequence[FormatName]) -> Iterator[Row]:
    """Yields a row per order, device, format and text."""
    devices = [load_device(name) for name in device_names]
    demand = demand_of(source, source.fit)  # counts once for all devices
    fixed = {name: arranged(name, OrderTask(demand, 1, devices[0].flash)) for name in BASELINES}
    later = {name: later_reads(source, text) for name, text in source.tests.items()}
    for device, format_name in itertools.product(devices, formats):
        task = OrderTask(demand, unit_bytes(source.family, source.spec, format_name), device.flash)
        orders = {name: Arranged(found.order, name) for name, found in fixed.items()}
        orders["auto"] = arranged("auto", task)
        for name, (order, chosen) in orders.items():
            fitted = Fitted(name, chosen, order, task.judge(order).gap_bytes)
            for text, reads in later.items():
                yield row_of(source, device, format_name, fitted, text, reads)


def arranged(name: str, task: OrderTask) -> Arranged:
    """Returns the order that a heuristic gives for a task."""
    return load("coldpress.compiler.stages.order", Heuristic, name).arrange(task)


def later_reads(source: Source, text: Text) -> Text:
    """Returns the reads in the second half of a text; the first half warms up the cache."""
    reads = demand_of(source, text).missed.bits
    half = text.num_tokens // 16
    return Text(np.ascontiguousarray(reads[:, half:]), text.num_tokens - 8 * half)


def row_of(
    source: Source, device: DeviceProfile, format_name: FormatName, fitted: Fitted, text: str, reads: Text
) -> Row:
    """Returns the cost of an order on a text, per token of one layer."""
    size_bytes = unit_bytes(source.family, source.spec, format_name)
    gaps = np.array([fitted.gap_bytes])
    (cost,) = modelled(reads.bits, reads.num_tokens, fitted.order, size_bytes, device.flash, gaps)
    return named(source) | {
        "device": device.name,
        "format": format_name,
        "text": text,
        "order": fitted.name,
        "chosen": fitted.chosen,
        "adjacent_weight": adjacent_share(source.tests[text].bits[fitted.order]),
        "reads": cost.reads,
        "read_bytes": cost.read_bytes,
        "ms": 1e3 * cost.seconds,
        "least_ms": 1e3 * least_seconds(reads.bits, reads.num_tokens, size_bytes, device.flash),
    }


def named(source: Source) -> Row:
    """Returns the names of a section and its model."""
    return {"model": source.model, "family": source.family, "density": source.density}


def gains(rows: Rows, order: str) -> dict[tuple[str, ...], float]:
    """Returns milliseconds of ripple over milliseconds of `order`, by case; 1 where neither reads anything."""
    ripples = {case_of(row): row["ms"] for row in rows if row["order"] == "ripple"}
    return {
        case_of(row): ripples[case_of(row)] / row["ms"] if row["ms"] else 1.0 for row in rows if row["order"] == order
    }


def kind_of(source: str) -> str:
    return "real" if source in MODELS else "planted" if source in PLANTED else "small"


def summary(rows: Rows) -> tuple[dict[str, dict[str, float]], int, int, float | None]:
    """Returns each order's gains, the number of cases, of those with headroom, and their median gain of `auto`."""
    by_order = {order: gains(rows, order) for order in ORDERS}
    ripples = [row for row in rows if row["order"] == "ripple"]
    with_headroom = [by_order["auto"][case_of(row)] for row in ripples if row["ms"] > HEADROOM * row["least_ms"]]
    spreads = {
        order: {"worst": min(each.values()), "median": median(each.values()), "best": max(each.values())}
        for order, each in by_order.items()
    }
    return spreads, len(ripples), len(with_headroom), median(with_headroom) if with_headroom else None


def case_of(row: Row) -> tuple[str, ...]:
    """Returns the names of the case that a row belongs to."""
    return tuple(row[name] for name in CASE)


def layer_times(source: Source, device: str, rounds: int) -> dict[str, list[float]]:
    """Returns the seconds of one layer in every round, on one core as in a job of the stage."""
    flash, size_bytes = load_device(device).flash, unit_bytes(source.family, source.spec, "int4_group32")
    task: OrderTask

    def count() -> None:
        nonlocal task
        demand = demand_of(source, source.fit)
        task = OrderTask(replace(demand, activity=replace(demand.activity, threads=1)), size_bytes, flash)
        _ = task.demand.activity.counts, task.demand.fitting.activity.counts

    works: dict[str, Callable[[], object]] = {
        "counting": count,
        "ripple": lambda: ripple.Plugin().arrange(task),
        "ours": lambda: auto.Plugin().arrange(task),
    }
    return interleaved(works, rounds)


@dataclass(frozen=True)
class Options:
    sources: tuple[str, ...] = option(
        ("planted-10%", "prose7m-relu", *MODELS[:2]),
        smoke=("tinystories656k-relu",),
        full=SOURCES,
        choices=SOURCES,
        help="planted layers and real models whose units are ordered",
    )
    devices: tuple[str, ...] = option(("pixel6", "oneplus12", "iphone-a18"), smoke=("pixel6",), help="device profiles")
    formats: tuple[FormatName, ...] = option(("fp16", "int4_group32"), smoke=("int4_group32",), help="weight formats")
    timed: str = option("planted-10%", smoke="tinystories656k-relu", choices=SOURCES, help="source of the timed orders")
    rounds: int = option(5, smoke=1, help="timed rounds")


class Plugin(Benchmark[Options]):
    keys = {
        "rows[].part": "orders: costs of each order; times: seconds to find orders (ours: auto)",
        "rows[].model": "model, as it is or with units of a 7B's size",
        "rows[].family": "family of units",
        "rows[].density": "share of the units that are active, in percent",
        "rows[].device?": "device profile",
        "rows[].format?": "format of the weights",
        "rows[].text?": "same: more of the text that orders are fitted on; other: another corpus",
        "rows[].order?": "order of units on flash",
        "rows[].chosen?": "heuristic that gave the order; for auto the one that it took",
        "rows[].adjacent_weight?": "share of uses of units in which the same token also uses a neighbour on flash",
        "rows[].reads?": "reads from flash per token in the layer's family",
        "rows[].read_bytes?": "bytes read from flash per token in the layer's family",
        "rows[].ms?": "modelled milliseconds of these reads, joined over the gap that was best on calibration text",
        "rows[].least_ms?": "modelled milliseconds if the units that each token reads lay side by side, in one read",
        **{f"rows[].{name}_s?": f"seconds of {MODEL_LAYERS} layers on {CORES} cores: {name}" for name in TIMED},
        **{f"{name}_s_{MODEL_LAYERS}_layers": f"spread of {name}_s over the rounds" for name in TIMED},
        "gain_of.*.*.worst": "milliseconds of ripple over those of an order, each under its best gap: least of a kind",
        "gain_of.*.*.median": "milliseconds of ripple over those of an order: median of a kind of source",
        "gain_of.*.*.best": "milliseconds of ripple over those of an order: largest of a kind of source",
        "cases.*": "number of cases by kind of source: section, device, format and text",
        "headroom_cases.*": "cases in which some order could be more than 5 % faster than ripple",
        "headroom_median_gain.*?": "milliseconds of ripple over those of auto, median of headroom cases",
    }
    is_timing = True
    needs_data = True
    over = ({"source": "timed", "part": ("times",)}, {"source": "sources", "part": ("orders",)})
    full_minutes = 25

    def measure(self, cell: Cell) -> Iterator[Row]:
        """Yields the rows of one part."""
        name = cell["source"]
        sources = self.once(name, lambda: sources_of(name, self.folder / name))
        if cell["part"] == "times":
            yield from self.times(sources[0])
            return
        for source in sources:
            yield from rows_of(source, self.options.devices, self.options.formats)

    def times(self, source: Source) -> Iterator[Row]:
        """Yields a row per round with the seconds of all layers, shared by the cores."""
        found = layer_times(source, self.options.devices[0], self.options.rounds)
        for values in zip(*found.values(), strict=True):
            yield named(source) | {
                f"{name}_s": MODEL_LAYERS / CORES * value for name, value in zip(found, values, strict=True)
            }

    def figures(self, rows: Rows) -> Figures:
        times = [row for row in rows if row["part"] == "times"]
        orders = [row for row in rows if row["part"] == "orders"]
        found: Figures = {
            f"{name}_s_{MODEL_LAYERS}_layers": spread([row[f"{name}_s"] for row in times]) for name in TIMED
        }
        names = ("gain_of", "cases", "headroom_cases", "headroom_median_gain")
        found |= {name: {} for name in names}
        for kind in KINDS:
            if of_kind := [row for row in orders if kind_of(row["source"]) == kind]:
                for name, value in zip(names, summary(of_kind), strict=True):
                    found[name][kind] = value
        return found


if __name__ == "__main__":
    main("order")
