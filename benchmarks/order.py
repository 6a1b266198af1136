"""What each order of flash is worth in modelled seconds on text it was not made from, and what finding it takes.

`python -m benchmarks.order [--sources planted real] [--no-timing]`. Fitted on calibration text (`auto` and the
collapse gap are decided on its end), counted on the same text further on and on another one, for a phone and a PC, fp16
and int4, given the same pinned units and the same cache: DRAM for three eighths of the units, about what half of a 7B
model's size leaves for them, half of it for the hottest, half for the runtime's lru cache. A case is a section of a
model on a device in a format on a text; gain = device seconds of ripple over those of auto, each under the gap that
suits it; `over_break_even` is that of ripple under the gap of peak bandwidth over IOPS, and `headroom` leaves out cases
where no order at all could gain HEADROOM. The times are of planted layers, a job on each of two cores, given the counts
of pairs; counting is reported beside them.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from statistics import median
from typing import Any

import numpy as np

from benchmarks.shared.order_sources import AS_A_7B, Source, Text, planted_sources, real_sources
from benchmarks.shared.report import finish, show
from coldpress.compiler.activity.packed_bits import adjacent_share, population
from coldpress.compiler.cost_model import unit_bytes
from coldpress.compiler.profiles import load_device
from coldpress.compiler.stages.order import auto, ripple
from coldpress.compiler.stages.order._coactivation import dense_pair_counts, sparse_pair_counts
from coldpress.compiler.stages.order._seconds import least_seconds, modelled
from coldpress.compiler.stages.order._task import Activity, Arranged, Demand, Heuristic, Task
from coldpress.compiler.stages.order.closest_friend import closest_friends
from coldpress.runtime.plugins import load
from coldpress.schemas.device import DeviceProfile
from coldpress.schemas.families import FormatName
from tests.support.data import ROOT

BASELINES = ("structural", "frequency", "ripple", "jaccard", "lift", "closest_friend", "cold", "misses")
DEPENDS_ON_FLASH = ("collapse", "auto")
ORDERS = (*BASELINES, *DEPENDS_ON_FLASH)
DEVICES = ("pixel6", "pc-high")
FORMATS: tuple[FormatName, ...] = ("fp16", "int4_group32")
SOURCES: dict[str, Callable[[], Iterator[Source]]] = {"planted": planted_sources, "real": real_sources}
PINNED_SHARE = CACHED_SHARE = 3 / 16
HEADROOM = 1.05
"""Ripple's time over the least that any order could take, from which a gain of 1.05 is possible at all."""
CORES = 2
MODEL_LAYERS = 32
FRIEND_COLUMNS = ("source", "bundles per unit: same", "other", "units with a friend in DRAM")
COLUMNS = ("source", "device", "format", "text", "order", "adjacent", "reads", "KiB", "ms", "ms at break-even", "gain")


@dataclass(frozen=True)
class Row:
    """One order in one case, per token of one layer."""

    model: str
    family: str
    density: str
    device: str
    format: str
    text: str
    order: str
    adjacent_weight: float
    """Share of activations beside another."""
    reads: float
    read_bytes: float
    ms: float
    """Under the collapse gap that was best at the end of the calibration text."""
    ms_break_even: float
    least_ms: float
    """What no order beats: each token's units side by side, in one read."""
    chosen: str
    """Whose order it is."""

    @property
    def case(self) -> tuple[str, ...]:
        """What is compared."""
        return (self.model, self.family, self.density, self.device, self.format, self.text)


@dataclass(frozen=True)
class Fitted:
    """An order, the heuristic that `auto` took it from, and the collapse gap that was best for it."""

    name: str
    chosen: str
    order: np.ndarray
    gap_bytes: int


def demand_of(source: Source, text: Text) -> Demand:
    """What flash is read for on a text, with what the fitted text pins; the same for any device."""
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


