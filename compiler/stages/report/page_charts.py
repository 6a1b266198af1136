"""Chooses the charts of the page and writes their captions; `figures` has the numbers, `charts` draws."""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from coldpress.compiler.stages.report import charts, figures
from coldpress.compiler.stages.report.charts import Chart
from coldpress.compiler.stages.report.figures import FrequencyCurve, HotOverlap
from coldpress.runtime.cli.ladder import legend
from coldpress.runtime.dram.experts import mean_held
from coldpress.runtime.quantities import show_bytes
from coldpress.runtime.store.computing import dense_seconds
from coldpress.runtime.store.resident import scored_bytes
from coldpress.schemas.activations import Activations
from coldpress.schemas.corpus import Corpus
from coldpress.schemas.device import DeviceProfile
from coldpress.schemas.experts import ExpertCurve
from coldpress.schemas.families import dense_family, of_layers
from coldpress.schemas.layout import Layout, Plan, placed_parts
from coldpress.schemas.metrics import LadderStep, PlanDrafts, Verification
from coldpress.schemas.model import Distillation, Model
from coldpress.schemas.order import Order
from coldpress.schemas.package import Package
from coldpress.schemas.placement import Placement
from coldpress.schemas.plans import Plans
from coldpress.schemas.predictors import LayerPredictor, Predictors
from coldpress.schemas.sparsity import Sparsity

NUM_CURVES = 5


@dataclass(frozen=True)
class ChartInputs:
    model: Model
    device: DeviceProfile
    activations: Activations
    sparsity: Sparsity
    placement: Placement
    order: tuple[Order, ...]
    predictors: Predictors | None
    layout: Layout
    plans: Plans
    package: Package
    verification: Verification
    corpus: Corpus
    seed: int


def charts_of(inputs: ChartInputs, curves: tuple[FrequencyCurve, ...]) -> Iterator[Chart]:
    if inputs.verification.ladder:
        yield ladder_chart(inputs.verification.ladder)
    for found in inputs.verification.drafts:
        yield _drafts_chart(found)
    if not isinstance(inputs.sparsity.formats, str):
        yield from _formats_charts(inputs)
    yield _density_chart(inputs)
    if any(part.num_pinned or part.cache_slots for part in inputs.plans.largest_plan.parts):
        yield _share_chart(inputs.layout, inputs.plans.largest_plan)
    if inputs.model.relufication is not None:
        yield _training_chart("Relufication", "model with its new activation", inputs.model.relufication)
    if inputs.model.distillation is not None:
        yield _training_chart("Distillation", "sparse model", inputs.model.distillation)
    if curves:
        yield _frequency_chart(curves)
        yield _order_chart(inputs)
    if (curve := inputs.plans.experts) is not None:
        yield _experts_chart(curve, inputs)
    if overlaps := figures.hot_overlaps(inputs.activations, inputs.sparsity):
        yield _overlap_chart(overlaps)
    if len(inputs.activations.layers) > 1:
        yield _similarity_chart(inputs.activations)
    if inputs.placement.shares_tried:
        yield _pinned_chart(inputs.placement)


def ladder_chart(steps: Sequence[LadderStep], of: str = "") -> Chart:
    """Draws what each mechanism brings, as a waterfall; `of` begins the title."""
    bars, reached = [], 0.0
    for step in steps:
        bars.append((step.name, reached, step.tokens_per_s, step.kept))
        reached = step.tokens_per_s if step.kept else reached
    caption = (
        "Simulated tokens per second with one mechanism more at a time, in the same DRAM, from the top down. It begins "
        "with dense runs: every unit read, computing while reading, and as many layers pinned as DRAM holds. A step "
        "that makes it slower is left out, unless later steps need it. The bars are simulated on the second half of "
        "the first decoded tokens, and the table above on all test tokens, so the two differ a little."
    )
    meanings = tuple(legend([step.name for step in steps]))
    return Chart(f"{of}What each mechanism brings", charts.waterfall("tokens/s", bars), caption, meanings)


def _drafts_chart(found: PlanDrafts) -> Chart:
    rejected = [drafted - accepted for drafted, accepted in zip(found.drafted, found.accepted, strict=True)]
    label, passes = f"drafts under plan {found.plan}", range(1, 1 + len(rejected))
    svg = charts.stacked(label, {"accepted": found.accepted, "rejected": rejected}, passes, "pass", percent=False)
    caption = (
        f"Drafts of {found.draft} under plan {found.plan} that the model accepted, pass by pass, in a greedy "
        "continuation of test text. A pass gives one token more than it accepts."
    )
    return Chart("Accepted drafts by pass", svg, caption)


