"""Compares gaps over which reads are joined: none, the best fixed one, the device's, and the adaptive one.

An LRU cache of three tenths of the units filters the traces of benchmarks.cache_policies; the misses become reads by
the law of each device. The first gap is that of the device itself, or that of another, as in an artifact that was
compiled for another device.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from benchmarks.harness import Benchmark, Cell, Row, main, option
from benchmarks.shared.cache_traces import PLANTED, REAL, Trace, traces_of
from coldpress.runtime.profiles.devices import load_device
from coldpress.runtime.store import planner
from coldpress.runtime.store.gap import AdaptiveGap
from coldpress.runtime.store.planner import Strided
from coldpress.runtime.store.reads import MAX_READ_BYTES
from coldpress.schemas.device import DeviceProfile, Flash, flash_seconds
from tests.support.caches import empty, missed

SLOTS_SHARE = 0.3


def places_missed(trace: Trace) -> list[np.ndarray]:
    """Returns the flash positions of the units that each token misses, ascending."""
    position = np.argsort(trace.order)
    cache = empty("lru", trace.order.size, round(SLOTS_SHARE * trace.order.size), position=position)
    used = np.concatenate([trace.used["validation"], trace.used["test"]])
    return [np.sort(position[ids]) for ids in missed(cache, map(np.flatnonzero, used))]


def seconds(traces: list[Trace], places: list[list[np.ndarray]], flash: Flash, gap: int | AdaptiveGap) -> float:
    """Returns the modelled seconds of all tokens, each with a request per trace."""
    total, page_bytes = 0.0, flash.page_bytes.value
    for token in range(len(places[0])):
        for trace, found in zip(traces, places, strict=True):
            units, wanted = Strided(0, trace.unit_bytes, trace.unit_bytes), found[token]
            now = gap if isinstance(gap, int) else gap.gap_bytes
            extents = planner.plan_reads(units, wanted, page_bytes, now, MAX_READ_BYTES).extents
            spent = float(flash_seconds(flash, len(extents), extents.num_bytes))
            total += spent
            if isinstance(gap, AdaptiveGap):
                gap.want(wanted.size * trace.unit_bytes)
                gap.observe(extents.num_bytes, spent)
        if isinstance(gap, AdaptiveGap):
            gap.end_tokens()
    return total


@dataclass(frozen=True)
class Options:
    cases: tuple[str, ...] = option(
        ("prose7m-relu", "planted-3%"),
        smoke=("planted-3%",),
        full=(*REAL, *PLANTED),
        choices=(*REAL, *PLANTED),
        help="models whose traces are replayed",
    )
    devices: tuple[str, ...] = option(
        ("pixel6", "iphone-a18", "oneplus12", "macbook-m1-max"), smoke=("pixel6", "iphone-a18"), help="device profiles"
    )
    layers: int = option(2, smoke=1, help="layers of each model that are replayed")


class Plugin(Benchmark[Options]):
    keys = {
        "rows[].gap_of": "device whose break-even gap is the first gap",
        "rows[].start": "first gap in bytes",
        "rows[].over_static": "modelled seconds with the first gap throughout over those with the adaptive gap",
        "rows[].over_best": "modelled seconds with the best fixed gap over those with the adaptive gap",
        "rows[].switched_off": "whether the adaptive gap joins no reads at the end, since bandwidth bounds the device",
    }
    needs_data = True
    over = {"case": "cases", "device": "devices"}
    full_minutes = 25

    def measure(self, cell: Cell) -> Iterator[Row]:
        """Yields a row per device whose break-even gap is the first gap."""
        case = cell["case"]
        traces, places = self.once(case, lambda: self._missed(case))
        devices = [load_device(name) for name in self.options.devices]
        yield from modelled(traces, places, load_device(cell["device"]).flash, devices)

    def _missed(self, case: str) -> tuple[list[Trace], list[list[np.ndarray]]]:
        traces = list(traces_of(case, self.folder / case, self.options.layers))
        return traces, [places_missed(trace) for trace in traces]


def modelled(
    traces: list[Trace], places: list[list[np.ndarray]], flash: Flash, devices: list[DeviceProfile]
) -> Iterator[Row]:
    """Yields a row per device whose break-even gap is the first gap."""
    best_s = min(seconds(traces, places, flash, 4096 * pages) for pages in (0, 1, 2, 4, 8, 16, 32, 64))
    for other in devices:
        start = other.flash.break_even_gap_bytes
        gap, static_s = AdaptiveGap(start, flash.page_bytes.value), seconds(traces, places, flash, start)
        adaptive_s = seconds(traces, places, flash, gap)
        yield {
            "gap_of": other.name,
            "start": start,
            "over_static": static_s / adaptive_s,
            "over_best": best_s / adaptive_s,
            "switched_off": gap.switched_off,
        }


if __name__ == "__main__":
    main("collapse")
