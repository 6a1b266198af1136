"""Estimates what a draft model brings a dense run, before a build compares the two models.

The passes are those of Qwen2.5-Coder-0.5B, which drafts for the 1.5B (docs/experiments, product-34): how many of
another pair's drafts are right depends on both models and on the text. The law gives the seconds of a pass.
"""

from typing import NamedTuple

from coldpress.compiler.checkpoint.shapes import Shapes
from coldpress.compiler.cost_model import HasShapes, dense_footprint_bytes, row_table_bytes
from coldpress.compiler.dense_run import dense_run
from coldpress.compiler.quote.records import Estimate
from coldpress.compiler.search.drafts import may_draft
from coldpress.compiler.workflow.settings import DRAFT_FORMAT
from coldpress.runtime.store.computing import in_pass
from coldpress.schemas.device import DeviceProfile
from coldpress.schemas.families import HeadFormat, with_own
from coldpress.schemas.sparsity import Sparsity


class Passes(NamedTuple):
    text: str
    drafts: float
    """Drafts of a pass in the mean."""
    tokens: float
    """New tokens of a pass."""


MEASURED = (Passes("code", 5.1, 3.5), Passes("prose", 4.4, 3.5), Passes("chat", 5.5, 6.5))


def drafted_speed(model: HasShapes, draft: Shapes, division: Sparsity, device: DeviceProfile) -> Estimate:
    """Estimates tokens/s of the dense run that `division` describes, within its budget, the draft model included."""
    if not may_draft(division, model.spec):
        return Estimate(value=None, basis="none: drafts are for dense runs that read, whose tokens all read the same")
    context = division.context_length
    formats = with_own(DRAFT_FORMAT, HeadFormat(role=draft.spec.head_role, format=DRAFT_FORMAT))
    draft_bytes = dense_footprint_bytes(draft, formats, context) - row_table_bytes(draft.spec, formats)
    whole = dense_run(draft, formats, context, device.dram_bytes.value, device)
    left = division.budget.dram_budget_bytes - draft_bytes
    runs = [
        dense_run(model, division.formats, context, left, in_pass(device, 1 + round(one.drafts)), division.kv_cache)
        for one in MEASURED
    ]
    seconds = [
        run.token_s + one.drafts * whole.token_s for run, one in zip(runs, MEASURED, strict=True) if run and whole
    ]
    if len(seconds) < len(MEASURED):
        return Estimate(value=None, basis="none: the draft model leaves too little DRAM")
    low, middle, high = sorted(one.tokens / pass_s for one, pass_s in zip(MEASURED, seconds, strict=True))
    words = "; ".join(f"{one.tokens} tokens a pass of {one.drafts} drafts on {one.text}" for one in MEASURED)
    basis = f"model: {words}, measured with Qwen2.5-Coder-0.5B for the 1.5B; a build compares these models"
    return Estimate(value=middle, low=low, high=high, is_most=device.compute is None, basis=basis)
