"""The law of a flash's reads, and its fit to a measured grid of read size by reads in flight.

Reads that are requested together meet three bounds: operations per second, bandwidth, and latency, since reads go out
in waves of as many as are in flight. On some devices the bounds overlap, and the largest counts; on others each adds
its time (a processor that issues a read does not move bytes meanwhile). `combined` is a p-norm of the three: the
maximum at one end, the sum at the other.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from coldpress.schemas.base import Record, Share

Floats = NDArray[np.float64]
RATES = (1e-9, 1e15)
"""Least and largest reads or bytes per second: wider than any device, and no sum of modelled seconds overflows."""
OVERLAPS = tuple(step / 20 for step in range(20, -1, -1))
SAME_FIT = 1e-3
"""Fits whose errors differ by less are equally good; the one with more overlap is taken."""
NUM_STEPS = 40
DAMPING = 1e-9
LONGEST_STEP = 3.0
"""In logarithms: points that no law fits ask for endless steps."""
LEAST_GAIN = 1e-12
"""A step that lowers the squares by less is the last."""


class Law(Record):
    """Seconds of a device's reads besides their latency, as in `coldpress.schemas.device.flash_seconds`."""

    reads_per_s: float = Field(ge=RATES[0], le=RATES[1])
    """Operations per second, without their bytes."""
    bytes_per_s: float = Field(ge=RATES[0], le=RATES[1])
    """Bandwidth, without what operations take."""
    overlap: Share
    """Degree to which operations, bytes and latency pass at once: with 1 the largest counts, with 0 their sum."""


class Grid(NamedTuple):
    """Points of a measurement, each float64 [n]."""

    read_bytes: Floats
    in_flight: Floats
    read_s: Floats
    """Seconds of one read among `in_flight`: read size over bandwidth."""


class Fit(NamedTuple):
    """A law with its latency, and its relative error at each point of the grid, float64 [n]."""

    law: Law
    latency_s: float
    errors: Floats


def combined(bounds: tuple[Any, Any, Any], overlap: float) -> Any:
    """Returns the seconds that three bounds take together, numbers or float64 of one shape: their p-norm with p = 1 /
    (1 - overlap). An overlap of 0 gives the sum, 1 the maximum."""
    first, second, third = bounds
    if overlap == 0:
        return first + second + third
    # numbers stay Python's: the clock asks for each request, and numpy takes ten times as long for one
    has_arrays = any(isinstance(bound, np.ndarray) for bound in bounds)
    largest = np.maximum(np.maximum(first, second), third) if has_arrays else max(bounds)
    if overlap == 1:
        return largest
    scale = np.where(largest > 0, largest, 1.0) if has_arrays else largest or 1.0
    power = 1 / (1 - overlap)
    return largest * sum((bound / scale) ** power for bound in bounds) ** (1 - overlap)


def read_seconds(law: Law, latency_s: float, read_bytes: Any, in_flight: Any) -> Any:
    """Returns the seconds of one read of `read_bytes` among many, `in_flight` at a time; of one shape."""
    return combined((1 / law.reads_per_s, latency_s / in_flight, read_bytes / law.bytes_per_s), law.overlap)


def fit(grid: Grid, latency_s: float | None, overlaps: Sequence[float] = OVERLAPS) -> Fit:
    """Returns the law with the least squares of logarithmic errors at the points of a grid.

    For each overlap that is tried, Gauss-Newton steps find the rates (and the latency, if `latency_s` is None): the
    derivative of the law's logarithm by that of a bound is the bound's share of the norm. Figures have four digits, so
    that they are the same on every machine.
    """
    best = _fit_at(grid, latency_s, overlaps[0])
    for overlap in overlaps[1:]:
        if _rms(best) < SAME_FIT:
            break
        found = _fit_at(grid, latency_s, overlap)
        best = found if _rms(found) < _rms(best) - SAME_FIT else best
    return best


def _fit_at(grid: Grid, latency_s: float | None, overlap: float) -> Fit:
    """Returns the best law of one overlap, beginning with the fastest read, the highest rate, and the lone read."""
    lone = np.lexsort((grid.read_bytes, grid.in_flight))[0]
    free = [0, 1, 2] if latency_s is None else [0, 2]
    lone_s = grid.read_s[lone] * grid.in_flight[lone] if latency_s is None else latency_s
    seconds = np.array([grid.read_s.min(), lone_s, (grid.read_s / grid.read_bytes).min()])
    per_point = np.stack([np.ones_like(grid.read_s), 1 / grid.in_flight, grid.read_bytes])
    best, misses = seconds, np.inf
    for _ in range(NUM_STEPS):
        bounds = seconds[:, None] * per_point
        modelled = combined((bounds[0], bounds[1], bounds[2]), overlap)
        off = np.log(grid.read_s / modelled)
        if not off @ off < misses - LEAST_GAIN:
            break
        best, misses = seconds, off @ off
        shares = _shares(bounds[free], modelled, overlap)
        squares = shares @ shares.T + DAMPING * np.eye(len(free))
        step = np.asarray(np.linalg.solve(squares, shares @ off), np.float64)
        seconds = seconds.copy()
        seconds[free] *= np.exp(np.clip(step, -LONGEST_STEP, LONGEST_STEP))
    reads_per_s, bytes_per_s = (_figure(1 / min(1 / RATES[0], max(1 / RATES[1], best[i]))) for i in (0, 2))
    law = Law(reads_per_s=reads_per_s, bytes_per_s=bytes_per_s, overlap=overlap)
    latency_s = _figure(best[1]) if latency_s is None else latency_s
    found_s = read_seconds(law, latency_s, grid.read_bytes, grid.in_flight)
    return Fit(law, latency_s, found_s / grid.read_s - 1)


def _shares(bounds: Floats, modelled: Floats, overlap: float) -> Floats:
    """Returns each bound's share of the norm, float64 [k, n]; of equal largest ones, under a maximum, each has one."""
    if overlap == 1:
        return (bounds == modelled).astype(np.float64)
    return (bounds / modelled) ** (1 / (1 - overlap))


def _rms(found: Fit) -> float:
    return float(np.sqrt(np.mean(np.log1p(found.errors) ** 2)))


def _figure(value: float) -> float:
    return float(f"{value:.4g}")
