"""Computes the figures of benchmarks.cache_policies that are compared with the papers'."""

import statistics

import numpy as np

from benchmarks.harness import Row, Rows
from benchmarks.shared.cache_traces import HALF, REAL

CONTEXT, TASK = "lfu", "static"
"""A cache that follows the context, and one that is fixed for the task (ActiveFlow, Fig. 18)."""
ORDERED_BY = "s3fifo"
"""The policy of Ripple with and without its order (Fig. 14)."""


def gains(rows: Rows, policy: str, base: str) -> Row:
    """Returns the modelled seconds of `base` over those of `policy` in the same cell."""
    token_s = {(row["case"], row["device"], row["slots"], row["policy"]): row["token_s"] for row in rows}
    found = [seconds / token_s[*key, policy] for (*key, name), seconds in token_s.items() if name == base]
    return {"policy": policy, "over": base, "median": statistics.median(found), "worst": min(found), "best": max(found)}


def dram_saved(rows: Rows) -> list[Row]:
    """Returns, for each row of ORDERED_BY, the slots with which the model's own order would be as fast, over its slots.
    A row whose time lies outside the replayed range is left out."""
    found: list[Row] = []
    mine = [row for row in rows if row["policy"] == ORDERED_BY]
    for row in mine:
        like = [one for one in mine if all(one[name] == row[name] for name in ("case", "device"))]
        like.sort(key=lambda one: -one["unordered_s"])
        seconds = [one["unordered_s"] for one in like]
        if seconds[-1] <= row["token_s"] <= seconds[0]:
            slots = np.interp(-row["token_s"], [-one for one in seconds], [one["slots"] for one in like])
            found.append({name: row[name] for name in ("case", "device", "slots")} | {"saved": slots / row["slots"]})
    return found


def context_over_task(rows: Rows) -> list[Row]:
    """Returns the hit rate of a cache that follows the text, and of one that calibration fills once and for all."""
    rates = {(row["case"], row["slots"], row["policy"]): row["hit_rate"] for row in rows}
    return [
        {"case": case, "slots": slots, "context": rate, "task": rates[case, slots, TASK]}
        for (case, slots, policy), rate in rates.items()
        if policy == CONTEXT and (case, slots, TASK) in rates
    ]


def loaded_at_half(rows: Rows) -> list[float]:
    """Returns `loaded_share` of the cache that follows the text, with the most slots, in models that use half."""
    most = max(row["slots"] for row in rows)
    half = [case for case, real in REAL.items() if real.density == HALF]
    return [
        row["loaded_share"] for row in rows if row["policy"] == CONTEXT and row["slots"] == most and row["case"] in half
    ]


def above_belady(rows: Rows) -> int:
    """Counts the replays that have fewer misses than Belady's with the same slots: none may."""
    misses = {(row["case"], row["slots"], row["policy"]): row["misses"] for row in rows}
    return sum(count < misses.get((case, slots, "belady"), 0) for (case, slots, policy), count in misses.items())
