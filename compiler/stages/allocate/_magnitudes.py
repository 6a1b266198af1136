"""Turns calibration's histogram of a family's |signal| in one layer into a curve: the share of entries above a level.

One pass over the text gives the level of any density (TEAL 3; runtime/sparsity/_magnitudes.py reads the same arrays).
"""

from collections.abc import Mapping

import numpy as np

from coldpress.schemas.errors import ColdpressError


class Magnitudes:
    """A distribution over units and tokens; inside a bin magnitudes are assumed uniform."""

    def __init__(self, statistics: Mapping[str, np.ndarray], where: str, used: float = 1.0) -> None:
        """Takes `magnitude_histogram` and `magnitude_edges` (schemas/activations.py).

        Args:
            used: The share of all entries that counts; the rest, zeros of experts that a token does not use, does not.

        Raises:
            ColdpressError: if there are no magnitudes.
        """
        if "magnitude_histogram" not in statistics:
            raise ColdpressError(
                f"{where}: no magnitudes in the statistics, which this density_allocation needs; delete "
                "calibrate.json from the build folder and build again, or use density_allocation=uniform"
            )
        counts = statistics["magnitude_histogram"].astype(np.float64)
        counts[0] = max(0.0, counts[0] - (1 - used) * counts.sum())
        self._edges = statistics["magnitude_edges"].astype(np.float64)
        self._edges[-1] = 2 * self._edges[-2]  # the last bin has no upper end
        self._above = np.append(np.cumsum(counts[::-1])[::-1], 0) / counts.sum()
        low, high = self._edges[:-1], self._edges[1:]
        squares = (low**2 + low * high + high**2) / 3 * counts / counts.sum()
        self._squares_above = np.append(np.cumsum(squares[::-1])[::-1], 0)

    def share_above(self, level: float) -> float:
        return float(np.interp(level, self._edges, self._above))

    def level(self, share: float) -> float:
        return float(np.interp(share, self._above[::-1], self._edges[::-1]))

    def squares_between(self, low: float, high: float) -> float:
        """Returns the part of the mean square from entries ranked between two shares, largest first."""
        of_low, of_high = np.interp([low, high], self._above[::-1], self._squares_above[::-1])
        return float(of_high - of_low)
