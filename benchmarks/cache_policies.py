"""Compares cache policies with equal slots: hits, reads, bytes, modelled seconds, and the cost of deciding.

The units that tokens use in a layer, of real models and of planted ones at a 7B's size, are replayed through each
policy; its misses become reads by the runtime's planner. A request takes the device's seconds for these reads, or those
for computing with all used units and copying the units that the cache keeps, whichever is more
(runtime/store/computing.py). Slots are a share of the layer's units; `static` pins the most frequent units of
calibration text, `none` has no slots. The text before the measured one fills the caches.

Four figures are compared with the papers': the gain of policies over no cache and over each other (DIP, Fig. 11;
benchmarks.dip_ca has its cache-aware masks), the DRAM that an order by co-activation saves (Ripple, Fig. 14: up to 1.50
and 1.36 times), the hits of a cache that follows the context over those of one that is fixed for the task (ActiveFlow,
Fig. 18: 0.12 more), and the share of weights that is loaded (Fig. 19: 18 % at density 0.5 with half of the units in
DRAM).
"""

import statistics
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from benchmarks.evaluation.reads import Placed, Reading, Reads, reads_of, requests_seconds
from benchmarks.harness import Benchmark, Cell, Figures, Row, Rows, main, option
from benchmarks.shared.cache_figures import (
    CONTEXT,
    TASK,
    above_belady,
    context_over_task,
    dram_saved,
    gains,
    loaded_at_half,
)
from benchmarks.shared.cache_traces import AT_DENSITIES, CONTEXT_TOKENS, PLANTED, REAL, Trace, traces_of
from benchmarks.shared.real_models import MODELS
from coldpress.runtime.cache import read_choice
from coldpress.runtime.device_profiles.devices import load_device
from coldpress.runtime.store.planner import MAX_READ_BYTES, Strided
from coldpress.schemas.device import DeviceProfile
from tests.support.caches import empty

POLICIES = ("none", "lru", "lfu", "s3fifo", "linked", "static", "belady")
ALL_POLICIES = (*POLICIES, "window", "linked:linked_over=lfu", "linked:linked_over=s3fifo")


@dataclass(frozen=True)
class Replayed:
    """The replay of one layer's trace through a cache."""

    missed: np.ndarray
    """bool [T, num_units], the units that each token of the measured text misses."""
    kept: np.ndarray
    """int64 [T], how many of the missed units the cache keeps."""
    decide_s: float
    """Seconds per request that the policy took to decide."""
    num_misses: int
    """Misses, including those of the text that fills the cache: Belady's theorem covers all requests."""


def replayed(text: str, trace: Trace, slots: float) -> Replayed:
    """Replays a text that fills the cache, then the measured one, through a policy."""
    name, options = ("static", {}) if text == "none" else read_choice(text)
    num_units = trace.order.size
    count = 0 if text == "none" else round(slots * num_units)
    position = np.empty_like(trace.order)
    position[trace.order] = np.arange(num_units, dtype=position.dtype)
    used = np.concatenate([trace.used["validation"][-4 * CONTEXT_TOKENS :], trace.used["test"]])
    requests = [np.flatnonzero(row).astype(np.int32) for row in used]
    pins = trace.rank[: count if name == "static" else 0].tolist()
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
    num_tokens = len(trace.used["test"])
    return Replayed(missed[-num_tokens:], kept[-num_tokens:], seconds / len(requests), int(np.count_nonzero(missed)))


def row_of(trace: Trace, used: np.ndarray, found: Replayed, device: DeviceProfile) -> Row:
    """Returns the mean figures of a token in one layer."""
    size, num_tokens = trace.unit_bytes, len(used)
    active_bytes, missed_bytes = (size * np.count_nonzero(units, axis=1) for units in (used, found.missed))

    def read(order: np.ndarray) -> tuple[Reads, float]:
        reading = Reading(device.flash, device.flash.break_even_gap_bytes, MAX_READ_BYTES, False, {})
        reads = reads_of(found.missed, Placed(Strided(0, size, size), order), reading)
        seconds = requests_seconds(device, size * order.size, reads, active_bytes, missed_bytes, size * found.kept)
        return reads, seconds / num_tokens

    reads, token_s = read(trace.order)
    num_used, num_missed = np.count_nonzero(used), np.count_nonzero(found.missed)
    return {
        "hit_rate": 1 - num_missed / num_used,
        "loaded_share": num_missed / used.size,
        "misses": found.num_misses,
        "reads": float(reads.num_reads.sum()) / num_tokens,
        "read_bytes": float(reads.num_bytes.sum()) / num_tokens,
        "flash_s": float(reads.seconds.sum()) / num_tokens,
        "token_s": token_s,
        "unordered_s": read(np.arange(trace.order.size, dtype=trace.order.dtype))[1],
    }


