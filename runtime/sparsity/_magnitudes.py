"""The magnitude that a given share of a signal's entries reaches, from calibration's histogram (TEAL 3, DIP 3.1).

Reads `magnitude_histogram` and `magnitude_edges` (schemas/activations.py); any density has its threshold from one pass
over the text.
"""

from collections.abc import Mapping

import numpy as np

from coldpress.schemas.errors import ColdpressError

SMALLEST = np.finfo(np.float32).smallest_subnormal
"""What everything but zero reaches."""


def threshold(statistics: Mapping[str, np.ndarray], density: float) -> np.float32:
    """The t with |signal| >= t for the share `density` of all entries; magnitudes spread evenly inside a bin.

    Never zero: an entry that is exactly zero adds nothing, whatever the density.

    Args:
        statistics: Those of the family, with a histogram whose first bin has the zeros.
        density: Share of the entries, above 0.

    Raises:
        ColdpressError: if there is no histogram, as where a method is not the artifact's own.
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
    """Magnitudes float32 of `shape`, drawn from those that calibration counted; the same ones every time.

    Raises:
        ColdpressError: as `threshold`.
    """
    shares = np.random.default_rng(0).random(shape)
    _, edges, above = _above(statistics)
    edges[-1] = edges[-2]  # the last bin has no upper end
    return np.interp(shares * above[0], above[::-1], edges[::-1]).astype(np.float32)


def _above(statistics: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(entries of each bin, its edges, entries from each edge on), float64 [num_bins], [num_bins + 1] the others."""
    if "magnitude_histogram" not in statistics:
        raise ColdpressError(
            "a threshold needs the magnitudes that calibration counts, which an artifact of another method does not "
            "have; build with this method"
        )
    counts = statistics["magnitude_histogram"].astype(np.float64)
    return counts, statistics["magnitude_edges"].astype(np.float64), np.append(np.cumsum(counts[::-1])[::-1], 0)
