"""What a rule of density allocation is, what it is given, and how its answer becomes whole units.

A rule is a file of this package whose class `Plugin` extends `Rule`.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from coldpress.compiler.stages.allocate._magnitudes import Magnitudes
from coldpress.runtime.plugins import PluginBase

Key = tuple[int, str]
"""A layer and a family."""
Shares = Mapping[Key, float]
"""Density of each family in each layer."""


class Losses(Protocol):
    """Divergences of the model from itself, in nats a token, where a selector leaves units out."""

    def of(self, variants: Sequence[Shares]) -> list[float]:
        """Of each on calibration text, all at once: where later ones differ from the first in few layers, the others
        before those run once."""
        ...

    def on_validation(self, shares: Shares) -> float:
        """On text that decides between results."""
        ...


@dataclass(frozen=True)
class Task:
    """What is to be divided."""

    density: float
    """Share of all bytes of the families that a token uses, below 1."""
    num_layers: int
    num_units: Mapping[str, int]
    """Family -> units of a layer; its order is that of families."""
    unit_bytes: Mapping[str, int]
    own: Callable[[float], Mapping[str, float]]
    """Density -> that of each family, in all layers: as the selector divides it (DIP B.1), or the same for all."""
    magnitudes: Callable[[Key], Magnitudes]
    losses: Callable[[], Losses]

    @property
    def keys(self) -> list[Key]:
        """Every layer and family, layer by layer."""
        return [(layer, family) for layer in range(self.num_layers) for family in self.num_units]

    def same(self, by_family: Mapping[str, float]) -> dict[Key, float]:
        """The same in all layers."""
        return {key: by_family[key[1]] for key in self.keys}

    def mean(self, shares: Shares) -> float:
        """Of shares, each counted by the bytes of its family."""
        return sum(self._bytes(key) * shares[key] for key in self.keys) / self._total

    def squares_between(self, key: Key, low: float, high: float) -> float:
        """What a token loses, of the sum of squares of its signal, from a share of `high` down to `low`."""
        return self._units(key) * self.magnitudes(key).squares_between(low, high)

    def whole_units(self, shares: Shares) -> dict[Key, float]:
        """Nearby shares that are whole numbers of units, at least one, and whose bytes are `density` of all to a unit.

        Rounded down, and then up where most was lost; where the least of one unit is too much, the largest give.
        """
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

    @abstractmethod
    def num_variants(self, num_layers: int, num_families: int) -> int:
        """How many variants of the model run at once to measure losses; 0 if none does."""

    @abstractmethod
    def densities(self, task: Task) -> Shares:
        """The density of each family in each layer; their mean over all bytes is `task.density`."""
