"""Renders the HTML page: one file, no links, no scripts. Adds words and charts to the numbers of `figures`."""

from collections import defaultdict
from pathlib import Path
from typing import Any

import jinja2
import numpy as np

from coldpress.compiler.block_statistics import with_error
from coldpress.compiler.cost_model import weight_bytes
from coldpress.compiler.headline import at_most, headline, pays, rate, warning
from coldpress.compiler.run_command import PROGRAM, run_command
from coldpress.compiler.stages.report import comparison
from coldpress.compiler.stages.report.charts import dram_bars
from coldpress.compiler.stages.report.figures import FrequencyCurve, frequency_curves
from coldpress.compiler.stages.report.page_charts import ChartInputs, charts_of, predictor_part
from coldpress.runtime.plugins import load
from coldpress.runtime.quantities import show_bytes, show_number
from coldpress.runtime.quantization._mixed import in_words
from coldpress.runtime.sparsity import Selector
from coldpress.runtime.store.computing import basis
from coldpress.schemas.device import UNCOMPUTED, DeviceProfile
from coldpress.schemas.errors import printable
from coldpress.schemas.families import FamilyName
from coldpress.schemas.law import combined
from coldpress.schemas.layout import Layout, Plan, placed_parts
from coldpress.schemas.metrics import Metrics, PlanDrafts, PlanFigures, RunMetrics, Verification

PLAN_COLUMNS = ("DRAM budget", "selector", "density", "cache", *comparison.COLUMNS[1:4], "perplexity over the source's")
DENSE = "dense"


def render(metrics: Metrics, inputs: ChartInputs) -> str:
    curves = frequency_curves(inputs.activations, inputs.sparsity)
    template = environment().get_template("template.html.j2")
    return template.render(
        metrics=metrics,
        device=inputs.device,
        plan=inputs.plans.largest_plan,
        verification=inputs.verification,
        weight_bytes=weight_bytes(inputs.model, inputs.sparsity.formats),
        formats=in_words(inputs.sparsity.formats),
        cards=_cards(metrics, inputs.device),
        headline=headline(metrics, inputs.device.title),
        dram=dram_bars(metrics),
        answers=[comparison.front_chart({metrics.model: metrics}), comparison.time_chart({metrics.model: metrics})],
        charts=[*filter(None, [comparison.reads_chart(metrics)]), *charts_of(inputs, curves)],
        verdict=_verdicts(metrics, inputs),
        columns=comparison.COLUMNS,
        plans=list(map(_plan_row, metrics.plans)),
        plan_columns=PLAN_COLUMNS,
        choices=inputs.plans.choices,
        command=run_command([PROGRAM], Path(inputs.package.folder).name, metrics.sample),
        compared=list(comparison.compared(metrics)),
        front=comparison.front_rows(metrics),
        front_columns=comparison.FRONT_COLUMNS,
        measured=_measured(metrics, inputs),
        families=_families(inputs.layout, inputs.plans.largest_plan),
        hot=_hot_units(curves),
        predictors=predictor_part(inputs),
        origins=origins(inputs),
    )


def _cards(metrics: Metrics, device: DeviceProfile) -> list[tuple[str, str]]:
    speed = rate(metrics.modelled_tokens_per_s)
    worse = round(metrics.ppl_ratio - 1, 3) + 0.0  # a sum is never the -0.0 that rounding may give
    found = [
        (show_bytes(metrics.artifact_bytes), "artifact"),
        (f"{show_bytes(metrics.resident_bytes)} / {show_bytes(metrics.budget_bytes)}", "fixed in DRAM / DRAM budget"),
        (show_bytes(metrics.flash_bytes_per_token), "read from flash per token"),
        (f"{metrics.reads_per_token:.1f}", "reads per token"),
        (f"{100 * metrics.hit_rate:.1f} %", "cache hit rate"),
        (
            f"{metrics.ppl_source:.2f} → {metrics.ppl_artifact:.2f}",
            f"perplexity, source → artifact ({100 * worse:+.1f} %)",
        ),
        (
            with_error(metrics.tokens_per_s, metrics.tokens_per_s_deviation, 0),
            "tokens/s on the machine that built this, at its load then; ± is the standard deviation over blocks",
        ),
        (
            (at_most(metrics, speed), f"tokens/s on {device.title}: {UNCOMPUTED}")
            if metrics.modelled_error is None
            else (
                f"{speed} ± {metrics.modelled_error:.0%}",
                f"tokens/s simulated on {device.title}; ± is how far such figures were off on measured machines",
            )
        ),
    ]
    if metrics.gain_over_dense is not None:
        found.append((f"{metrics.gain_over_dense:.2f} ×", "the speed of a dense run"))
    return found


