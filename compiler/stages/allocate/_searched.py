"""Searches the candidates of one DRAM budget: for `allocate`, and for a quote before any build (compiler/quote)."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

from coldpress.compiler.candidates import AUTO, DEFAULT_FORMAT, formats_for
from coldpress.compiler.search import Goal, Judged, Search, Space, fastest_dense
from coldpress.compiler.stages.allocate._config import AllocateConfig
from coldpress.compiler.stages.allocate._division import budgets_bytes
from coldpress.compiler.stages.allocate._judge import BudgetJudge
from coldpress.compiler.stages.allocate._quality import Floor
from coldpress.compiler.stages.allocate._replay import Replays
from coldpress.compiler.stages.allocate._rules import Inputs
from coldpress.compiler.stages.allocate._words import tried_of
from coldpress.runtime.plugins import load
from coldpress.schemas.sparsity import Tried

LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Searched:
    """The candidates that a search judged."""

    judge: BudgetJudge
    goal: Goal
    search: Search
    judged: list[Judged]

    def within(self, narrowed: Callable[[Space], Space]) -> "Searched":
        """Searches the part of the space that `narrowed` leaves; candidates that are judged already cost nothing."""
        return replace(self, judged=self.search.judged(narrowed(self.judge.space), self.judge, self.goal))

    @cached_property
    def best(self) -> Judged | None:
        """The candidate that the goal takes; None if none fits."""
        return self.goal.best(self.judged)

    @property
    def dense(self) -> Judged | None:
        """The fastest dense run; None if none fits."""
        return fastest_dense(self.judged)

    @property
    def tried(self) -> tuple[Tried, ...]:
        """The best candidate of each selector with a reason in words, the taken one first; empty if none fits."""
        return () if self.best is None else tried_of(self.best, self.judged, self.judge.refusals, self.goal)


def searched(
    config: AllocateConfig,
    inputs: Inputs,
    floor: Floor,
    narrowed: Callable[[Space], Space] = lambda space: space,
    replays: Replays | None = None,
) -> Searched:
    """Judges the candidates of a build whose method is open, as `config.search` does, in the space that `narrowed`
    leaves. Searches of several budgets share `replays`, which hold the trace.

    Raises:
        DoesNotFitError: if the device has less DRAM than the budget.
    """
    in_default = config if config.format != AUTO else config.model_copy(update={"format": DEFAULT_FORMAT})
    (budget,) = budgets_bytes(in_default, inputs.model, inputs.device)
    replays = replays or Replays(inputs, config.overprediction)
    judge = BudgetJudge(config.model_copy(update={"dram_budget": budget}), inputs, floor, replays)
    for name in sorted({*formats_for(config.format)} - {*judge.formats}):
        LOG.info(
            "allocate: %s is no candidate: numpy multiplies it, and the profile of %s has no rate for it; format=%s "
            "takes it anyway",
            name,
            inputs.device.name,
            name,
        )
    goal = Goal(None if config.min_tokens_per_s is None else 1 / config.min_tokens_per_s)
    search = load("coldpress.compiler.search", Search, config.search)
    return Searched(judge, goal, search, []).within(narrowed)
