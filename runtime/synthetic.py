"""Draws traces with stated statistics, to simulate models that nobody has at hand (runtime/trace_statistics.py).

Units are as popular as their rank in the artifact says, by a power law. From token to token, a group of units that are
neighbours on flash, as an order by co-activation puts them, does one of three things:

- with probability `keep` it stays as it is;
- else, with probability `coactivation`, it gets one draw for all, and those of its units that are popular enough are
  used;
- else each of its units gets a draw of its own.

So each unit is used with its own probability p at every token, whatever the groups, and the statistics have closed
forms: a token repeats keep + (1 - keep) * sum(p^2) / sum(p) of the units of the token before, and two units of a group
have the share `coactivation` of the covariance that their probabilities allow (Loevinger's H).

Draws are integers from a generator whose numbers numpy never changes, so a seed gives the same trace everywhere. Each
iteration draws token by token: memory holds five bytes for each unit, and one request. The units of all experts of a
mixture are one pool.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from coldpress.runtime.artifact.reader import Artifact
from coldpress.runtime.trace import END, FETCH, NO_IDS, Event
from coldpress.runtime.trace_statistics import MOST_OFTEN, Figures, Statistics, num_hot
from coldpress.schemas.errors import ColdpressError
from coldpress.schemas.layout import PartPlan, Section, placed_parts

STEEPEST = 8.0
"""The largest exponent of the law of popularity."""
TOLERANCE = 0.005
"""A law whose `hot_mass` differs by more does not have it."""
SCALE = 1 << 32
"""Probabilities are multiples of 1 / SCALE."""


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


class _Law(NamedTuple):
    """How units of a part are used."""

    chances: np.ndarray
    """See `frequencies`."""
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


def _law_of(num_units: int, density: float, asked: Statistics) -> _Law:
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
    chances = frequencies(num_units, density, asked.hot_share, asked.hot_mass)
    if abs(chances[:hot].sum() / chances.sum() - asked.hot_mass) > TOLERANCE:
        most = frequencies(num_units, density, asked.hot_share, 1.0)
        raise ColdpressError(
            f"hot_mass is {asked.hot_mass:g}, expected {hot / num_units:.2f} to {most[:hot].sum() / most.sum():.2f}, "
            f"since a token uses {density:.3g} of the {num_units} units and {hot} are hot; state another hot_mass or "
            "hot_share"
        )
    law = _Law(chances, 0.0)
    if asked.repeated is None:
        return law
    if asked.repeated < law.by_chance:
        raise ColdpressError(
            f"repeated is {asked.repeated:g}, expected at least {law.by_chance:.3f}, since units of such popularity "
            "repeat as many by chance; state another repeated or hot_mass"
        )
    return _Law(chances, (asked.repeated - law.by_chance) / (1 - law.by_chance))


class _Units:
    """The units of one part from token to token."""

    def __init__(self, artifact: Artifact, part: PartPlan, section: Section, law: _Law, asked: Statistics) -> None:
        """Begins before the first token."""
        chances = np.empty(section.num_units, np.uint32)
        chances[artifact.rank(part.layer, part.family)] = np.rint(law.chances * SCALE).astype(np.uint32)
        self._order = artifact.order(section)
        self._chances = chances[self._order]  # by flash position, like all that follows
        self._used = np.zeros(section.num_units, bool)
        self._group_units = asked.group_units
        self._num_groups = -(-section.num_units // asked.group_units)
        self._keep = round(law.keep * SCALE)
        shared = asked.coactivation if asked.group_units > 1 else 1.0  # a unit alone shares its draw with nobody
        self._shared = round(shared * SCALE)
        seed = np.random.SeedSequence([asked.seed, part.layer, *part.family.encode()])
        self._generator = np.random.PCG64(seed)
        self._first = True

    def next_ids(self) -> np.ndarray:
        """Returns the units of the next token, int32 ascending."""
        draws = self._of_groups(self._draws(self._num_groups))
        if self._shared < SCALE:
            alone = self._of_groups(self._draws(self._num_groups) >= self._shared)
            draws = np.where(alone, self._draws(self._used.size), draws)
        used = draws < self._chances
        if self._keep and not self._first:
            kept = self._of_groups(self._draws(self._num_groups) < self._keep)
            used = np.where(kept, self._used, used)
        self._used, self._first = used, False
        by_id = np.zeros(used.size, bool)
        by_id[self._order[used]] = True
        return by_id.nonzero()[0].astype(np.int32)

    def _draws(self, count: int) -> np.ndarray:
        """Returns integers below SCALE, uint32 [count]."""
        return self._generator.random_raw((count + 1) // 2).astype("<u8", copy=False).view("<u4")[:count]

    def _of_groups(self, values: np.ndarray) -> np.ndarray:
        """Returns for each unit what its group has."""
        return values.repeat(self._group_units)[: self._used.size]


class Synthetic(Iterable[Event]):
    """A drawn trace of decoded tokens; each iteration draws the same events."""

    def __init__(self, artifact: Artifact, asked: Statistics) -> None:
        """Finds the law of each part of the artifact's largest plan, whose units are requested.

        Raises:
            ColdpressError: if no trace has the statistics.
        """
        placed = placed_parts(artifact.manifest.plans[0], artifact.manifest.flash.sections)
        if not placed:
            raise ColdpressError("the artifact has no units on flash, so that a token requests none; simulate another")
        kinds = [(section.num_units, asked.density or part.density) for part, section in placed]
        laws = {kind: _law_of(*kind, asked) for kind in dict.fromkeys(kinds)}  # most parts are alike
        self._artifact, self._asked = artifact, asked
        self._laws = [(*each, laws[kind]) for each, kind in zip(placed, kinds, strict=True)]

    @property
    def expected(self) -> Figures:
        """Returns the statistics in expectation."""
        laws = [law for _, _, law in self._laws]
        uses = np.array([law.chances.sum() for law in laws])
        return Figures(
            density=float(uses.sum()) / sum(law.chances.size for law in laws),
            hot_mass=self._asked.hot_mass,
            repeated=float((uses * [law.repeated for law in laws]).sum() / uses.sum()),
            coactivation=None if self._asked.group_units == 1 else self._asked.coactivation,
        )

    def __iter__(self) -> Iterator[Event]:
        """Yields each token's requests and its end."""
        units = [(part, _Units(self._artifact, part, section, law, self._asked)) for part, section, law in self._laws]
        family = units[0][0].family  # the end of a token concerns all
        for token in range(1, self._asked.tokens + 1):
            for part, own in units:
                yield Event(FETCH, token, part.layer, part.family, own.next_ids())
            yield Event(END, token, 0, family, NO_IDS)
