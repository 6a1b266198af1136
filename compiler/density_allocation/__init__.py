"""The base class and the inputs of rules of density allocation, and the rounding of their results to whole units. A
rule is a file of this package whose class `Plugin` extends `Rule`."""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from coldpress.runtime.plugins import PluginBase
from coldpress.runtime.store.facts import Key
from coldpress.schemas.errors import ColdpressError

if TYPE_CHECKING:
    from coldpress.compiler.search.density import MeasuredLosses

Shares = Mapping[Key, float]
"""Density of each family in each layer."""


class Magnitudes:
    """A distribution over units and tokens; inside a bin magnitudes are assumed uniform."""

    def __init__(self, statistics: Mapping[str, np.ndarray], where: str, used: float = 1.0) -> None:
        """Takes `magnitude_histogram` and `magnitude_edges` (schemas/activations.py); raises ColdpressError if there
        are none. `used` is the share of entries that count: not the zeros of experts that a token does not use."""
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


@dataclass(frozen=True)
class RuleTask:
    density: float
    """Share of these families' bytes that a token uses, below 1."""
    layers: tuple[int, ...]
    """Those that have units of these families."""
    num_units: Mapping[str, int]
    """Family -> units of a layer; keys are in the order of families."""
    unit_bytes: Mapping[str, int]
    own: Mapping[str, float]
    """Each family's density, in all layers, as the selector divides it (DIP B.1)."""
    magnitudes: Callable[[Key], Magnitudes]
    losses: "Callable[[], MeasuredLosses]"

    @property
    def keys(self) -> list[Key]:
        return [(layer, family) for layer in self.layers for family in self.num_units]

    def same(self, by_family: Mapping[str, float]) -> dict[Key, float]:
        return {key: by_family[key[1]] for key in self.keys}

    def mean(self, shares: Shares) -> float:
        """Returns the mean of shares, weighted by the bytes of each family."""
        return sum(self._bytes(key) * shares[key] for key in self.keys) / self._total

    def squares_between(self, key: Key, low: float, high: float) -> float:
        """Returns the part of its signal's sum of squares that a token loses from the share `high` to `low`."""
        return self._units(key) * self.magnitudes(key).squares_between(low, high)

    def whole_units(self, shares: Shares) -> dict[Key, float]:
        """Rounds shares to whole units, at least one each, so that their bytes match `density` of all bytes to within a
        unit: first down, then up where rounding lost most. If one unit each is already too much, the largest shares
        shrink."""
        counts = {key: min(self._units(key), max(1, int(shares[key] * self._units(key)))) for key in self.keys}
        missing = self.density * self._total - sum(self.unit_bytes[key[1]] * count for key, count in counts.items())
        for key in sorted(self.keys, key=lambda key: counts[key] - shares[key] * self._units(key)):
            size = self.unit_bytes[key[1]]
            if counts[key] < self._units(key) and size <= 2 * missing:
                counts[key] += 1
                missing -= size
        while missing < 0:
            largest = max(self.keys, key=lambda key: counts[key] / self._units(key))
            size = self.unit_bytes[largest[1]]
            if counts[largest] == 1 or 2 * missing > -size:
                break
            counts[largest] -= 1
            missing += size
        return {key: count / self._units(key) for key, count in counts.items()}

    def _units(self, key: Key) -> int:
        return self.num_units[key[1]]

    def _bytes(self, key: Key) -> int:
        return self.num_units[key[1]] * self.unit_bytes[key[1]]

    @property
    def _total(self) -> int:
        return sum(map(self._bytes, self.keys))


class Rule(PluginBase):
    """Divides a density among families and layers. The base class of all rules."""

    def num_variants(self, num_layers: int, num_families: int) -> int:
        """Returns how many variants of the model run at once to measure losses; 0 if the rule measures none."""
        return 0

    @abstractmethod
    def densities(self, task: RuleTask) -> Shares:
        """Returns the density of each family in each layer; their mean over all bytes is `task.density`."""
