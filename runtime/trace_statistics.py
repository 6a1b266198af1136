"""Says how sparse, how skewed and how repetitive a trace is: what may be stated about a drawn one, and what any has.

Published ones: in OPT-30B's MLPs 26 % of the neurons have 80 % of the uses, in ReGLU and SwiGLU models of 70B 43 % and
69 % (PowerInfer 3.1, Fig. 4a); OPT 6.7B uses 10 % of the neurons at a token and 24 % in five (LLM in a flash C.1),
which is `repeated=0.57` at OPT-30B's skew.
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from pydantic import Field

from coldpress.runtime import plugins
from coldpress.runtime.artifact.reader import Artifact
from coldpress.runtime.trace import FETCH, Event
from coldpress.schemas.base import Count, PositiveCount, Record, Share
from coldpress.schemas.errors import ColdpressError

MOST_OFTEN = 0.98
"""No unit of a drawn trace is used with a higher probability."""


class Statistics(Record):
    """What is stated about a drawn trace."""

    density: float | None = Field(
        None, gt=0, lt=MOST_OFTEN, description="share of the units that a token uses (default: as the largest plan)"
    )
    hot_share: float = Field(0.26, gt=0, lt=1, description="share of the units that count as hot (default: 0.26)")
    hot_mass: Share = Field(0.8, description="share of all uses that hot units have (default: 0.8)")
    repeated: Share | None = Field(
        None, description="share of a token's units that the token before used, too (default: as many as by chance)"
    )
    group_units: PositiveCount = Field(1, description="units that lie together and are used together (default: 1)")
    coactivation: Share = Field(
        0.0, description="how often they are: 0 as by chance, 1 whenever their popularity allows (default: 0)"
    )
    tokens: int = Field(256, ge=2, le=1 << 24, description="decoded tokens (default: 256)")
    seed: Count = Field(0, description="of the draws (default: 0)")


class Figures(NamedTuple):
    """The statistics that a trace has, over all its parts."""

    density: float
    hot_mass: float
    repeated: float
    coactivation: float | None
    """Loevinger's H of neighbours in a group: their covariance over the largest that their popularity allows; None if
    groups have one unit."""


def read_statistics(text: str) -> Statistics:
    """Parses statistics such as `density=0.1:repeated=0.6`.

    Raises:
        UnknownNameError: for an unknown statistic.
        ColdpressError: if a part does not have the form NAME=VALUE, or a value is invalid.
    """
    values = plugins.parse_values(text.split(":"), "statistic of a trace", "density=0.1:repeated=0.6")
    found = plugins.record_of(Statistics, "statistic", "a trace", values)
    if found.coactivation and found.group_units == 1:
        raise ColdpressError(
            f"coactivation is {found.coactivation:g} in groups of one unit, expected of several; state group_units, too"
        )
    return found


def num_hot(num_units: int, hot_share: float) -> int:
    """Returns the number of units that count as hot."""
    return max(1, round(hot_share * num_units))


class _Counts:
    """What is counted of one family of one layer."""

    def __init__(self, order: np.ndarray, rank: np.ndarray, asked: Statistics) -> None:
        """Begins at zero; `order` and `rank` are the artifact's."""
        self._order = order
        is_hot = np.zeros(rank.size, bool)
        is_hot[rank[: num_hot(rank.size, asked.hot_share)]] = True
        self._is_hot = is_hot[order]
        self._in_group = np.arange(1, order.size) % asked.group_units != 0  # with the unit before it on flash
        self._before: np.ndarray | None = None
        self.num_tokens = self.num_hot = self.num_repeated = self.num_in_first = 0
        self.uses, self.pairs = np.zeros(order.size, np.int64), np.zeros(order.size - 1, np.int64)

    def add(self, ids: np.ndarray) -> None:
        """Counts a token's units."""
        used = np.zeros(self._order.size, bool)
        used[ids] = True
        used = used[self._order]  # by flash position from here on
        self.num_tokens += 1
        self.num_hot += int(np.count_nonzero(used & self._is_hot))
        if self._before is None:
            self.num_in_first = ids.size
        else:
            self.num_repeated += int(np.count_nonzero(used & self._before))
        self._before = used
        self.uses += used
        self.pairs += used[1:] & used[:-1] & self._in_group

    def covariances(self) -> tuple[int, int]:
        """Returns the covariances of neighbours in groups, and the largest that their uses allow, as sums times
        num_tokens squared."""
        first, second = self.uses[:-1][self._in_group], self.uses[1:][self._in_group]
        by_chance, pairs = first * second, self.pairs[self._in_group]
        most = self.num_tokens * np.minimum(first, second) - by_chance
        return int((self.num_tokens * pairs - by_chance).sum()), int(most.sum())


def measured(artifact: Artifact, events: Iterable[Event], asked: Statistics) -> Figures:
    """Returns the statistics of a trace that requests units of a part once per token.

    Args:
        artifact: Says which units are hot (the first ones of its rank) and which lie together.
        events: The trace.
        asked: Says how many units are hot, and how many a group has.
    """
    sections = {(layer, one.family): one for one in artifact.manifest.flash.sections for layer in one.layers}
    found: dict[tuple[int, str], _Counts] = {}
    for event in events:
        if event.kind == FETCH:
            key = event.layer, event.family
            if key not in found:
                section = sections[key]
                rank = artifact.rank(event.layer, section.family)
                found[key] = _Counts(artifact.order(section), rank, asked)
            found[key].add(event.ids)
    counts = found.values()
    num_uses = sum(int(one.uses.sum()) for one in counts)
    num_later = num_uses - sum(one.num_in_first for one in counts)
    together, most = np.sum([one.covariances() for one in counts], axis=0).tolist()
    return Figures(
        density=num_uses / sum(one.num_tokens * one.uses.size for one in counts),
        hot_mass=sum(one.num_hot for one in counts) / max(1, num_uses),
        repeated=sum(one.num_repeated for one in counts) / max(1, num_later),
        coactivation=None if asked.group_units == 1 else together / max(1, most),
    )
