"""Counts DRAM beside units, by use: whatever divides a budget fills this one record, which words every refusal."""

from typing import NamedTuple

from coldpress.schemas.errors import DoesNotFitError


class OverBudgetError(DoesNotFitError):
    """A DRAM budget cannot hold what a run needs before it caches any unit."""

    def __init__(self, text: str, needed_bytes: int) -> None:
        super().__init__(text)
        self.needed_bytes = needed_bytes


class Held(NamedTuple):
    """Bytes of DRAM that a run holds besides units, which have the rest of the budget (ActiveFlow 4.1, Eqs. 2, 8)."""

    resident: int
    """Tensors that are always in DRAM, as stored in the artifact."""
    predictors: int
    kv_cache: int
    bookkeeping: int
    """Tables, slot maps, objects and a token's working memory (runtime/dram/bookkeeping.py)."""
    buffers: int = 0
    """The read buffer and the preload buffer."""
    draft: int = 0

    @property
    def num_bytes(self) -> int:
        return sum(self)

    def over(self, budget_bytes: int, remedy: str, by: str = "", pinned_bytes: int = 0) -> OverBudgetError:
        """Returns the refusal of a budget that holds less; `by` names the plan or format that needs so much."""
        needed = self.num_bytes + pinned_bytes
        uses = (
            *((self.resident, "resident tensors"), (self.kv_cache, "KV cache"), (self.bookkeeping, "bookkeeping")),
            *((self.predictors, "predictors"), (self.buffers, "buffers"), (pinned_bytes, "pinned units")),
            (self.draft, "draft model"),
        )
        listed = ", ".join(f"{size:,} {name}" for size, name in uses if size)
        return OverBudgetError(
            f"a DRAM budget of {budget_bytes:,} bytes was asked for, {needed:,} are needed before any unit is "
            f"cached{by}: {listed}; {remedy}",
            needed,
        )
