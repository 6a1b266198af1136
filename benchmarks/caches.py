"""What each cache policy gives with equal slots: hits, reads, bytes, modelled seconds, and the cost of deciding.

The units that tokens of real models, and of planted ones at a 7B's size, use in a layer are replayed through each
policy; its misses become reads by the runtime's planner. A request takes the device's seconds for these reads, or those
for computing with all used units and copying what the cache keeps, whichever is more (runtime/store/computing.py).
Slots are a share of the layer's units; some are pinned, the most frequent units of calibration text; `static` pins all.
The text before the measured one fills the caches. `--split validation` serves to choose parameters; the default is the
test text.
"""

import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.evaluation.reads import Placed, Reading, reads_of, requests_seconds
from benchmarks.harness.benchmark import Benchmark, Cell, Row, Table, option
from benchmarks.harness.command import main
from benchmarks.shared.cache_traces import CONTEXT_TOKENS, PLANTED, REAL, Trace, traces_of
from coldpress.runtime.cache import read_choice
from coldpress.runtime.profiles.devices import load_device
from coldpress.runtime.store.planner import Strided
from coldpress.runtime.store.reads import MAX_READ_BYTES
from coldpress.schemas.device import DeviceProfile
from tests.support.caches import empty

POLICIES = (
    "lru",
    "lfu",
    "s3fifo",
    "window",
    "linked",
    "linked:linked_over=lfu",
    "linked:linked_over=s3fifo",
    "static",
    "belady",
)
BEFORE = {"test": "validation", "validation": "calibration"}
"""The text that fills the caches."""


def missed_by(text: str, trace: Trace, slots: float, pinned: float, split: str) -> tuple[np.ndarray, np.ndarray, float]:
    """(what each token of the split misses, bool [T, num_units], how many of those units the cache keeps, int64 [T],
    seconds that a request took to decide)."""
    name, options = read_choice(text)
    num_units = trace.order.size
    count = round(slots * num_units)
    position = np.empty_like(trace.order)
    position[trace.order] = np.arange(num_units, dtype=position.dtype)
    used = np.concatenate([trace.used[BEFORE[split]][-4 * CONTEXT_TOKENS :], trace.used[split]])
    requests = [np.flatnonzero(row).astype(np.int32) for row in used]
    pins = trace.rank[: count if name == "static" else round(pinned * count)].tolist()
    cache = empty(name, num_units, count - len(pins), pins, position=position, requests=requests, **options)
    missed, kept, seconds = used.copy(), np.zeros(len(used), np.int64), 0.0
    for token, ids in enumerate(requests):
        if token % CONTEXT_TOKENS == 0:
            cache.reset()
        start = time.perf_counter()
        present = cache.touch(ids)
        kept[token] = 0 if present.all() else cache.admit(ids[~present])[0].size
        cache.end_tokens()
        seconds += time.perf_counter() - start
        missed[token, ids[present]] = False
    count = len(trace.used[split])
    return missed[-count:], kept[-count:], seconds / len(requests)


def row_of(trace: Trace, used: np.ndarray, missed: np.ndarray, kept: np.ndarray, device: DeviceProfile) -> Row:
    """Figures of a token, of one layer."""
    flash, size = device.flash, trace.unit_bytes
    placed = Placed(Strided(0, size, size), trace.order)
    reading = Reading(flash, flash.break_even_gap_bytes, MAX_READ_BYTES, False, {})
    found = reads_of(missed, placed, reading)
    num_tokens, num_used, num_missed = len(used), np.count_nonzero(used), np.count_nonzero(missed)
    active_bytes, kept_bytes = size * np.count_nonzero(used, axis=1), size * kept
    requests_s = requests_seconds(device, size * trace.order.size, found.seconds, active_bytes, kept_bytes)
    return {
        "hit_rate": 1 - num_missed / num_used,
        "reads": float(found.num_reads.sum()) / num_tokens,
        "read_bytes": float(found.num_bytes.sum()) / num_tokens,
        "flash_s": float(found.seconds.sum()) / num_tokens,
        "token_s": requests_s / num_tokens,
    }


def gains(rows: Sequence[Row], policy: str, base: str) -> Row:
    """Modelled seconds of `base` over those of `policy`, each with the pinned share that is best for it."""
    best: dict[tuple[Any, ...], float] = {}
    for row in rows:
        key = (row["case"], row["device"], row["slots"], row["policy"])
        best[key] = min(row["token_s"], best.get(key, math.inf))
    found = [seconds / best[*key, policy] for (*key, name), seconds in best.items() if name == base]
    return {"policy": policy, "over": base, "median": statistics.median(found), "worst": min(found), "best": max(found)}


