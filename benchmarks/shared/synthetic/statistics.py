"""Says what may be stated about a drawn trace: how sparse, skewed and repetitive it is, and what is used together.

Published ones: in OPT-30B's MLPs 26 % of the neurons have 80 % of the uses, in ReGLU and SwiGLU models of 70B 43 % and
69 % (PowerInfer 3.1, Fig. 4a); OPT 6.7B uses 10 % of the neurons at a token and 24 % in five (LLM in a flash C.1),
which is `repeated=0.57` at OPT-30B's skew.
"""

from typing import NamedTuple

from pydantic import Field

from coldpress.runtime import plugins
from coldpress.schemas.base import Count, PositiveCount, Record, Share
from coldpress.schemas.errors import ColdpressError

HOT_MASS = 0.8
"""Share of all uses that hot units have where nothing is stated."""
MOST_OFTEN = 0.98
"""No unit is used with a higher probability."""


class Statistics(Record):
    """What is stated about a drawn trace."""

    density: float | None = Field(
        default=None,
        gt=0,
        lt=MOST_OFTEN,
        description="share of the units that a token uses (default: as the largest plan)",
    )
    hot_share: float = Field(
        default=0.26, gt=0, lt=1, description="share of the units that count as hot (default: 0.26)"
    )
    hot_mass: Share | None = Field(
        default=None,
        description=f"share of all uses that hot units have (default: {HOT_MASS}, or as near to it as density allows)",
    )
    repeated: Share | None = Field(
        default=None,
        description="share of a token's units that the token before used, too (default: as many as by chance)",
    )
    group_units: PositiveCount = Field(
        default=1, description="units that lie together and are used together (default: 1)"
    )
    coactivation: Share = Field(
        default=0.0, description="how often they are: 0 as by chance, 1 whenever their popularity allows (default: 0)"
    )
    tokens: int = Field(default=256, ge=2, le=1 << 24, description="decoded tokens (default: 256)")
    seed: Count = Field(default=0, description="of the draws (default: 0)")


class Figures(NamedTuple):
    """The statistics that a trace has, over all its parts."""

    density: float
    hot_mass: float
    repeated: float
    coactivation: float | None
    """Loevinger's H of neighbours in a group: how much more often than by chance they are used together, over the most
    that their popularity allows. None if groups have one unit."""


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
