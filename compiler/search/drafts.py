"""Compares dense runs with and without a draft model, in the same DRAM."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from coldpress.compiler.candidates import AUTO
from coldpress.compiler.cost_model import flash_bytes
from coldpress.compiler.draft_passes import COUNTS, MODEL, best_drafts
from coldpress.compiler.search import MARGIN
from coldpress.compiler.search.density import AllocationInputs
from coldpress.compiler.search.replay import Replays
from coldpress.runtime.drafts import NO_DRAFT
from coldpress.runtime.plugins import load
from coldpress.runtime.sparsity import Selector
from coldpress.runtime.store.computing import in_pass
from coldpress.schemas.errors import DoesNotFitError
from coldpress.schemas.model import ModelSpec
from coldpress.schemas.sparsity import Sparsity


class DraftSavings:
    def __init__(self, named: str | None, inputs: AllocationInputs) -> None:
        """Takes the value of the key `draft`; without a draft model in `inputs`, `of` returns None."""
        self._named, self._inputs = named, inputs
        self._replays: Mapping[int, Replays] = {
            count: Replays(replace(inputs, device=in_pass(inputs.device, count)))
            for count in range(1, 2 + COUNTS[-1] if inputs.drafter else 1)
        }

    def of(self, plain: Sparsity, token_s: float, divided: Callable[[], Sparsity]) -> tuple[Sparsity, float] | None:
        """Returns the budget's division with the draft model, and its seconds per token; None unless it is clearly
        faster or was asked for.

        Args:
            plain: The division without the draft model, at `token_s` seconds per token.
            divided: Divides the same budget with the draft model.
        """
        drafter = self._inputs.drafter
        if drafter is None or self._named not in (AUTO, MODEL) or not may_draft(plain, self._inputs.model.spec):
            return None
        try:
            division = divided()
        except DoesNotFitError:
            if self._named == MODEL:
                raise
            return None
        found = best_drafts(drafter, [replays.of(division).token_s for replays in self._replays.values()])
        pays = found.most_s <= (1 - MARGIN) * token_s
        return (division, found.token_s) if pays or self._named == MODEL else None


def may_draft(plain: Sparsity, spec: ModelSpec) -> bool:
    """Returns whether drafts may save reads: a dense run uses every unit, and does not hold all of them."""
    budget = plain.budget
    is_whole = load("coldpress.runtime.sparsity", Selector, plain.method).is_whole and not spec.is_mixture
    return is_whole and flash_bytes(plain.families, spec, plain.formats) > budget.cache_bytes + budget.buffer_bytes


def without(named: str | None) -> str | None:
    """Returns the key `draft` for a division without the draft model."""
    return NO_DRAFT if named in (AUTO, MODEL) else named