@dataclass(frozen=True)
class Options:
    cases: tuple[str, ...] = option(
        tuple(name for name in (*REAL, *AT_DENSITIES) if name.startswith(MODELS[:2])),
        smoke=("tinystories656k",),
        full=(*REAL, *AT_DENSITIES, *PLANTED),
        choices=(*REAL, *AT_DENSITIES, *PLANTED),
        help="models: two language models at three densities, further ones, or small ones and planted layers",
    )
    policies: tuple[str, ...] = option(
        POLICIES,
        smoke=("none", "lru", "lfu", "s3fifo", "static", "belady"),
        full=ALL_POLICIES,
        help="cache policies, with options as coldpress takes them; none: no cache",
    )
    slots: tuple[float, ...] = option((0.1, 0.3, 0.5), smoke=(0.3,), help="shares of a family's units that have slots")
    devices: tuple[str, ...] = option(("pixel6", "iphone-a18"), smoke=("pixel6",), help="device profiles")
    layers: int = option(2, smoke=1, help="layers of each model that are replayed")


class Plugin(Benchmark[Options]):
    keys = {
        "rows[].device": "device profile",
        "rows[].hit_rate": "share of requested units that were in the cache or pinned",
        "rows[].loaded_share": "share of all units of a family that a token reads from flash",
        "rows[].misses": "misses per family of a layer, over the text that fills the cache and the measured one",
        "rows[].reads": "reads from flash per token and family of a layer",
        "rows[].read_bytes": "bytes read from flash per token and family of a layer",
        "rows[].flash_s": "modelled seconds of these reads, per token and family of a layer",
        "rows[].token_s": "modelled seconds per token and family of a layer: reading, or other work if that is more",
        "rows[].unordered_s": "token_s if units lay on flash in the model's own order",
        "rows[].us_per_request": "microseconds per request that the policy takes to decide on this machine",
        **{
            f"{table}[].{name}?": f"{title}: {meaning}"
            for table, title in (
                ("over_none", "gain in modelled seconds over no cache"),
                ("over_lru", "gain in modelled seconds over lru"),
                ("linked_over_base", "gain in modelled seconds of linked policies over their base"),
            )
            for name, meaning in (
                ("policy", "cache policy"),
                ("over", "policy that it is compared with"),
                ("median", "median over cases, devices and slots"),
                ("worst", "least over cases, devices and slots"),
                ("best", "largest over cases, devices and slots"),
            )
        },
        "dram_saved[].case?": "model",
        "dram_saved[].device?": "device profile",
        "dram_saved[].slots?": "share of the units that have slots",
        "dram_saved[].saved?": "slots with which the model's own order is as fast, over these slots (Ripple, Fig. 14)",
        "context_over_task[].case?": "model",
        "context_over_task[].slots?": "share of the units that have slots",
        "context_over_task[].context?": f"hit rate of {CONTEXT}, which follows the context",
        "context_over_task[].task?": f"hit rate of {TASK}, which is fixed for the task",
        "median_dram_saved?": "median of dram_saved[].saved; null where nothing is comparable",
        "median_context_over_task?": "median of context minus task in context_over_task (ActiveFlow, Fig. 18: 0.12)",
        "median_loaded_share?": f"median loaded_share of {CONTEXT} with the most slots, over models that use half of "
        "their units (ActiveFlow, Fig. 19: 0.18); null without such a model",
        "above_belady": "replays with fewer misses than Belady's; must be 0, since Belady's are the fewest possible",
    }
    needs_data = True
    over = {"case": "cases", "slots": "slots", "policy": "policies"}
    full_minutes = 15

    def measure(self, cell: Cell) -> Iterator[Row]:
        """Yields a row per device: means over the layers and families of a case."""
        case = cell["case"]
        traces = self.once(case, lambda: list(traces_of(case, self.folder / case, self.options.layers)))
        found = [replayed(cell["policy"], one, cell["slots"]) for one in traces]
        for name in self.options.devices:
            device = load_device(name)
            parts = [
                row_of(trace, trace.used["test"], one, device) | {"us_per_request": 1e6 * one.decide_s}
                for trace, one in zip(traces, found, strict=True)
            ]
            yield {"device": name} | {key: statistics.fmean(part[key] for part in parts) for key in parts[0]}

    def figures(self, rows: Rows) -> Figures:
        policies = self.options.policies
        cached = [policy for policy in policies if policy != "none"]
        linked = [(policy, _base_of(policy)) for policy in policies if policy.startswith("linked")]
        saved, context = dram_saved(rows), context_over_task(rows)
        tables = {
            "over_none": [gains(rows, policy, "none") for policy in cached if "none" in policies],
            "over_lru": [gains(rows, policy, "lru") for policy in cached if policy != "lru"],
            "linked_over_base": [gains(rows, policy, base) for policy, base in linked if base in policies],
            "dram_saved": saved,
            "context_over_task": context,
        }
        return {
            **{name: table for name, table in tables.items() if table},
            "median_dram_saved": _median(one["saved"] for one in saved),
            "median_context_over_task": _median(one["context"] - one["task"] for one in context),
            "median_loaded_share": _median(loaded_at_half(rows)),
            "above_belady": above_belady(rows),
        }


def _base_of(policy: str) -> str:
    return str(read_choice(policy)[1].get("linked_over", "lru"))


def _median(values: Iterable[float]) -> float | None:
    found = list(values)
    return statistics.median(found) if found else None


if __name__ == "__main__":
    main("cache_policies")