@dataclass(frozen=True)
class Options:
    """What is replayed."""

    cases: tuple[str, ...] = option(
        ("prose7m", "planted-10%"),
        smoke=("tinystories656k",),
        full=(*REAL, *PLANTED),
        choices=(*REAL, *PLANTED),
        help="models",
    )
    policies: tuple[str, ...] = option(
        POLICIES, smoke=("lru", "linked", "belady"), help="cache policies, with options as coldpress-run takes them"
    )
    slots: tuple[float, ...] = option((0.3,), full=(0.1, 0.3, 0.5), help="shares of a layer's units")
    pinned: tuple[float, ...] = option((0.0, 0.5), smoke=(0.0,), help="shares of the slots that are pinned")
    devices: tuple[str, ...] = option(("pixel6", "iphone-a18"), smoke=("pixel6",), help="device profiles")
    split: str = option("test", choices=BEFORE, help="the text that counts")
    layers: int = option(2, smoke=1, help="layers of each model")


class Plugin(Benchmark[Options]):
    """Replays a trace of each case through each policy."""

    keys = {
        "rows[].case": "model",
        "rows[].device": "device profile",
        "rows[].slots": "share of the layer's units that have slots",
        "rows[].pinned": "share of the slots that are pinned",
        "rows[].policy": "cache policy",
        "rows[].hit_rate": "share of the used units that were in DRAM",
        "rows[].reads": "reads of a token in a layer",
        "rows[].read_bytes": "bytes read for a token in a layer",
        "rows[].flash_s": "the device's seconds for these reads",
        "rows[].token_s": "modelled seconds of a token's layer",
        "rows[].us_per_request": "microseconds that deciding takes on this machine",
        **{
            f"{table}[].{name}": f"{meaning}, {title}"
            for table, title in (
                ("over_lru", "over lru without pins"),
                ("over_lru_with_pins", "over lru, each with its best share of pins"),
                ("linked_over_base", "of linked policies over their base without pins"),
            )
            for name, meaning in (
                ("policy", "policy"),
                ("over", "base"),
                ("median", "gain in modelled seconds, median of cases, devices, slots"),
                ("worst", "worst gain"),
                ("best", "best gain"),
            )
        },
    }
    needs_data = True
    over = {"case": "cases", "slots": "slots", "pinned": "pinned", "policy": "policies"}
    full_minutes = 30

    def measure(self, cell: Cell) -> Iterator[Row]:
        """A row per device: means over the layers of a case."""
        case, split = cell["case"], self.options.split
        traces = self.once(case, lambda: list(traces_of(case, self.folder / case, self.options.layers)))
        found = [missed_by(cell["policy"], one, cell["slots"], cell["pinned"], split) for one in traces]
        for name in self.options.devices:
            device = load_device(name)
            parts = [
                row_of(one, one.used[split], missed, kept, device) | {"us_per_request": 1e6 * seconds}
                for one, (missed, kept, seconds) in zip(traces, found, strict=True)
            ]
            yield {"device": name} | {key: statistics.fmean(part[key] for part in parts) for key in parts[0]}

    def figures(self, rows: Sequence[Row]) -> Mapping[str, Any]:
        """Gains over `lru`, and of `linked` over its base."""
        policies = self.options.policies
        others = [policy for policy in policies if policy != "lru"]
        linked = [(policy, _base_of(policy)) for policy in policies if policy.startswith("linked")]
        bare = [row for row in rows if row["pinned"] == min(self.options.pinned)]
        return {
            "over_lru": [gains(bare, policy, "lru") for policy in others],
            "over_lru_with_pins": [gains(rows, policy, "lru") for policy in others],
            "linked_over_base": [gains(bare, policy, base) for policy, base in linked if base in policies],
        }

    def tables(self, rows: Sequence[Row], figures: Mapping[str, Any]) -> Iterator[Table]:
        """All rows, and the gains."""
        yield from super().tables(rows, figures)
        for name, table in figures.items():
            if name != "rows" and table:
                yield Table(name, list(table[0]), [list(row.values()) for row in table])


def _base_of(policy: str) -> str:
    return str(read_choice(policy)[1].get("linked_over", "lru"))


if __name__ == "__main__":
    main("caches")
