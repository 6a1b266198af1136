"""Computes thresholds from calibration's histogram of a signal's magnitudes (TEAL 3, DIP 3.1).

Reads `magnitude_histogram` and `magnitude_edges` (schemas/activations.py), which one pass over the text fills and which
give the threshold for every density.
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from coldpress.schemas.errors import ColdpressError

Floats = NDArray[np.float64]

SMALLEST = np.finfo(np.float32).smallest_subnormal
"""The threshold that every value except zero reaches."""


def threshold(statistics: Mapping[str, np.ndarray], density: float) -> np.float32:
    """Returns the t for which a share `density`, above 0, of all entries has |signal| >= t.

    Assumes that magnitudes are spread evenly inside a bin, of a histogram whose first bin counts the zeros. The result
    is never zero, because an entry that is exactly zero adds nothing at any density. Raises `ColdpressError` if there
    is no histogram, for example in an artifact of another method.
    """
    counts, edges, above = _above(statistics)
    wanted = density * above[0]
    place = int(np.flatnonzero(above[:-1] >= wanted)[-1])  # the bin that the threshold lies in
    if place == 0:
        return SMALLEST
    if place == counts.size - 1 or counts[place] == 0:  # the last bin has no upper end
        return np.float32(edges[place])
    share = (above[place] - wanted) / counts[place]
    return np.float32(edges[place] + share * (edges[place + 1] - edges[place]))


def draws(statistics: Mapping[str, np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
    """Draws magnitudes, float32 of `shape`, from calibration's histogram, with a fixed seed. Raises `ColdpressError` as
    `threshold`."""
    shares = np.random.default_rng(0).random(shape)
    _, edges, above = _above(statistics)
    edges[-1] = edges[-2]  # the last bin has no upper end
    magnitudes = np.empty(shape, np.float32)
    magnitudes[...] = np.interp(shares * above[0], above[::-1], edges[::-1])
    return magnitudes


def _above(statistics: Mapping[str, np.ndarray]) -> tuple[Floats, Floats, Floats]:
    """Returns the entries per bin, float64 [num_bins]; and the bins' edges and the number of entries at or above each
    edge, both float64 [num_bins + 1]."""
    if "magnitude_histogram" not in statistics:
        raise ColdpressError(
            "a threshold needs the magnitudes that calibration counts, which an artifact of another method does not "
            "have; build with this method"
        )
    counts = statistics["magnitude_histogram"].astype(np.float64)
    return counts, statistics["magnitude_edges"].astype(np.float64), np.append(np.cumsum(counts[::-1])[::-1], 0)