def rows_of(source: Source) -> Iterator[Row]:
    """All orders on all devices, formats and texts."""
    devices = [load_device(ROOT / "profiles" / "devices" / f"{name}.yaml") for name in DEVICES]
    demand = demand_of(source, source.fit)  # counts once what all devices share
    base = Task(demand, 1, devices[0].flash)
    fixed = {name: load("coldpress.compiler.stages.order", Heuristic, name).arrange(base).order for name in BASELINES}
    later = {name: later_reads(source, text) for name, text in source.tests.items()}
    for device in devices:
        for format_name in FORMATS:
            task = Task(demand, unit_bytes(source.family, source.spec, format_name), device.flash)
            orders = {name: Arranged(order, name) for name, order in fixed.items()}
            orders |= {
                name: load("coldpress.compiler.stages.order", Heuristic, name).arrange(task)
                for name in DEPENDS_ON_FLASH
            }
            for name, (order, chosen) in orders.items():
                fitted = Fitted(name, chosen, order, task.judge(order).gap_bytes)
                for text, reads in later.items():
                    yield row_of(source, device, format_name, fitted, text, reads)


def later_reads(source: Source, text: Text) -> Text:
    """What flash is read for in the second half of a text; the cache is warmed up on the first."""
    reads = demand_of(source, text).missed.bits
    half = text.num_tokens // 16
    return Text(np.ascontiguousarray(reads[:, half:]), text.num_tokens - 8 * half)


def row_of(
    source: Source, device: DeviceProfile, format_name: FormatName, fitted: Fitted, text: str, reads: Text
) -> Row:
    """What an order costs on a text."""
    size_bytes = unit_bytes(source.family, source.spec, format_name)
    even = device.flash.break_even_gap_bytes
    gaps = np.array(sorted({fitted.gap_bytes, even}))
    costs = modelled(reads.bits, reads.num_tokens, fitted.order, size_bytes, device.flash, gaps)
    by_gap = {cost.gap_bytes: cost for cost in costs}
    cost = by_gap[fitted.gap_bytes]
    return Row(
        model=source.model,
        family=source.family,
        density=source.density,
        device=device.name,
        format=format_name,
        text=text,
        order=fitted.name,
        adjacent_weight=adjacent_share(source.tests[text].bits[fitted.order]),
        reads=cost.reads,
        read_bytes=cost.read_bytes,
        ms=1e3 * cost.seconds,
        ms_break_even=1e3 * by_gap[even].seconds,
        least_ms=1e3 * least_seconds(reads.bits, reads.num_tokens, size_bytes, device.flash),
        chosen=fitted.chosen,
    )


def friend_bundles(source: Source) -> list[object]:
    """LLM in a flash's own way (D), each unit stored with a copy of its closest friend and read with it: a table line.

    Per text, bundles read for each unit that is needed: 1 if no friend ever helps, 0.5 if every one does, at twice the
    bytes each. And the units whose friend is in DRAM already.
    """
    demand = demand_of(source, source.fit)
    friends = closest_friends(demand.activity.counts)
    found: list[object] = [f"{source.model} {source.family} {source.density}"]
    for text in source.tests.values():
        reads = later_reads(source, text)
        bundles = needed = 0
        for active in np.unpackbits(reads.bits, axis=1, bitorder="little").T:
            loaded = np.zeros(friends.size, bool)
            for unit in np.flatnonzero(active):
                if not loaded[unit]:
                    loaded[[unit, friends[unit]]] = True
                    bundles += 1
                needed += 1
        found.append(bundles / needed if needed else 0.0)
    return [*found, float(demand.pinned[0, friends].mean())]


def gains(rows: list[Row], order: str, key: str = "ms") -> dict[tuple[str, ...], float]:
    """Seconds (`key`) of ripple over those of `order`, by case; 1 where neither reads anything."""
    ripples = {row.case: getattr(row, key) for row in rows if row.order == "ripple"}
    return {row.case: ripples[row.case] / row.ms if row.ms else 1.0 for row in rows if row.order == order}


def compile_loops(task: Task) -> None:
    """Calls on some of the units whatever an order may need: a process compiles once, not once per layer."""
    demand, units = task.demand, 2048
    activity = replace(demand.activity, bits=demand.activity.bits[:units])
    few = replace(demand, activity=activity, pinned=demand.pinned[:, :units], cache_slots=(512,))
    for found in (few.activity, few.missed):
        dense_pair_counts(found.bits, found.num_tokens)
        sparse_pair_counts(found.bits, found.num_tokens)
    for name in ("ripple", "collapse", "auto"):
        load("coldpress.compiler.stages.order", Heuristic, name).arrange(replace(task, demand=few))