def _formats_charts(inputs: ChartInputs) -> Iterator[Chart]:
    """Draws the bits that each matrix of each layer has, and the losses by which they were chosen."""
    found = inputs.sparsity
    caption = "Bits of a weight, scales included, in the formats of each layer's matrices."
    bits = figures.matrix_bits(inputs.model, found.formats)
    yield Chart("Bits by layer and matrix", charts.lines("bits of a weight", bits, percent=False), caption)
    family = dense_family(inputs.model.spec)
    loss = None if found.curves is None else found.curves.format_loss(of_layers(found.formats), family)
    if loss is None or not loss.expected:
        return
    lost = figures.expected_losses(loss.expected, inputs.model.spec)
    caption = (
        "Divergence to expect of rounding each matrix, by which the formats were chosen: "
        f"{sum(one.mean_kld for one in loss.expected):.3f} nats a token in all, {loss.mean_kld:.3f} measured."
    )
    svg = charts.stacked("nats a token", lost, range(inputs.model.spec.num_hidden_layers), percent=False)
    yield Chart("Cost of rounding by layer and matrix", svg, caption)


def _density_chart(inputs: ChartInputs) -> Chart:
    series: dict[str, dict[int, float]] = {}
    predicted = inputs.predictors.layers if inputs.predictors else ()
    for densities in inputs.sparsity.densities:
        series[f"{densities.family} planned"] = dict(enumerate(densities.per_layer))
        measured = {
            entry.layer: found.density
            for entry in inputs.activations.layers
            for found in entry.families
            if found.family == densities.family and found.density is not None
        }
        if measured and measured != series[f"{densities.family} planned"]:
            series[f"{densities.family} active"] = measured
    caption = "Share of a family's units that a token uses: as planned"
    caption += ", as calibration text activates them" if len(series) > len(inputs.sparsity.densities) else ""
    caption += ", and what the predictors choose on text that they were not trained on." if predicted else "."
    if predicted:
        series["predicted"] = {entry.layer: entry.predicted_density for entry in predicted}
    return Chart("Density", charts.lines("density", series), caption)


def _share_chart(layout: Layout, plan: Plan) -> Chart:
    pinned, cached, total = defaultdict(int), defaultdict(int), defaultdict(int)
    for part, section in placed_parts(plan, layout.sections):
        pinned[part.layer] += part.num_pinned * section.unit_bytes
        cached[part.layer] += part.cache_slots * section.unit_bytes
        total[part.layer] += section.num_units * section.unit_bytes
    layers = sorted(total)
    series = {
        "pinned": [pinned[layer] / total[layer] for layer in layers],
        "cache slots": [cached[layer] / total[layer] for layer in layers],
    }
    caption = "Share of each layer's flash bytes that DRAM has room for: pinned units, and slots of the cache."
    return Chart("Kept in DRAM", charts.stacked("share of the layer's units", series, layers), caption)


def _training_chart(title: str, student: str, training: Distillation) -> Chart:
    curve = training.curve
    kept = min(curve, key=lambda point: point.validation_loss).validation_kl
    caption = (
        f"KL divergence of the {student} from the dense one on validation text while "
        f"the recipe {training.recipe} trained: "
        f"{curve[0].validation_kl:.3f} before, {kept:.3f} where the weights were kept."
    )
    points = {float(point.step): point.validation_kl for point in curve}
    return Chart(title, charts.line("updates", "KL, nats per token", points), caption)


def _frequency_chart(curves: tuple[FrequencyCurve, ...]) -> Chart:
    chosen = [curves[i] for i in sorted({round(i) for i in np.linspace(0, len(curves) - 1, NUM_CURVES)})]
    several = len({curve.family for curve in curves}) > 1
    names = {f"layer {curve.layer}" + (f" {curve.family}" if several else ""): curve.frequency for curve in chosen}
    hot = float(np.mean([curve.hot_units for curve in curves]))
    caption = (
        f"How often a unit is active, most active first. On average {100 * hot:.0f} % of the units account for 80 % of "
        "the activations; a power law is a straight line."
    )
    return Chart("Activation frequency", charts.frequencies("tokens on which it is active", names), caption)


