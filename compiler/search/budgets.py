"""Chooses the settings of each DRAM budget of a build whose method is open; a quote asks the same search.

Each budget is searched alone first (judge.py). Plans of several budgets share flash.img, and so the selector, formats,
families, layer groups and KV-cache format; density and cache may differ. So the settings that were best under one
budget, or were its fastest dense run, are then searched under all. The build takes those whose worst budget comes
closest to that budget's own best. Settings that are slower than a dense run under any budget are taken only if all are.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from coldpress.compiler.search import MARGIN, Goal, Judged, Shared, Space
from coldpress.compiler.search.density import AllocationInputs
from coldpress.compiler.search.floor import Floor
from coldpress.compiler.search.judge import Searched, searched
from coldpress.compiler.search.replay import Replays
from coldpress.compiler.search.settings import AllocateConfig
from coldpress.compiler.search.words import front_of
from coldpress.schemas.families import Formats
from coldpress.schemas.sparsity import Tried

LOG = logging.getLogger(__name__)


class BudgetChoice(NamedTuple):
    config: AllocateConfig
    formats: Formats | None = None
    """The formats of layers; None if all have the format of `config`."""
    tried: tuple[Tried, ...] = ()
    front: tuple[Tried, ...] = ()


def choices(
    config: AllocateConfig, inputs: AllocationInputs, floor: Floor, budgets: Sequence[int | str]
) -> tuple[BudgetChoice, ...]:
    """Returns the choice for each of `budgets`, the largest first; they differ in density and cache alone. Candidates
    are compared with the same density in all layers; the allocation rule then runs for the chosen ones only. Raises
    DoesNotFitError if nothing fits a budget."""
    found = searched_together(config, inputs, floor, budgets)
    for one in reversed(found):  # the smallest one, which lacks most, first
        if one.best is None:
            raise one.refusal
    return tuple(map(_choice, found))


def searched_together(
    config: AllocateConfig,
    inputs: AllocationInputs,
    floor: Floor,
    budgets: Sequence[int | str],
    narrowed: Callable[[Space], Space] = lambda space: space,
    replays: Replays | None = None,
) -> list[Searched]:
    """Returns a search for each of `budgets`, in bytes or as shares, in the space that `narrowed` leaves: its best is
    the choice of the build of them all. If nothing fits one of the budgets, each is searched alone."""
    replays = replays or Replays(inputs)
    alone = [
        searched(config.model_copy(update={"dram_budget": budget}), inputs, floor, narrowed, replays)
        for budget in budgets
    ]
    return alone if len(alone) == 1 or any(one.best is None for one in alone) else _shared(alone)


def _choice(found: Searched) -> BudgetChoice:
    best, judge, tried = found.best, found.judge, found.tried
    assert best is not None
    budget_bytes = judge.budget_bytes(best.candidate)
    LOG.info("allocate: auto takes %s in %s bytes: %s", best.candidate.method, budget_bytes, tried[0].reason)
    config = judge.config_of(best.candidate, best.has_draft_model)
    return BudgetChoice(config, best.candidate.format, tried, front_of(judge.judged))


def _shared(alone: Sequence[Searched]) -> list[Searched]:
    """Chooses the shared settings; among equals, those that are best under the smallest budget."""
    best = [one for found in reversed(alone) for one in (found.best, found.dense) if one is not None]
    kinds = dict.fromkeys(one.candidate.shared for one in best)
    within = [[of_shared(found, shared) for found in alone] for shared in kinds]
    allowed = [searches for searches in within if not any(map(_is_slower_than_dense, searches, alone))]
    return min(allowed or within, key=lambda searches: _worst(searches, alone))


def of_shared(found: Searched, shared: Shared) -> Searched:
    """Searches one selector in one format under a budget: densities up to 1, and caches."""
    space = replace(
        found.space,
        methods=(shared.method,),
        formats=(shared.format,),
        heads=lambda formats: (),
        kv_caches=(shared.kv_cache,),
        densities=lambda *which: found.judge.up_to_all(shared.method, found.space.densities(*which)),
        streams_attention=(shared.streams_attention,),
    )
    return replace(found.within(space), alone=found.best)


def _is_slower_than_dense(one: Searched, alone: Searched) -> bool:
    """Tells whether a budget has no candidate, or its best is clearly slower than a dense run and not fast enough."""
    if one.best is None:
        return True
    dense_s = one.best.token_s if alone.dense is None else alone.dense.token_s
    return one.best.token_s > (1 + MARGIN) * max(dense_s, one.goal.max_token_s or 0.0)


def _worst(searches: Sequence[Searched], alone: Sequence[Searched]) -> tuple[float, float]:
    """Returns the distance of the worst budget from its own best: as a ratio of seconds, then of perplexity."""
    ratios = [_ratios(one.best, found.best, one.goal) for one, found in zip(searches, alone, strict=True)]
    return max(time for time, _ in ratios), max(quality for _, quality in ratios)


def _ratios(one: Judged | None, own: Judged | None, goal: Goal) -> tuple[float, float]:
    """Returns the ratios to the budget's own best, of seconds and perplexity; more speed than asked for is no gain."""
    assert own is not None
    if one is None:
        return float("inf"), float("inf")
    enough_s = max(own.token_s, goal.max_token_s or 0.0)
    return max(1.0, one.token_s / enough_s), (one.ppl_ratio or 1.0) / (own.ppl_ratio or 1.0)
