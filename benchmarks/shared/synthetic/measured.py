"""Measures the statistics that a drawn trace has, from its events; they differ from those asked by what was drawn."""

import numpy as np

from benchmarks.shared.synthetic.law import Law
from benchmarks.shared.synthetic.statistics import Figures, Statistics, num_hot
from benchmarks.shared.synthetic.trace import Synthetic
from coldpress.runtime.artifact.reader import Artifact
from coldpress.runtime.trace import FETCH
from coldpress.schemas.layout import PartPlan, Section


class _Counts:
    """What is counted of one part."""

    def __init__(self, artifact: Artifact, part: PartPlan, section: Section, law: Law, asked: Statistics) -> None:
        """Begins at zero."""
        order, rank = artifact.order(section), artifact.rank(part.layer, part.family)
        self._order = order
        is_hot = np.zeros(order.size, bool)
        is_hot[rank[: num_hot(order.size, asked.hot_share)]] = True
        self._is_hot = is_hot[order]
        self._in_group = np.arange(1, order.size) % asked.group_units != 0  # a unit and the one before it on flash
        self._before: np.ndarray | None = None
        self.num_uses = self.num_hot = self.num_repeated = self.num_in_first = self.num_pairs = 0
        chances = np.empty(order.size)
        chances[rank] = law.chances
        first, second = chances[order][:-1][self._in_group], chances[order][1:][self._in_group]
        self.pairs_by_chance, self.most_pairs = float((first * second).sum()), float(np.minimum(first, second).sum())
        """Expected pairs of a token if groups have no effect, and if they have the largest."""

    def add(self, ids: np.ndarray) -> None:
        """Counts a token's units."""
        by_id = np.zeros(self._order.size, bool)
        by_id[ids] = True
        used = by_id[self._order]
        self.num_uses += ids.size
        self.num_hot += int(np.count_nonzero(used & self._is_hot))
        self.num_pairs += int(np.count_nonzero(used[1:] & used[:-1] & self._in_group))
        if self._before is None:
            self.num_in_first = ids.size
        else:
            self.num_repeated += int(np.count_nonzero(used & self._before))
        self._before = used


def measured(trace: Synthetic) -> Figures:
    """Returns the statistics of the trace's events, which it draws once more."""
    counts = {
        (part.layer, part.family): _Counts(trace.artifact, part, section, law, trace.asked)
        for part, section, law in trace.parts
    }
    for event in trace:
        if event.kind == FETCH:
            counts[event.layer, event.family].add(event.ids)
    found, num_tokens = counts.values(), trace.asked.tokens
    num_uses = sum(one.num_uses for one in found)
    num_later = num_uses - sum(one.num_in_first for one in found)
    by_chance = sum(one.pairs_by_chance for one in found)
    by_groups = sum(one.num_pairs for one in found) / num_tokens - by_chance
    most_by_groups = sum(one.most_pairs for one in found) - by_chance
    return Figures(
        density=num_uses / num_tokens / sum(section.num_units for _, section, _ in trace.parts),
        hot_mass=sum(one.num_hot for one in found) / max(1, num_uses),
        repeated=sum(one.num_repeated for one in found) / max(1, num_later),
        coactivation=by_groups / most_by_groups if most_by_groups else None,
    )