def _experts_chart(curve: ExpertCurve, inputs: ChartInputs) -> Chart:
    series = {"last used": curve.lru_misses, "most used before": curve.static_misses}
    points = {name: dict(enumerate(misses, start=1)) for name, misses in series.items()}
    held = mean_held(inputs.plans.largest_plan, inputs.model.spec, inputs.layout.sections)
    caption = (
        "Share of the uses of experts that read flash, by the number of experts that a layer keeps in DRAM: those used "
        "last, or those that earlier text used most. Measured on held-out calibration text. "
    )
    if held is not None:
        caption += f"This plan has room for {held:.1f} of {len(curve.lru_misses)} experts in a layer. "
    caption += f"{curve.persistence:.0%} of a token's experts served the token before it"
    if curve.predictability is not None:
        caption += f", and {curve.predictability:.0%} are known a layer before"
    if (times := figures.most_together(inputs.activations)) is not None:
        caption += f"; the most attached pair serves the same token {times:.1f} times as often as by chance"
    return Chart("Experts in DRAM", charts.lines("uses that read flash", points, "experts in DRAM"), f"{caption}.")


def _order_chart(inputs: ChartInputs) -> Chart:
    entries = [entry for part in inputs.order for entry in part.entries]
    before = figures.structural_adjacency(inputs.activations, inputs.sparsity)
    series: dict[str, dict[int, float]] = defaultdict(dict)
    for entry in entries:
        if (own := before.get((entry.layer, entry.family))) is not None:
            series[f"{entry.family} as ordered"][entry.layer] = entry.adjacent_coactivation
            series[f"{entry.family} in the model's order"][entry.layer] = own
    caption = "Share of activations whose flash neighbour is active on the same token, so that one read serves both."
    return Chart("Order on flash", charts.lines("adjacent activations", series), caption)


def _overlap_chart(overlaps: tuple[HotOverlap, ...]) -> Chart:
    series: dict[str, dict[int, float]] = defaultdict(dict)
    several = len({entry.family for entry in overlaps}) > 1
    for entry in overlaps:
        name = f" {entry.family}" if several else ""
        series[f"in one context{name}"][entry.layer] = entry.context
        if entry.task is not None:
            series[f"in one task{name}"][entry.layer] = entry.task
    caption = (
        "Share of the hottest fifth of the units over all text that is also hottest in a single context or task. Where "
        "it is low, the cache, which follows the text, serves better than pinning."
    )
    return Chart("Hot units by text", charts.lines("still among the hottest", series), caption)


def _similarity_chart(activations: Activations) -> Chart:
    series: dict[str, dict[int, float]] = defaultdict(dict)
    for entry in activations.layers:
        if entry.input_similarity is not None:
            series["cosine"][entry.layer] = entry.input_similarity
        for found in entry.top_precision:
            series[f"largest {100 * found.density:.0f} %"][entry.layer] = found.precision
    caption = (
        "How similar the MLP input of a layer is to that of the layer before: cosine, and the share of its largest "
        "channels that are the largest there too. Where it is high, units can be preloaded one layer early."
    )
    return Chart("Inputs across layers", charts.lines("similarity", series), caption)


def _pinned_chart(placement: Placement) -> Chart:
    seconds = {100 * entry.share: 1000 * entry.flash_s_per_token for entry in placement.shares_tried}
    caption = (
        "Modelled flash time per token, by the share of the units' DRAM that is pinned; the rest is cache. Replayed on "
        f"tokens that no placement was made from. {100 * placement.pinned_share:.0f} % is pinned."
    )
    return Chart("Pinned or cached", charts.line("pinned, %", "flash time per token, ms", seconds), caption)


def predictor_part(inputs: ChartInputs) -> dict[str, Any] | None:
    """Returns the page's part about predictors: a sentence, the columns and rows of a table of layers, and charts."""
    found = inputs.predictors
    if found is None or not found.layers:
        return None
    return {
        "sentence": _costs(inputs, found),
        "columns": (
            *("layer", "rank", "parameters", "bytes", "active", "recall", "precision"),
            *("predicted / active", "output cosine"),
        ),
        "rows": list(map(_row, found.layers)),
        "charts": [_quality_chart(found.layers), *([_bytes_chart(found)] if len(found.tried) > 1 else [])],
    }


def _costs(inputs: ChartInputs, found: Predictors) -> str:
    count = sum(entry.num_parameters for entry in found.layers)
    stored = sum(entry.nbytes for entry in found.layers)
    run = inputs.verification.run
    decode_s = dense_seconds(inputs.device, scored_bytes(inputs.model.spec, found.layers))
    share = decode_s / (run.modelled_s / run.num_tokens)
    return (
        f"{count:,} parameters in {show_bytes(stored)}, {100 * count / inputs.model.num_parameters:.1f} % of the "
        f"model's; computing with them takes {100 * share:.1f} % of a token's simulated time. Recall, "
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
    return Chart("Predictors", charts.lines("recall and precision", series), caption)


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
    return Chart("Size of predictors", charts.line("MiB", "added perplexity, %", lost), caption)