def _verdicts(metrics: Metrics, inputs: ChartInputs) -> list[str]:
    verdict = _verdict(metrics)
    if metrics.method != DENSE and inputs.sparsity.is_whole:
        verdict = "Nothing is pruned at this budget: every token uses every unit."
    words = filter(None, (warning(metrics), pays(metrics), verdict, _quality(metrics)))
    found = [*(text[:1].upper() + text[1:] for text in words), _limit(inputs.verification.run, inputs.device)]
    if fitting := comparison.fitting_formats(metrics):
        found.append(f"The whole model fits this budget, without reading flash, as {' or '.join(fitting)}.")
    return found


def _verdict(metrics: Metrics) -> str:
    gain = metrics.gain_over_dense
    if gain is None:
        return "A dense run does not fit this budget: its buffers alone exceed it."
    if load("coldpress.runtime.sparsity", Selector, metrics.method).is_whole:
        return "This artifact is the dense run itself: every unit is used on every token."
    if gain >= 1:
        return f"Sparsity pays: {gain:.2f} times the speed of a dense run in the same DRAM."
    return (
        f"Sparsity does not pay here: {gain:.2f} times the speed of a dense run in the same DRAM; "
        "build with method=dense."
    )


def _quality(metrics: Metrics) -> str:
    ratio = with_error(metrics.ppl_ratio, metrics.ppl_ratio_error, 4)
    return (
        f"Its perplexity is {ratio} times the original's, on {metrics.num_measured_blocks} of "
        f"{metrics.num_test_blocks} blocks of test text; ± is the standard error over blocks."
    )


def _limit(run: RunMetrics, device: DeviceProfile) -> str:
    flash_ms, dram_ms = (1000 * part / run.num_tokens for part in (run.modelled_flash_s, run.modelled_dram_s))
    whole = f"of {show_number(1000 * run.modelled_s / run.num_tokens)} ms of a token"
    if dram_ms >= flash_ms:
        share = f"{show_number(dram_ms)} {whole}"
        return f"Computing limits the speed: {share} go to computing and copying, by {basis(device)}."
    flash = device.flash
    bounds = {
        "the number of reads": 1000 * run.reads / run.num_tokens / flash.iops,
        "the bytes that are read": 1000 * run.read_bytes / run.num_tokens / flash.bytes_per_s,
    }
    reads_ms, bytes_ms = bounds.values()
    moving_ms = float(combined((reads_ms, bytes_ms, 0.0), flash.law.overlap))
    bounds["waiting for each read's first byte"] = flash_ms - moving_ms
    most = max(bounds, key=lambda name: bounds[name])
    return f"Flash limits the speed: {show_number(flash_ms)} {whole} go to reads, most of it to {most}."


def _plan_row(plan: PlanFigures) -> tuple[str, ...]:
    return (
        plan.plan,
        show_bytes(plan.dram_budget_bytes),
        plan.method,
        f"{plan.density:.2f}",
        plan.cache,
        show_bytes(plan.flash_bytes_per_token),
        f"{plan.reads_per_token:.1f}",
        rate(plan.modelled_tokens_per_s),
        with_error(plan.ppl_ratio, plan.ppl_ratio_error, 4),
    )


