"""The gap over which reads are joined: none, the best fixed one, the device's, and the adaptive one.

The units that tokens of the traces of benchmarks.cache_policies miss, with an LRU cache of three tenths of the units,
become reads by the law of each device: with the gap of the device itself, and with those of the others, as in an
artifact that was compiled for another device. The measured part decodes text with a 7B-shaped ReLU model
(benchmarks.decode) from this machine's disk, from several first gaps, fixed and adaptive; its rows give the seconds
that a token waits for flash.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.decode import VOCAB_SIZE, write_artifact
from benchmarks.harness.benchmark import Benchmark, Cell, Row, option
from benchmarks.harness.command import main
from benchmarks.shared.cache_traces import PLANTED, REAL, Trace, traces_of
from coldpress.runtime.generate.session import Session
from coldpress.runtime.profiles.devices import load_device
from coldpress.runtime.store import planner
from coldpress.runtime.store.gap import AdaptiveGap
from coldpress.runtime.store.planner import Strided
from coldpress.runtime.store.reads import MAX_READ_BYTES
from coldpress.schemas.device import DeviceProfile, Flash, flash_seconds
from coldpress.schemas.layout import Collapse
from tests.support.artifacts import change_manifest
from tests.support.caches import empty, missed

SLOTS_SHARE = 0.3
STARTS = (0, 16384, 262144)
CASE, BLOCK_TOKENS = "relu-3", 62
"""Of benchmarks.decode, and tokens of its context."""


def places_missed(trace: Trace) -> list[np.ndarray]:
    """Flash positions of what each token misses, ascending."""
    position = np.argsort(trace.order)
    cache = empty("lru", trace.order.size, round(SLOTS_SHARE * trace.order.size), position=position)
    used = np.concatenate([trace.used["validation"], trace.used["test"]])
    return [np.sort(position[ids]) for ids in missed(cache, map(np.flatnonzero, used))]


def seconds(traces: list[Trace], places: list[list[np.ndarray]], flash: Flash, gap: int | AdaptiveGap) -> float:
    """Of all tokens, each with a request per trace."""
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
    """What is replayed and decoded."""

    cases: tuple[str, ...] = option(
        ("prose7m-relu", "planted-3%"),
        smoke=("planted-3%",),
        full=(*REAL, *PLANTED),
        choices=(*REAL, *PLANTED),
        help="traces",
    )
    devices: tuple[str, ...] = option(
        ("pixel6", "iphone-a18", "oneplus12", "macbook-m1-max"), smoke=("pixel6", "iphone-a18"), help="device profiles"
    )
    layers: int = option(2, smoke=1, help="layers of each model")
    blocks: int = option(0, full=6, help="blocks of 62 tokens that the measured part decodes, 3 or more; 0: none")


class Plugin(Benchmark[Options]):
    """Replays traces by the devices' laws, and decodes."""

    keys = {
        "rows[].part": "modelled or measured",
        "rows[].case?": "modelled: trace",
        "rows[].device?": "modelled: device profile",
        "rows[].gap_of?": "modelled: the device whose break-even gap is the first one",
        "rows[].start": "bytes of the first gap",
        "rows[].over_static": "seconds with the first gap kept over those with the adaptive one",
        "rows[].over_best?": "modelled: seconds with the best fixed gap over those with the adaptive one",
        "rows[].switched_off?": "modelled: whether joining was switched off",
        "rows[].static_s?": "measured: seconds that a token waits with the first gap kept",
        "rows[].adaptive_s?": "measured: seconds that a token waits with the adaptive gap",
    }
    needs_data = True
    full_minutes = 25

    def cells(self) -> Iterator[Cell]:
        """A cell per trace and device, and one per first gap that is measured."""
        for case, device in itertools.product(self.options.cases, self.options.devices):
            yield {"part": "modelled", "case": case, "device": device}
        for start in STARTS if self.options.blocks else ():
            yield {"part": "measured", "start": start}

    def measure(self, cell: Cell) -> Iterator[Row]:
        """A row per device that the first gap is of, or one of waits."""
        if cell["part"] == "measured":
            yield measured(cell["start"], self.options.blocks, self.folder)
            return
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
    """A row per device that the first gap is of."""
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


def measured(start: int, num_blocks: int, folder: Path) -> Row:
    """Seconds that a token waits for flash, with the first gap kept and with the adaptive one."""
    tokens = np.random.default_rng(0).integers(3, VOCAB_SIZE, (num_blocks, BLOCK_TOKENS))
    if not (folder / CASE).exists():
        write_artifact(CASE, 2, SLOTS_SHARE, folder)
    change_manifest(folder / CASE, lambda manifest: manifest["plans"][0].update(collapse_gap_bytes=start))
    static_s, adaptive_s = (_wait_s(folder / CASE, tokens, collapse) for collapse in ("static", "adaptive"))
    return {"static_s": static_s, "adaptive_s": adaptive_s, "over_static": static_s / adaptive_s}


def _wait_s(path: Path, tokens: np.ndarray, collapse: Collapse) -> float:
    """In the last third of the text; the text before it fills the cache and finds the gap."""
    with Session(path, collapse=collapse) as session:
        session.perplexity(tokens[: -len(tokens) // 3], sparse=True)
        found = session.perplexity(tokens[-len(tokens) // 3 :], sparse=True).metrics
    return found.flash_s / found.num_tokens


if __name__ == "__main__":
    main("collapse")
