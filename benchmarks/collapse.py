"""The gap that reads are joined over: none, the best one that stays, that of a device, and the one that adapts.

`python -m benchmarks.collapse [--cases …] [--devices …] [--measured N]`. What tokens of benchmarks.caches'
traces miss with an LRU cache of three tenths of the units becomes reads, by the law of each device: with the gap of the
device itself and with those of the others, as in an artifact that was compiled for another one. The measured part
decodes N blocks of text with a 7B-shaped ReLU model (benchmarks.decode) from this machine's disk, beginning with
each of some gaps, with and without adapting; its rows say how long a token waits for flash. The last line has
`modelled` and `measured`; `over_static` are seconds with the gap that stays over those with the one that adapts from
there, `over_best` those with the best gap, found afterwards.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.decode import VOCAB_SIZE, write_artifact
from benchmarks.shared.cache_traces import PLANTED, REAL, Trace, traces_of
from benchmarks.shared.report import finish, show
from coldpress.compiler.profiles import load_device
from coldpress.runtime.generate.session import Session
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
Row = dict[str, Any]


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


def modelled(case: str, num_layers: int, devices: list[DeviceProfile]) -> list[Row]:
    """A row per device and device that the gap is of."""
    with tempfile.TemporaryDirectory() as folder:
        traces = list(traces_of(case, Path(folder), num_layers))
    places, rows = [places_missed(trace) for trace in traces], []
    for device in devices:
        flash = device.flash
        best_s = min(seconds(traces, places, flash, 4096 * pages) for pages in (0, 1, 2, 4, 8, 16, 32, 64))
        for other in devices:
            start = other.flash.break_even_gap_bytes
            gap, static_s = AdaptiveGap(start, flash.page_bytes.value), seconds(traces, places, flash, start)
            adaptive_s = seconds(traces, places, flash, gap)
            rows.append(
                {
                    "case": case,
                    "device": device.name,
                    "gap_of": other.name,
                    "start": start,
                    "over_static": static_s / adaptive_s,
                    "over_best": best_s / adaptive_s,
                    "switched_off": gap.switched_off,
                }
            )
    return rows


def measured(num_blocks: int, kept: Path | None) -> list[Row]:
    """A row per gap to begin with: milliseconds that a token waits for flash, by itself and adapting."""
    tokens = np.random.default_rng(0).integers(3, VOCAB_SIZE, (num_blocks, BLOCK_TOKENS))
    rows = []
    with tempfile.TemporaryDirectory(dir=".") as temporary:
        folder = kept or Path(temporary)
        path = folder / CASE
        if not path.exists():
            write_artifact(CASE, 2, SLOTS_SHARE, folder)
        for start in STARTS:
            change_manifest(path, lambda manifest, start=start: manifest["plans"][0].update(collapse_gap_bytes=start))
            waits = {collapse: _wait_ms(path, tokens, collapse) for collapse in ("static", "adaptive")}
            rows.append({"start": start, **waits, "over_static": waits["static"] / waits["adaptive"]})
    return rows


def _wait_ms(path: Path, tokens: np.ndarray, collapse: Collapse) -> float:
    """In the last third of the text; what is before it fills the cache and finds the gap."""
    with Session(path, collapse=collapse) as session:
        session.perplexity(tokens[: -len(tokens) // 3], sparse=True)
        found = session.perplexity(tokens[-len(tokens) // 3 :], sparse=True).metrics
    return 1e3 * found.flash_s / found.num_tokens


def main() -> None:
    """Prints the tables and the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", choices=[*REAL, *PLANTED], default=["prose7m-relu", "planted-3%"])
    parser.add_argument("--devices", nargs="+", default=["pixel6", "iphone-a18", "oneplus12", "macbook-m1-max"])
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--measured", type=int, default=0, metavar="N", help="blocks of 62 tokens to decode, 3 or more")
    parser.add_argument("--folder", type=Path, help="where the artifact is kept for the next run")
    arguments = parser.parse_args()
    devices = [load_device(Path("profiles/devices") / f"{name}.yaml") for name in arguments.devices]
    found = [row for case in arguments.cases for row in modelled(case, arguments.layers, devices)]
    real = measured(arguments.measured, arguments.folder) if arguments.measured else []
    for title, rows in (("modelled", found), ("measured, ms that a token waits for flash", real)):
        if rows:
            show(title, list(rows[0]), [list(row.values()) for row in rows])
    finish({"modelled": found, "measured": real})


if __name__ == "__main__":
    main()
