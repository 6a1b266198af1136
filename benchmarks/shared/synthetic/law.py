"""Finds how often each unit is used, and how long it stays in use, so that a trace has the stated statistics."""

from typing import NamedTuple

import numpy as np

from benchmarks.shared.synthetic.statistics import HOT_MASS, MOST_OFTEN, Statistics, num_hot
from coldpress.schemas.errors import ColdpressError

STEEPEST = 8.0
"""The largest exponent of the law of popularity."""
TOLERANCE = 0.005
"""A law whose `hot_mass` differs by more does not have it."""


def frequencies(num_units: int, density: float, hot_share: float, hot_mass: float) -> np.ndarray:
    """Returns each unit's probability to be used by a token, float64 [num_units], descending.

    A power law of the rank, at most MOST_OFTEN, with mean `density`. Its exponent is found by bisection: the hottest
    `hot_share` of the units have `hot_mass` of the uses, or as near to it as such a law comes.
    """
    ranks = np.arange(1, num_units + 1) / num_units
    hot = num_hot(num_units, hot_share)

    def law(exponent: float) -> np.ndarray:
        weights = ranks**-exponent
        # the factor of the weights if that many units, the first ones, are at MOST_OFTEN
        scales = (density * num_units - MOST_OFTEN * np.arange(num_units)) / weights[::-1].cumsum()[::-1]
        return np.minimum(weights * scales[np.argmax(weights * scales <= MOST_OFTEN)], MOST_OFTEN)

    low, high = 0.0, STEEPEST
    for _ in range(60):
        middle = (low + high) / 2
        found = law(middle)
        low, high = (middle, high) if found[:hot].sum() / found.sum() < hot_mass else (low, middle)
    return law(low)


class Law(NamedTuple):
    """How the units of a part are used."""

    chances: np.ndarray
    keep: float
    """A group's probability to stay as it is."""

    @property
    def by_chance(self) -> float:
        """Returns the share of a token's units that the token before used, if nothing is kept."""
        return float((self.chances**2).sum() / self.chances.sum())

    @property
    def repeated(self) -> float:
        """Returns the share of a token's units that the token before used."""
        return self.keep + (1 - self.keep) * self.by_chance


def law_of(num_units: int, density: float, asked: Statistics) -> Law:
    """Returns the law of parts of this size and density.

    Raises:
        ColdpressError: if there is none.
    """
    if not 0 < density < MOST_OFTEN:
        raise ColdpressError(
            f"the artifact's largest plan uses {density:.3g} of the units, expected between 0 and {MOST_OFTEN}; state "
            "density"
        )
    hot = num_hot(num_units, asked.hot_share)
    mass = HOT_MASS if asked.hot_mass is None else asked.hot_mass
    chances = frequencies(num_units, density, asked.hot_share, mass)
    if asked.hot_mass is not None and abs(chances[:hot].sum() / chances.sum() - mass) > TOLERANCE:
        most = frequencies(num_units, density, asked.hot_share, 1.0)
        raise ColdpressError(
            f"hot_mass is {mass:g}, expected {hot / num_units:.2f} to {most[:hot].sum() / most.sum():.2f}, "
            f"since a token uses {density:.3g} of the {num_units} units and {hot} are hot; state another hot_mass or "
            "hot_share"
        )
    law = Law(chances, 0.0)
    if asked.repeated is None:
        return law
    if asked.repeated < law.by_chance:
        raise ColdpressError(
            f"repeated is {asked.repeated:g}, expected at least {law.by_chance:.3f}, since units of such popularity "
            "repeat as many by chance; state another repeated or hot_mass"
        )
    return Law(chances, (asked.repeated - law.by_chance) / (1 - law.by_chance))
