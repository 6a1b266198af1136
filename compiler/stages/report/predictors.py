"""Writes the page's part about activation predictors: size and quality layer by layer, and their cost."""

import math
from dataclasses import dataclass

from coldpress.compiler.stages.report import charts as _charts
from coldpress.compiler.stages.report.chart import Chart
from coldpress.compiler.stages.report.page_charts import Inputs
from coldpress.runtime.quantities import show_bytes
from coldpress.runtime.store.computing import dense_seconds
from coldpress.runtime.store.resident import scored_bytes
from coldpress.schemas.predictors import LayerPredictor, Predictors

COLUMNS = (
    "layer",
    "rank",
    "parameters",
    "bytes",
    "active",
    "recall",
    "precision",
    "predicted / active",
    "output cosine",
)


@dataclass(frozen=True)
class PredictorPart:
    sentence: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    """One row per layer that has a predictor."""
    charts: tuple[Chart, ...]


def predictor_part(inputs: Inputs) -> PredictorPart | None:
    found = inputs.predictors
    if found is None or not found.layers:
        return None
    charts = (_quality_chart(found.layers), *([_bytes_chart(found)] if len(found.tried) > 1 else []))
    return PredictorPart(_costs(inputs, found), COLUMNS, tuple(map(_row, found.layers)), charts)


def decode_share(inputs: Inputs) -> float:
    """Returns the share of a token's simulated time that computing with the predictors takes."""
    run, predictors = inputs.verification.run, inputs.predictors
    token_s = run.modelled_s / run.num_tokens
    scored = scored_bytes(inputs.model.spec, predictors.layers if predictors else ())
    return dense_seconds(inputs.device, scored) / token_s


def _costs(inputs: Inputs, found: Predictors) -> str:
    count = sum(entry.num_parameters for entry in found.layers)
    stored = sum(entry.nbytes for entry in found.layers)
    return (
        f"{count:,} parameters in {show_bytes(stored)}, {100 * count / inputs.model.num_parameters:.1f} % of the "
        f"model's; computing with them takes {100 * decode_share(inputs):.1f} % of a token's simulated time. Recall, "
        "precision and densities are of calibration tokens held out from training and from every choice; the cosine "
        "compares the MLP's output with and without the units that were not predicted, on validation text."
    )


def _row(entry: LayerPredictor) -> tuple[str, ...]:
    return (
        str(entry.layer),
        str(entry.rank),
        f"{entry.num_parameters:,}",
        show_bytes(entry.nbytes),
        f"{100 * entry.density:.1f} %",
        f"{entry.recall:.4f}",
        f"{entry.precision:.3f}",
        f"{entry.predicted_density / entry.density:.2f}" if entry.density else "-",
        f"{entry.output_cosine:.4f}",
    )


def _quality_chart(layers: tuple[LayerPredictor, ...]) -> Chart:
    series = {
        "recall": {entry.layer: entry.recall for entry in layers},
        "precision": {entry.layer: entry.precision for entry in layers},
    }
    caption = "Share of the active units that are predicted, and share of the predicted units that are active."
    return Chart("Predictors", _charts.lines("recall and precision", series), caption)


def _bytes_chart(found: Predictors) -> Chart:
    """Draws the loss of quality with predictors of other sizes (LLM in a flash B)."""
    if found.ppl_without is None:
        raise ValueError("sizes of predictors were tried and the perplexity without predictors was not")
    lost = {
        entry.predictor_bytes / 2**20: 100 * (entry.ppl / found.ppl_without - 1)
        for entry in found.tried
        if math.isfinite(entry.ppl)
    }
    caption = "Perplexity of validation text with predictors of each size that was tried, over that without."
    return Chart("Size of predictors", _charts.line("MiB", "added perplexity, %", lost), caption)
