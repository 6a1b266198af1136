"""Estimates what a draft model brings a dense run, before a build compares the two models.

The passes are those of Qwen2.5-Coder-0.5B, which drafts for the 1.5B (docs/experiments, product-34): how many of
another pair's drafts are right depends on both models and on the text. The law gives the seconds of a pass.
"""

from typing import NamedTuple

from coldpress.compiler.checkpoint.shapes import Shapes
from coldpress.compiler.cost_model import HasShapes, kv_cache_bytes, row_table_bytes, weight_bytes
from coldpress.compiler.dense_run import dense_run
from coldpress.compiler.quote.records import Estimate
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
"""The slowest first."""


def drafted_speed(model: HasShapes, draft: Shapes, division: Sparsity, device: DeviceProfile) -> Estimate:
    """Estimates tokens/s of the dense run that `division` describes, within its budget, the draft model included."""
    if not division.is_whole or model.spec.is_mixture:
        return Estimate(value=None, basis="none: drafts are for dense runs, whose tokens all read the same")
    context = division.context_length
    formats = with_own(DRAFT_FORMAT, HeadFormat(role=draft.spec.head_role, format=DRAFT_FORMAT))
    draft_bytes = weight_bytes(draft, formats) - row_table_bytes(draft.spec, formats)
    draft_bytes += kv_cache_bytes(draft.spec, context, "fp16")
    whole = dense_run(draft, formats, context, device.dram_bytes.value, device)
    left = division.budget.dram_budget_bytes - draft_bytes

    def token_s(passes: Passes) -> float | None:
        run = dense_run(
            model, division.formats, context, left, in_pass(device, 1 + round(passes.drafts)), division.kv_cache
        )
        return None if run is None or whole is None else (run.token_s + passes.drafts * whole.token_s) / passes.tokens

    found = [1 / seconds for passes in MEASURED if (seconds := token_s(passes)) is not None]
    if not found:
        return Estimate(value=None, basis="none: the draft model leaves too little DRAM")
    words = "; ".join(f"{one.tokens} tokens a pass of {one.drafts} drafts on {one.text}" for one in MEASURED)
    basis = f"model: {words}, measured with Qwen2.5-Coder-0.5B for the 1.5B; a build compares these models"
    return Estimate(value=found[1], low=found[0], high=found[2], is_most=device.compute is None, basis=basis)
