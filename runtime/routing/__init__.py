"""Routing: how the choice of a mixture's experts depends on what is in DRAM. One file per way.

A file has one class `Plugin`, which extends `Routing`. Shape letters: T tokens, E experts.
"""

from abc import abstractmethod
from typing import ClassVar

import numpy as np

from coldpress.runtime import plugins
from coldpress.schemas.errors import ColdpressError

PACKAGE = "coldpress.runtime.routing"
EXACT = "top_k"
"""The file that chooses as the model was trained to."""


class Routing(plugins.PluginBase):
    """Changes the scores by which routers choose experts. The base class of all ways."""

    SEES_RESIDENCY: ClassVar[bool] = True
    """True if the choice depends on which units are in DRAM."""

    @abstractmethod
    def scores(self, scores_TE: np.ndarray, present_E: np.ndarray, strength: float) -> np.ndarray:
        """Returns the ranking scores, float32 [T, E]: the experts with the largest are chosen.

        Args:
            scores_TE: The router's scores, float32 [T, E].
            present_E: Share of each expert's units that is in DRAM, float32 [E].
            strength: How much the layer prefers experts in DRAM, at least 0; 0 is the router's own choice.
        """


def held_shares(present: np.ndarray, num_experts: int) -> np.ndarray:
    """Returns the share of each expert's units that is in DRAM, float32 [E], from bool [num_units]."""
    return present.reshape(num_experts, -1).mean(axis=1, dtype=np.float32)


def read_choice(text: str) -> tuple[str, float]:
    """Parses `NAME` or `NAME:STRENGTH`, for example `cache_prior:0.2`, into a way and its strength; 0 without one.
    Raises `UnknownNameError` if there is no such way, and `ColdpressError` if the strength is not a number of at least
    0, or the way needs one and has none."""
    name, _, number = text.partition(":")
    way = plugins.load(PACKAGE, Routing, name)
    try:
        strength = float(number or 0)
    except ValueError:
        strength = -1.0
    if not 0 <= strength < float("inf") or (strength > 0) != way.SEES_RESIDENCY:
        expected = f"{name}:STRENGTH with a number above 0, for example {name}:0.2" if way.SEES_RESIDENCY else name
        raise ColdpressError(f"the routing '{text}' was asked for, expected {expected}")
    return name, strength
