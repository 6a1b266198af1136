"""Times work in interleaved rounds: the median with its spread, and a gain only where it is larger than its spread."""

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import TypedDict


class Spread(TypedDict):
    """Median and range of a figure over several rounds."""

    median: float
    low: float
    """Lowest of all rounds; from ten rounds on without the lowest tenth."""
    high: float
    """Highest of all rounds; from ten rounds on without the highest tenth."""


class Gain(Spread):
    """A ratio of two timings, formed in every round."""

    shown: str
    """The median, or "none" where some rounds gain and others lose."""


def spread(samples: Sequence[float]) -> Spread:
    """Returns the median of samples and their range without the outermost tenths."""
    ordered, outliers = sorted(samples), len(samples) // 10
    return {"median": median(ordered), "low": ordered[outliers], "high": ordered[-1 - outliers]}


def gain(before_s: Sequence[float], after_s: Sequence[float]) -> Gain:
    """Returns how many times faster `after_s` is than `before_s`, seconds of the same rounds in the same order.

    The ratio is formed in each round, since the machine's speed drifts from round to round. A gain that is above 1 in
    some rounds and below in others is shown as "none".
    """
    ratios = [before / after for before, after in zip(before_s, after_s, strict=True)]
    found = spread(ratios)
    return {**found, "shown": f"{found['median']:.2f}" if found["low"] > 1 or found["high"] < 1 else "none"}


def interleaved(
    works: Mapping[str, Callable[[], object]],
    rounds: int,
    clock: Callable[[], float] = time.perf_counter,
    before: Callable[[], object] | None = None,
) -> dict[str, list[float]]:
    """Returns the seconds of each work in every round. A round runs all works in turn; one more round before them warms
    up. `before` runs before each work, and its seconds do not count."""
    found: dict[str, list[float]] = {name: [] for name in works}
    for number in range(rounds + 1):
        for name, work in works.items():
            if before:
                before()
            start_s = clock()
            work()
            if number:
                found[name].append(clock() - start_s)
    return found
