"""Every cache policy with as many slots: hits, reads, bytes, modelled seconds, and what deciding costs.

`python -m benchmarks.caches [--cases …] [--slots 0.1 …] [--policies lru window:window_tokens=3 …]`. What tokens
of real models, and of planted ones at a 7B's size, use of a layer is replayed through each policy; what it misses
becomes reads by the runtime's planner. A request takes the device's seconds for these reads, or those for computing
with all that it uses and copying what the cache keeps, whichever is more (runtime/store/clock.py). Slots are a share of
the layer's units, some of them pinned, the most frequent ones of calibration text; `static` pins all. The text
before the one that counts fills the caches. With `--split validation` parameters are chosen; the default is the test
text. The last line has `rows`; by policy its gain over `lru` in modelled seconds of a token's layer (median, worst and
best of cases, devices and slots), without pins and with as many as are best for either; and that of `linked` over its
base. `us_per_request` is this machine's.
"""

import argparse
import itertools
import json
import math
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._cache_traces import CONTEXT_TOKENS, PLANTED, REAL, Trace, traces_of
from benchmarks._report import finish, show
from benchmarks.evaluation.reads import Placed, Reading, reads_of
from coldpress.compiler.profiles import load_device
from coldpress.runtime.cache import read_choice
from coldpress.runtime.store.clock import fetch_seconds
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
Row = dict[str, Any]


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
    requests = zip(found.seconds.tolist(), active_bytes.tolist(), kept_bytes.tolist(), strict=True)
    return {
        "hit_rate": 1 - num_missed / num_used,
        "reads": float(found.num_reads.sum()) / num_tokens,
        "read_bytes": float(found.num_bytes.sum()) / num_tokens,
        "flash_s": float(found.seconds.sum()) / num_tokens,
        "token_s": math.fsum(fetch_seconds(device, *request) for request in requests) / num_tokens,
    }


def rows_of(
    trace: list[Trace], policy: str, slots: float, pinned: float, split: str, devices: list[DeviceProfile]
) -> list[Row]:
    """A row per device, means over the traces of a case."""
    found = [missed_by(policy, one, slots, pinned, split) for one in trace]
    rows = []
    for device in devices:
        parts = [
            row_of(one, one.used[split], missed, kept, device) | {"us_per_request": 1e6 * seconds}
            for one, (missed, kept, seconds) in zip(trace, found, strict=True)
        ]
        means = {name: statistics.fmean(part[name] for part in parts) for name in parts[0]}
        rows.append(
            {"case": trace[0].case, "device": device.name, "slots": slots, "pinned": pinned, "policy": policy} | means
        )
    return rows


def gains(rows: list[Row], policy: str, base: str) -> Row:
    """Modelled seconds of `base` over those of `policy`, each with the pinned share that is best for it."""
    best: dict[tuple[Any, ...], float] = {}
    for row in rows:
        key = (row["case"], row["device"], row["slots"], row["policy"])
        best[key] = min(row["token_s"], best.get(key, math.inf))
    found = [seconds / best[*key, policy] for (*key, name), seconds in best.items() if name == base]
    return {"policy": policy, "over": base, "median": statistics.median(found), "worst": min(found), "best": max(found)}


def main() -> None:
    """Prints the table and the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=[*REAL, *PLANTED], default=[*REAL, *PLANTED], metavar="CASE")
    parser.add_argument(
        "--policies", nargs="+", default=list(POLICIES), help="with options as coldpress-run takes them"
    )
    parser.add_argument("--slots", nargs="+", type=float, default=[0.1, 0.3, 0.5], help="shares of a layer's units")
    parser.add_argument(
        "--pinned", nargs="+", type=float, default=[0.0, 0.5], help="shares of the slots that are pinned"
    )
    parser.add_argument("--devices", nargs="+", default=["pixel6", "iphone-a18"])
    parser.add_argument("--split", choices=list(BEFORE), default="test")
    parser.add_argument("--layers", type=int, default=2, help="of each model")
    arguments = parser.parse_args()
    devices = [load_device(Path("profiles/devices") / f"{name}.yaml") for name in arguments.devices]
    rows: list[Row] = []
    for case in arguments.cases:
        with tempfile.TemporaryDirectory() as folder:
            traces = list(traces_of(case, Path(folder), arguments.layers))
        for slots, pinned, policy in itertools.product(arguments.slots, arguments.pinned, arguments.policies):
            rows += rows_of(traces, policy, slots, pinned, arguments.split, devices)
            print(json.dumps(rows[-1]), flush=True)
    columns = list(rows[0])
    show(f"caches, {arguments.split} text", columns, [[row[column] for column in columns] for row in rows])
    others = [policy for policy in arguments.policies if policy != "lru" and "lru" in arguments.policies]
    linked = [(policy, _base_of(policy)) for policy in arguments.policies if policy.startswith("linked")]
    bare = [row for row in rows if row["pinned"] == min(arguments.pinned)]
    found = {
        "over_lru": [gains(bare, policy, "lru") for policy in others],
        "over_lru_with_pins": [gains(rows, policy, "lru") for policy in others],
        "linked_over_base": [gains(bare, policy, base) for policy, base in linked if base in arguments.policies],
    }
    for name, table in found.items():
        if table:
            show(name, list(table[0]), [list(row.values()) for row in table])
    finish(found | {"rows": rows})


def _base_of(policy: str) -> str:
    return str(read_choice(policy)[1].get("linked_over", "lru"))


if __name__ == "__main__":
    main()
