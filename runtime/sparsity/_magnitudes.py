"""The magnitude that a given share of a signal's entries reaches, from calibration's histogram (TEAL 3, DIP 3.1).

Reads `magnitude_histogram` and `magnitude_edges` (schemas/activations.py); any density has its threshold from one pass
over the text.
"""

from collections.abc import Mapping

import numpy as np

from schemas.errors import ColdpressError

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
    if "magnitude_histogram" not in statistics:
        raise ColdpressError(
            "a threshold needs the magnitudes that calibration counts, which an artifact of another method does not "
            "have; build with this method"
        )
    counts = statistics["magnitude_histogram"].astype(np.float64)
    edges = statistics["magnitude_edges"].astype(np.float64)
    above = np.append(np.cumsum(counts[::-1])[::-1], 0)  # [num_bins + 1], entries from each edge on
    wanted = density * above[0]
    place = int(np.flatnonzero(above[:-1] >= wanted)[-1])  # the bin that the threshold lies in
    if place == 0:
        return SMALLEST
    if place == counts.size - 1 or counts[place] == 0:  # the last bin has no upper end
        return np.float32(edges[place])
    share = (above[place] - wanted) / counts[place]
    return np.float32(edges[place] + share * (edges[place + 1] - edges[place]))