def _held_against_the_source(found: Verification) -> list[tuple[str, str, str]]:
    far, on = found.divergence, found.protocol
    return [
        ("perplexity of the source", with_error(found.ppl_source, found.ppl_source_error, 4), "dense, as published"),
        (
            "perplexity of the artifact",
            with_error(found.ppl_artifact, found.ppl_artifact_error, 4),
            f"{with_error(found.ppl_ratio, found.ppl_ratio_error, 4)} times, block by block",
        ),
        (
            "same first choice",
            f"{with_error(100 * found.top1_agreement, 100 * found.top1_agreement_error, 1)} %",
            "of the next tokens, artifact and source",
        ),
        (
            "KL divergence",
            with_error(far.mean_kld, far.mean_kld_error, 4),
            f"nats per token from the source; 99.9 % of tokens up to {far.p999_kld:.3f}, the largest {far.max_kld:.3f}",
        ),
        (
            "change of probability",
            f"{with_error(100 * far.rms_delta_p, 100 * far.rms_delta_p_error, 2)} %",
            "of the true token, root mean square",
        ),
        (
            "measured on",
            f"{found.num_test_tokens:,} tokens",
            f"of {on.corpus}'s test text, in blocks of {on.context_length}, one every {on.stride}; "
            f"the tokens' sha256 is {on.tokens_sha256[:12]}…",
        ),
    ]


def _measured(metrics: Metrics, inputs: ChartInputs) -> list[tuple[str, str, str]]:
    found, layout = inputs.verification, inputs.layout
    run, simulation = found.run, "equal" if found.simulated_equals_real else "different"
    used = (run.hits + run.misses) / run.num_tokens / sum(section.num_units for section in layout.sections)
    amplification = f"{run.read_bytes / run.used_bytes:.2f}" if run.used_bytes else "no reads"
    reads = "no reads"
    if run.reads:
        reads = f"{run.reads / run.num_tokens:.1f} reads of {show_bytes(run.read_bytes / run.reads)} on average"
    return [
        *_held_against_the_source(found),
        ("largest dense logit error", f"{found.max_logit_error:.2e}", "of the largest logit: what the format costs"),
        ("simulation", simulation, "hits, misses, evictions, reads and bytes"),
        ("units used", f"{100 * used:.1f} %", "of all units, per token: found in DRAM or read"),
        (
            "simulated on the device",
            f"{1000 * run.modelled_s / run.num_tokens:.3f} ms",
            f"per token: {1000 * run.modelled_flash_s / run.num_tokens:.3f} ms of flash reads, "
            f"{1000 * run.modelled_dram_s / run.num_tokens:.3f} ms of computing and copying, a request's at once; "
            f"computing by {basis(inputs.device)}",
        ),
        ("flash per token", show_bytes(metrics.flash_bytes_per_token), reads),
        ("read amplification", amplification, "bytes moved over bytes of units that were needed"),
        (
            "waiting for flash",
            f"{1000 * run.flash_s / run.num_tokens:.3f} ms",
            "per token, on the machine that built this",
        ),
        ("decoding", f"{1000 * run.decode_s / run.num_tokens:.3f} ms", "per token, on the machine that built this"),
        ("evictions", f"{run.evictions / run.num_tokens:.1f}", "per token"),
        *map(_drafts_row, found.drafts),
        (
            "DRAM in use",
            show_bytes(run.dram_used_bytes),
            f"of {show_bytes(run.dram_budget_bytes)}, by the runtime's count; the interpreter and its libraries are "
            "outside the budget",
        ),
    ]


def _drafts_row(found: PlanDrafts) -> tuple[str, str, str]:
    same = "those" if found.same_tokens else "not those"
    return (
        "drafts accepted",
        f"{sum(found.accepted)} of {sum(found.drafted)}",
        f"of {found.draft} under plan {found.plan}, {found.tokens_per_pass:.2f} tokens per pass in "
        f"{len(found.drafted)} passes; the tokens are {same} without drafts",
    )