def layer_times(seed: int) -> dict[str, float]:
    """Seconds for one layer of Mistral-7B's size, in int4 on a phone, on one core, as in a job of the stage."""
    flash = load_device(ROOT / "profiles" / "devices" / f"{DEVICES[0]}.yaml").flash
    source = next(found for found in planted_sources() if found.density == "10%")
    size_bytes = unit_bytes(source.family, source.spec, "int4_group32")
    demand = demand_of(source, source.fit)
    demand = replace(demand, activity=replace(demand.activity, threads=1))
    task = Task(demand, size_bytes, flash, seed)
    compile_loops(task)
    work: dict[str, Callable[[], Any]] = {
        "counting": lambda: (demand.activity.counts, demand.fitting.activity.counts),
        "ripple": lambda: ripple.Plugin().arrange(task),
        "ours": lambda: auto.Plugin().arrange(task),
    }
    found = {}
    for name, what in work.items():
        start = time.perf_counter()
        what()
        found[f"{name}_s_{MODEL_LAYERS}_layers"] = time.perf_counter() - start
    return found


def times() -> dict[str, float]:
    """Seconds for all layers of a model of MODEL_LAYERS: one job per core, each with its share of the layers."""
    command = [sys.executable, "-m", "benchmarks.order", "--layer"]
    jobs = [subprocess.Popen([*command, str(seed)], stdout=subprocess.PIPE, text=True) for seed in range(CORES)]
    found = [json.loads(job.communicate()[0]) for job in jobs]
    return {key: max(layer[key] for layer in found) * MODEL_LAYERS / CORES for key in found[0]}


def main() -> None:
    """Prints the table and the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sources", nargs="+", choices=list(SOURCES), default=list(SOURCES))
    parser.add_argument("--no-timing", action="store_true", help="leave the times out")
    parser.add_argument("--layer", type=int, metavar="SEED", help="print one layer's times and nothing else")
    arguments = parser.parse_args()
    if arguments.layer is not None:
        print(json.dumps(layer_times(arguments.layer)))
        return
    figures = {} if arguments.no_timing else times()
    sources = list(chain.from_iterable(SOURCES[name]() for name in arguments.sources))
    rows = [row for source in sources for row in rows_of(source)]
    friends = [friend_bundles(source) for source in sources if not source.model.endswith(AS_A_7B)]
    by_order = {order: gains(rows, order) for order in ORDERS}
    cells = [cells_of(row, by_order[row.order][row.case]) for row in rows]
    show("per token of one layer, on text not fitted", COLUMNS, cells)
    show("closest friends with copies", FRIEND_COLUMNS, friends)
    show("gain over ripple", ["order", "worst", "median", "best"], [summary(name, by_order[name]) for name in ORDERS])
    found, over_even = by_order["auto"], gains(rows, "auto", "ms_break_even")
    open_cases = [row.case for row in rows if row.order == "ripple" and row.ms > HEADROOM * row.least_ms]
    finish(
        figures
        | {
            "median_gain": median(found.values()),
            "worst_gain": min(found.values()),
            "best_gain": max(found.values()),
            "median_gain_over_break_even": median(over_even.values()),
            "worst_gain_over_break_even": min(over_even.values()),
            "cases": len(found),
            "headroom_cases": len(open_cases),
            "headroom_median_gain": median(found[case] for case in open_cases),
            "headroom_median_gain_over_break_even": median(over_even[case] for case in open_cases),
            "rows": [vars(row) for row in rows],
        }
    )


def cells_of(row: Row, gain: float) -> list[object]:
    """A line of the first table."""
    order = row.order if row.order == row.chosen else f"{row.order}: {row.chosen}"
    case = [f"{row.model} {row.family} {row.density}", row.device, row.format, row.text, order]
    return [*case, row.adjacent_weight, row.reads, row.read_bytes / 1024, row.ms, row.ms_break_even, gain]


def summary(name: str, found: dict[tuple[str, ...], float]) -> list[object]:
    """A line of the second table."""
    return [name, min(found.values()), median(found.values()), max(found.values())]


if __name__ == "__main__":
    main()
