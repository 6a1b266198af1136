"""Searches the candidates of one DRAM budget: for `allocate`, and for a quote before any build (compiler/quote)."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

from coldpress.compiler.search import Goal, Judged, Search, Space, beam, fastest_dense
from coldpress.compiler.stages.allocate._config import AllocateConfig
from coldpress.compiler.stages.allocate._division import asked_budgets_of
from coldpress.compiler.stages.allocate._judge import BudgetJudge
from coldpress.compiler.stages.allocate._quality import Floor
from coldpress.compiler.stages.allocate._replay import Replays
from coldpress.compiler.stages.allocate._rules import Inputs
from coldpress.compiler.stages.allocate._words import tried_of
from coldpress.schemas.errors import ColdpressError
from coldpress.schemas.memory import OverBudgetError
from coldpress.schemas.sparsity import Tried

LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Searched:
    judge: BudgetJudge
    goal: Goal
    search: Search
    space: Space
    judged: list[Judged] = field(default_factory=list)
    alone: Judged | None = None
    """The choice of this budget by itself, where several budgets share another one."""

    def within(self, space: Space) -> "Searched":
        """Searches a part of the space; candidates that are judged already cost nothing."""
        return replace(self, judged=self.search(space, self.judge, self.goal))

    @cached_property
    def best(self) -> Judged | None:
        return self.goal.best(self.judged)

    @property
    def dense(self) -> Judged | None:
        return fastest_dense(self.judged)

    @property
    def tried(self) -> tuple[Tried, ...]:
        """The best candidate of each selector with a reason in words, the taken one first; empty if none fits."""
        if self.best is None:
            return ()
        return tried_of(self.best, self.judge.judged, self.judge.refusals, self.goal, self.alone)

    @property
    def refusal(self) -> ColdpressError:
        """The reason of the candidate that needs the least DRAM; of the first one, if DRAM is not what lacks."""
        needing = [one for one in self.judged if one.needed_bytes is not None]
        if not needing:
            return next(iter(self.judge.refusals.values()))
        least = min(needing, key=lambda one: one.needed_bytes or 0)
        return OverBudgetError(str(least.refusal), least.needed_bytes or 0)


def searched(
    config: AllocateConfig,
    inputs: Inputs,
    floor: Floor,
    narrowed: Callable[[Space], Space] = lambda space: space,
    replays: Replays | None = None,
    search: Search = beam.judged,
) -> Searched:
    """Judges the candidates of a build whose method is open, as `search` does, in the space that `narrowed` leaves.
    Searches of several budgets share `replays`, which hold the trace.

    Raises:
        DoesNotFitError: if the device has less DRAM than the budget.
    """
    asked_budgets_of(config, inputs.model, inputs.device)
    replays = replays or Replays(inputs)
    judge = BudgetJudge(config, inputs, floor, replays)
    goal = Goal(None if config.min_tokens_per_s is None else 1 / config.min_tokens_per_s)
    space = narrowed(judge.space)
    return Searched(judge, goal, search, space).within(space)