def _families(layout: Layout, plan: Plan) -> list[dict[str, Any]]:
    rows: dict[FamilyName, dict[str, Any]] = {}
    densities: dict[FamilyName, list[float]] = defaultdict(list)
    for part, section in placed_parts(plan, layout.sections):
        row = rows.setdefault(section.family, {"family": section.family, "bytes": 0, "num_pinned": 0, "num_slots": 0})
        row |= {"num_units": section.num_units, "unit_bytes": section.unit_bytes}
        row["bytes"] += section.num_units * section.unit_bytes
        row["num_pinned"] += part.num_pinned
        row["num_slots"] += part.cache_slots
        densities[section.family].append(part.density)
    return [row | {"density": float(np.mean(densities[family]))} for family, row in rows.items()]


def _hot_units(curves: tuple[FrequencyCurve, ...]) -> dict[FamilyName, float]:
    found: dict[FamilyName, list[float]] = defaultdict(list)
    for curve in curves:
        found[curve.family].append(curve.hot_units)
    return {family: float(np.mean(values)) for family, values in found.items()}


def environment(*folders: Path) -> jinja2.Environment:
    """Returns where templates are found: in `folders`, and among the report's own."""
    found = jinja2.Environment(
        loader=jinja2.FileSystemLoader([*folders, Path(__file__).parent]),
        undefined=jinja2.StrictUndefined,
        autoescape=True,
        finalize=shown,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters["size"] = show_bytes
    return found


def shown(value: Any) -> Any:
    """Escapes control characters and marks of writing direction in a stranger's text; line feeds stay."""
    return "\n".join(map(printable, value.split("\n"))) if type(value) is str else value


def origins(inputs: ChartInputs) -> list[tuple[str, str]]:
    model, heuristics = inputs.model, {entry.heuristic for part in inputs.order for entry in part.entries}
    made_by = inputs.package.provenance
    commit = made_by.commit or "not known: the compiler did not run from a checkout"
    commit += ", with changes that are not committed" if made_by.commit and made_by.dirty else ""
    at = f" at {model.revision}" if model.revision else ""
    return [
        ("artifact", inputs.package.manifest_sha256),
        ("source", f"{model.name} ({model.source}{at}), {model.num_parameters:,} parameters"),
        ("weights", model.weights_sha256),
        ("licence", model.license or "not stated"),
        ("corpus", f"{inputs.corpus.name}, text {inputs.corpus.text_sha256}"),
        ("calibration", f"{inputs.activations.num_tokens:,} tokens, tokenized with seed {inputs.seed}"),
        ("context", f"{inputs.plans.largest_plan.context_length} tokens"),
        ("order", ", ".join(sorted(heuristics))),
        ("placement", f"{inputs.placement.solver}, within {100 * inputs.placement.gap:.2f} % of the optimum"),
        ("collapse gap", f"{inputs.plans.largest_plan.collapse_gap_bytes} bytes"),
        ("compiler", f"coldpress {made_by.compiler_version}"),
        ("commit", commit),
        ("Python", made_by.python_version),
        ("libraries", ", ".join(f"{name} {version}" for name, version in sorted(made_by.libraries.items()))),
        ("device", inputs.device.title),
        *figures_of(inputs.device),
    ]


def figures_of(device: DeviceProfile) -> list[tuple[str, str]]:
    """Returns the device's figures that decide speed, each with its source, which has the date of a measurement."""
    flash = device.flash
    curve = flash.read_curve.value[-1]
    return [
        ("DRAM", f"{device.dram_bytes.value:,} bytes: {device.dram_bytes.source}"),
        ("DRAM bandwidth", f"{device.dram_bytes_per_s.value / 1e9:.3g} GB/s: {device.dram_bytes_per_s.source}"),
        ("flash reads", f"{curve.bytes_per_s / 1e9:.3g} GB/s at {curve.read_bytes:,} bytes: {flash.read_curve.source}"),
        ("flash latency", f"{1e6 * flash.latency_s.value:.3g} µs: {flash.latency_s.source}"),
    ]
