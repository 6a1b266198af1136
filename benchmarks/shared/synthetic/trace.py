"""Draws the units of each token. Integers only: a seed gives the same trace on every machine.

Units are as popular as their rank in the artifact says. From token to token, a group of units that are neighbours on
flash, as an order by co-activation puts them, does one of three things:

- with probability `keep` it stays as it is;
- else, with probability `coactivation`, it gets one draw for all, and those of its units that are popular enough are
  used;
- else each of its units gets a draw of its own.

So each unit is used with its own probability p at every token, whatever the groups, and the statistics have closed
forms: a token repeats keep + (1 - keep) * sum(p^2) / sum(p) of the units of the token before, and two units of a group
are used together with probability coactivation * min(p, q) + (1 - coactivation) * p * q.

Memory holds five bytes for each unit, and one request. A drawn trace begins with empty caches, has no prefill, and
reads nothing ahead, since there is nothing to guess from. The units of all experts of a mixture are one pool.
"""

from collections.abc import Iterable, Iterator

import numpy as np

from benchmarks.shared.synthetic.law import Law, law_of
from benchmarks.shared.synthetic.statistics import Figures, Statistics, num_hot
from coldpress.runtime.artifact.reader import Artifact
from coldpress.runtime.trace import END, FETCH, NO_IDS, Event
from coldpress.schemas.errors import ColdpressError
from coldpress.schemas.layout import PartPlan, Section, placed_parts

DRAW_BITS = 32
CHANCE_BITS = 20
"""Probabilities are rounded to as many bits: the last bits of powers and sums differ from processor to processor."""
ALWAYS = 1 << DRAW_BITS


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
        laws = {kind: law_of(*kind, asked) for kind in dict.fromkeys(kinds)}  # most parts have one kind
        self.artifact, self.asked = artifact, asked
        self.parts: list[tuple[PartPlan, Section, Law]] = [
            (*each, laws[kind]) for each, kind in zip(placed, kinds, strict=True)
        ]

    @property
    def expected(self) -> Figures:
        """Returns the statistics in expectation."""
        laws = [law for _, _, law in self.parts]
        uses = np.array([law.chances.sum() for law in laws])
        hot_uses = sum(float(law.chances[: num_hot(law.chances.size, self.asked.hot_share)].sum()) for law in laws)
        return Figures(
            density=float(uses.sum()) / sum(law.chances.size for law in laws),
            hot_mass=self.asked.hot_mass if self.asked.hot_mass is not None else round(hot_uses / float(uses.sum()), 6),
            repeated=float((uses * [law.repeated for law in laws]).sum() / uses.sum()),
            coactivation=None if self.asked.group_units == 1 else self.asked.coactivation,
        )

    def __iter__(self) -> Iterator[Event]:
        """Yields each token's requests and its end."""
        units = [(part, _Units(self, part, section, law)) for part, section, law in self.parts]
        family = units[0][0].family  # the end of a token concerns all
        for token in range(1, self.asked.tokens + 1):
            for part, own in units:
                yield Event(FETCH, token, part.layer, part.family, own.next_ids())
            yield Event(END, token, 0, family, NO_IDS)


class _Units:
    """The units of one part from token to token."""

    def __init__(self, trace: Synthetic, part: PartPlan, section: Section, law: Law) -> None:
        """Begins before the first token."""
        asked = trace.asked
        self._order = trace.artifact.order(section)
        self._chances = np.empty(section.num_units, np.uint32)
        self._chances[trace.artifact.rank(part.layer, part.family)] = _below(law.chances)
        self._chances = self._chances[self._order]  # by flash position, like all that follows
        self._used: np.ndarray | None = None
        self._group_units = min(asked.group_units, section.num_units)
        self._num_groups = -(-section.num_units // self._group_units)
        self._keep = int(_below(law.keep))
        # a unit alone shares its draw with nobody
        self._shared = int(_below(asked.coactivation)) if asked.group_units > 1 else ALWAYS
        self._generator = np.random.PCG64(np.random.SeedSequence([asked.seed, part.layer, *part.family.encode()]))

    def next_ids(self) -> np.ndarray:
        """Returns the units of the next token, int32 ascending."""
        num_units = self._order.size
        draws = self._of_groups(self._draws(self._num_groups))
        if self._shared < ALWAYS:
            alone = self._of_groups(self._draws(self._num_groups) >= self._shared)
            draws = np.where(alone, self._draws(num_units), draws)
        used = draws < self._chances
        if self._keep and self._used is not None:
            used = np.where(self._of_groups(self._draws(self._num_groups) < self._keep), self._used, used)
        self._used = used
        by_id = np.zeros(num_units, bool)
        by_id[self._order[used]] = True
        return by_id.nonzero()[0].astype(np.int32)

    def _draws(self, count: int) -> np.ndarray:
        """Returns integers below ALWAYS, uint32 [count]."""
        # numpy never changes the raw numbers of a generator, but may change what it makes of them
        return self._generator.random_raw((count + 1) // 2).astype("<u8", copy=False).view("<u4")[:count]

    def _of_groups(self, values: np.ndarray) -> np.ndarray:
        """Expands values per group to one value per unit, [num_units]."""
        return values.repeat(self._group_units)[: self._order.size]


def _below(chances: np.ndarray | float) -> np.ndarray:
    """Returns the number that a draw is below with these probabilities, uint64."""
    return np.rint(np.multiply(chances, 1 << CHANCE_BITS)).astype(np.uint64) << (DRAW_BITS - CHANCE_BITS)
