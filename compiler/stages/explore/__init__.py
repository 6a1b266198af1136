"""explore: measures what each selector costs in quality at several densities, and what each format costs: of weights,
and of keys and values.

Runs only where the method is open (`method=auto`), once per model: nothing here depends on a device. Every candidate
whose loss a pass over text can show leaves out, at each density, the units that the runtime would leave out; all
densities of a candidate share one pass over validation text, so that each layer is read once. Densities are the same in
all layers, divided among families by the selector; `allocate` divides better ones. Those that a selector cannot reach
are left out. A selector that sees residency is measured with an LFU cache in the loop, at two sizes of DRAM; `flash`
also prices reads, which no model determines: its curves are for a reference flash and the default format (variants.py).
One that refines has a curve for each format in planes, in that format's weights.

The pass of the whole model records a trace: the signals of a few layers, with which `allocate` replays each candidate's
requests. Codes are those that the build's algorithm chooses, where it needs Gram matrices by those of the whole model,
since nothing is left out yet. A format's loss is that of all matrices of the layers; a KV cache's, that of keys and
values rounded head by head. Where a selector refines, one pass also measures what each matrix gains by a finer coarse
plane (gains.py). In a mixture, routers that prefer experts in DRAM are measured with an LFU cache in the loop, too, at
several strengths (routings.py). A draft from coarse planes is accepted where its greedy choice is that of both planes.
Each pass leaves a file, so that a run that was interrupted goes on with the next pass.
"""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from pydantic import Field

from coldpress.compiler.activity.calibration_pass import ComputeConfig, stream_of
from coldpress.compiler.activity.choice import REPLAYED_LAYERS, replayed_layers
from coldpress.compiler.activity.forward import LayerStream
from coldpress.compiler.activity.gram_pass import add_grams
from coldpress.compiler.activity.in_planes import InPlanes
from coldpress.compiler.activity.layer_counts import countable_families
from coldpress.compiler.activity.rounded import Rounded, RoundedKeys
from coldpress.compiler.activity.variants import Differences, compare, last_hidden
from coldpress.compiler.block_statistics import perplexity, standard_error
from coldpress.compiler.candidates import AUTO, candidates, families_for, finer_of, formats_for, own_options
from coldpress.compiler.io import Workspace, load_arrays
from coldpress.compiler.rounding._matrix import NEAREST, Rounding
from coldpress.compiler.rounding._weights import Algorithm
from coldpress.compiler.shared_settings import (
    EXACT_ROUTING,
    AlgorithmSetting,
    DraftSetting,
    GramSetting,
    MethodSetting,
    RoutingSetting,
)
from coldpress.compiler.stages.explore.gains import matrix_gains
from coldpress.compiler.stages.explore.routings import STRENGTHS, AlongStrengths, routing_curves
from coldpress.compiler.stages.explore.trace import TRACE_TOKENS, whole_run
from coldpress.compiler.stages.explore.variants import (
    DENSITIES,
    Along,
    all_refined,
    curves_of,
    reached,
    variants,
    why_not,
)
from coldpress.compiler.steps import Steps
from coldpress.runtime.plan.kv_cache import formats_of
from coldpress.runtime.plugins import load
from coldpress.runtime.quantization._planes import planes_of, whole_format
from coldpress.runtime.sparsity import Selector
from coldpress.schemas.activations import Activations
from coldpress.schemas.base import PositiveCount
from coldpress.schemas.config import Key
from coldpress.schemas.corpus import Corpus
from coldpress.schemas.curves import (
    CoarseDraft,
    Curve,
    Curves,
    FormatLoss,
    KvCacheLoss,
    LayerGains,
    Point,
    RoutedPoint,
    RoutingCurve,
    Unexplored,
)
from coldpress.schemas.families import WHOLE_MLP, FormatName, Method, slices
from coldpress.schemas.layout import KvCacheFormat
from coldpress.schemas.model import Model, ModelSpec
from coldpress.schemas.preflight import StageNeeds

if TYPE_CHECKING:
    from torch import Tensor

    from coldpress.compiler.needs import Build

LOG = logging.getLogger(__name__)
CACHED_CHOICE_S, CACHED_UNIT_S = 4.5e-4, 5e-8
"""Seconds of one choice with a cache in the loop, and of each unit that it is made among; the mean of `dip_ca` (0.13 ms
a choice of a 7M model) and `flash` (0.76 ms)."""
GAIN_BLOCKS, GAIN_PASSES = 1, 1.0
"""Blocks of text that gains of matrices are measured on; and passes of the source that take as long as one matrix's:
its model joins halfway, on average, and computes units coarse and whole."""
COARSE, DENSE = "coarse", "dense"
"""The draft that is measured, and the selector of the run that checks it."""
RARE = 99.9
"""Percentile of the divergence that stands for the worst tokens."""


class ExploreConfig(ComputeConfig, MethodSetting, DraftSetting, RoutingSetting, AlgorithmSetting, GramSetting):
    """Settings of `explore`."""

    explore_tokens: Annotated[PositiveCount, Key()] = Field(
        default=1024,
        description="validation tokens that method=auto measures selectors and formats on; whole blocks, at least one",
    )


def run(
    config: ExploreConfig, model: Model, corpus: Corpus, activations: Activations, work: Workspace, threads: int
) -> Curves:
    """Measures all candidates and formats.

    Raises:
        ColdpressError: if there is no such device, or a candidate refuses its options.
    """
    methods, rounding = candidates(model.spec, config.options), _rounding(config, model, corpus, work, threads)
    found = explored(methods, config, model, corpus, activations, work, threads, rounding=rounding)
    if rounding.gram is not None:
        _remove_grams(model, work)
    return found


def explored(
    methods: Iterable[Method],
    config: ExploreConfig,
    model: Model,
    corpus: Corpus,
    activations: Activations,
    work: Workspace,
    threads: int,
    as_large: ModelSpec | None = None,
    rounding: Rounding = NEAREST,
) -> Curves:
    """Measures some selectors, and all formats. Reads have the prices of `as_large`'s units; None: of the model's."""
    blocks = load_arrays(corpus.split("validation").arrays, "tokens")["tokens"]
    tokens = blocks[: max(1, config.explore_tokens // blocks.shape[1])]
    stream, _ = stream_of(config, model, threads)
    trace_layers, spec = replayed_layers(model.spec), model.spec
    options = {name: own_options(name, config.options) for name in methods}
    reasons, asked = _asked(options, model)
    kv_caches = formats_of(spec)[1:]
    drafting, refining = _drafting(config.draft, spec), _refining(options)
    routing = routing_curves(config.routing, spec)
    steps = Steps("explore", 1 + sum(map(len, (asked, _formats(), kv_caches, drafting, refining, routing))), "passes")
    trace, whole = whole_run(stream, tokens, trace_layers, work)
    steps.add()
    passes = _Passes(stream, tokens, whole, work, steps)
    formats = {
        name: passes.loss(f"format-{name}-{rounding.name}", _in_format(name, stream, rounding)) for name in _formats()
    }

    def curve(along: Along) -> Curve:
        own, in_planes = options[along.method], along.format is not None and rounding.algorithm.IN_PLANES

        def hidden() -> "Tensor":
            found = list(variants(along, own, model, activations, as_large))
            found += [all_refined(along, own, spec)] if in_planes else []
            return last_hidden(along.model(stream, own, rounding), tokens, found)

        found = passes.differences(f"curve-{along.pass_title(rounding)}", hidden)
        densities = reached(along, own, spec) + ((1.0,) if in_planes else ())
        points = tuple(Point(density=at, **_loss(found, number)) for number, at in enumerate(densities))
        if along.format is not None and not in_planes:  # everything refined is the plain format
            points = (*points, Point(density=1.0, **formats[whole_format(along.format)]))
        LOG.info("explore: %s: %s", along.title, ", ".join(f"{p.density:g} {p.ppl_ratio:.3f}" for p in points))
        return Curve(**along._asdict(), points=points)

    return Curves(
        weights_sha256=model.weights_sha256,
        num_tokens=tokens.size,
        block_tokens=tokens.shape[1],
        curves=tuple(map(curve, asked)),
        formats=tuple(FormatLoss(format=name, **loss) for name, loss in formats.items()),
        kv_caches=tuple(map(passes.kv_cache, kv_caches)),
        drafts=tuple(passes.draft(name, rounding) for name in drafting),
        layer_gains=tuple(passes.gains(*pair, rounding) for pair in refining),
        routings=tuple(map(passes.routing, routing)),
        unexplored=tuple(Unexplored(method=name, reason=reason) for name, reason in reasons.items()),
        trace=trace,
        trace_layers=trace_layers,
    )


def _in_format(name: FormatName, stream: LayerStream, rounding: Rounding) -> Callable[[], LayerStream]:
    """Returns what makes the model in a plain format. Corrected codes are chosen in the slices of the whole MLP's
    units; those rounded to nearest row by row: rows of a down projection lose at most a tenth less than columns."""
    families = (WHOLE_MLP,) if rounding.algorithm.NEEDS_GRAM else ()
    return lambda: Rounded(stream, name, rounding, families)


def _rounding(config: ExploreConfig, model: Model, corpus: Corpus, work: Workspace, threads: int) -> Rounding:
    """Returns how the build rounds, with the Gram matrices of the whole model where that needs them."""
    algorithm = load("coldpress.compiler.rounding", Algorithm, config.algorithm)
    if not algorithm.NEEDS_GRAM:
        return Rounding(algorithm)
    stream, _ = stream_of(config, model, threads)
    return Rounding(algorithm, add_grams(stream, corpus, config.gram_tokens, _grams_in(work)))


def _grams_in(work: Workspace) -> Workspace:
    return Workspace(work.folder / "gram", work.fingerprint)


def _remove_grams(model: Model, work: Workspace) -> None:
    """Deletes the Gram matrices: no other stage reads them, and they take more disk than the model."""
    for layer in range(model.spec.num_hidden_layers):
        _grams_in(work).remove(f"layer-{layer}")


@dataclass(frozen=True)
class _Passes:
    """Passes of changed models over a text, compared with the whole model."""

    stream: LayerStream
    tokens: np.ndarray
    whole: "Tensor"
    """The whole model's hidden states after the last layer."""
    work: Workspace
    steps: Steps

    def differences(self, title: str, hidden: "Callable[[], Tensor]") -> Differences:
        """Returns what a pass measured; an interrupted run of the same inputs may have left it."""
        kept = self.work.once(title, lambda: vars(compare(self.stream, self.tokens, self.whole, hidden())))
        self.steps.add()
        return Differences(**load_arrays(kept))

    def loss(self, title: str, changed: Callable[[], LayerStream]) -> dict[str, Any]:
        """Returns the loss of another model."""
        loss = _loss(self.differences(title, lambda: changed().last_hidden(self.tokens)), 0)
        LOG.info("explore: %s: perplexity ratio %.4f", title, loss["ppl_ratio"])
        return loss

    def kv_cache(self, kind: KvCacheFormat) -> KvCacheLoss:
        """Returns the loss of keys and values in a format."""
        return KvCacheLoss(kv_cache=kind, **self.loss(f"kv-cache-{kind}", lambda: RoundedKeys(self.stream, kind)))

    def draft(self, name: FormatName, rounding: Rounding) -> CoarseDraft:
        """Returns a format's coarse planes as a draft of a dense run with both planes, and that run's loss."""

        def hidden() -> "Tensor":
            import torch

            families = families_for(DENSE, {}, self.stream.spec)
            coarse = InPlanes(self.stream, name, families, rounding, coarse_alone=True)
            both = Rounded(self.stream, name, rounding, families)
            return torch.cat([model.last_hidden(self.tokens) for model in (coarse, both)])

        found = self.differences(f"draft-{name}-{rounding.name}", hidden)
        same = (found.greedy[0] == found.greedy[1]).mean(axis=1)
        LOG.info("explore: drafts from the coarse planes of %s: %.3f accepted", name, same.mean())
        error = _finite(standard_error(same))
        return CoarseDraft(format=name, acceptance=float(same.mean()), acceptance_error=error, **_loss(found, 1))

    def routing(self, along: AlongStrengths) -> RoutingCurve:
        """Returns what routers that prefer experts in DRAM lose."""
        found = self.differences(f"routing-{along.title}", lambda: along.last_hidden(self.stream, self.tokens))
        points = tuple(RoutedPoint(strength=at, **_loss(found, number)) for number, at in enumerate(STRENGTHS))
        LOG.info("explore: %s: %s", along.title, ", ".join(f"{p.strength:g} {p.ppl_ratio:.3f}" for p in points))
        return RoutingCurve(**along._asdict(), points=points)

    def gains(self, coarser: FormatName, finer: FormatName, rounding: Rounding) -> LayerGains:
        """Returns what each matrix of the MLPs gains by finer coarse planes."""

        def make() -> dict[str, np.ndarray]:
            return {"gains": matrix_gains(self.stream, self.tokens[:GAIN_BLOCKS], (coarser, finer), rounding)}

        found = load_arrays(self.work.once(f"gains-{coarser}-{finer}-{rounding.name}", make))["gains"].tolist()
        self.steps.add()
        gains = LayerGains(coarser=coarser, finer=finer, per_layer=tuple(map(tuple, found)))
        words = " ".join(f"{one:.3g}" for one in gains.of_layers.per_layer)
        LOG.info("explore: %s instead of %s saves by layer %s", finer, coarser, words)
        return gains


def needs(build: "Build") -> StageNeeds:
    """Returns what the passes take: a layer, coarse and whole where units are in planes, hidden states of all densities
    twice, or of a block for all matrices, and logits of a block."""
    settings, spec = build.settings["explore"], build.model.spec
    tokens = max(settings["explore_tokens"], build.block_tokens)
    num_refining = len(_refining(candidates(spec, build.options)))
    num_matrices = num_refining * spec.num_hidden_layers * len(slices(WHOLE_MLP, spec))
    gain_tokens = GAIN_BLOCKS * build.block_tokens
    whole = 4 * tokens * spec.hidden_size
    hidden = max((2 * len(DENSITIES) + 1) * whole, 2 * 4 * gain_tokens * spec.hidden_size * num_matrices)
    logits = 4 * 4 * 4 * build.block_tokens * spec.vocab_size
    trace = 2 * REPLAYED_LAYERS * max(TRACE_TOKENS, build.block_tokens) * build.layer_units(countable_families(spec))
    curves = [along for name in candidates(spec, build.options) for along in curves_of(name)]
    num_variants = sum(len(along.densities) for along in curves)
    num_drafting = 2 * len(_drafting(settings.get("draft"), spec))
    num_routed = len(STRENGTHS) * len(routing_curves(settings.get("routing", EXACT_ROUTING), spec))
    figures = tokens * (20 * (num_variants + num_routed) + 16 * len(curves))
    num_rounded = len(_formats()) + num_drafting + 2 * num_refining + sum(along.format is not None for along in curves)
    rounding = _rounding_needs(build, num_rounded)
    return StageNeeds(
        stage="explore",
        ram_bytes=build.TORCH_BYTES
        + 3 * build.layer_weights_bytes
        + build.running_bytes(8)
        + hidden
        + logits
        + trace
        + rounding.ram_bytes,
        disk_bytes=trace + whole + figures + rounding.disk_bytes,
        runtime_s=build.TORCH_S
        + rounding.runtime_s
        + (len(_formats()) + len(formats_of(spec)) + num_drafting) * build.forward_s(tokens)
        + GAIN_PASSES * num_matrices * build.forward_s(gain_tokens)
        + num_routed * build.routed_s(tokens)
        + sum(len(along.densities) * _variant_s(along, tokens, build) for along in curves),
    )


def _rounding_needs(build: "Build", num_passes: int) -> StageNeeds:
    """Returns what an algorithm with Gram matrices takes besides: those of all layers on disk, one of them in memory
    with its factor, and corrections on one core in every pass with other codes."""
    if not build.has("gram"):
        return StageNeeds(stage="explore", ram_bytes=0, disk_bytes=0, runtime_s=0)
    spec = build.model.spec
    tokens = min(build.settings["explore"]["gram_tokens"], build.num_tokens)
    running = build.running_bytes(8, 12) + 2 * 4 * tokens * spec.hidden_size
    return StageNeeds(
        stage="explore",
        ram_bytes=max(running + sum(build.gram_bytes), 3 * max(build.gram_bytes) + 4 * 4 * build.largest_of_layer),
        disk_bytes=spec.num_hidden_layers * sum(build.gram_bytes),
        runtime_s=build.grams_s(tokens) + num_passes * spec.num_hidden_layers * build.correction_s,
    )


def _variant_s(along: Along, tokens: int, build: "Build") -> float:
    """Returns the seconds of one variant's part in a pass over `tokens`."""
    spec = build.model.spec
    families = families_for(along.method, own_options(along.method, build.options), spec)
    if along.resident_share is None:
        return build.forward_s(tokens) + build.choices_s(tokens, families)
    calls = tokens * spec.num_hidden_layers * len(families)  # one after the other, whatever the cores
    units = tokens * spec.num_hidden_layers * build.layer_units(families)
    planes = 1 if along.format is None else 2
    return planes * build.forward_s(tokens) + CACHED_CHOICE_S * calls + CACHED_UNIT_S * units


def _formats() -> tuple[FormatName, ...]:
    """Returns the formats whose loss is measured; one in planes loses what its plain format does."""
    return tuple(name for name in formats_for(AUTO) if planes_of(name) is None)


def _drafting(draft: str | None, spec: ModelSpec) -> tuple[FormatName, ...]:
    """Returns the formats in planes whose coarse planes are measured as drafts: none if the build drafts otherwise, and
    none of a mixture, where the tokens of a pass read other experts each."""
    if spec.is_mixture or draft not in (None, AUTO, COARSE):
        return ()
    return tuple(name for name in formats_for(AUTO) if planes_of(name))


def _refining(methods: Iterable[Method]) -> list[tuple[FormatName, FormatName]]:
    """Returns the formats in planes, each with the next finer one, whose difference is measured by layer: none without
    a selector that refines units."""
    if not any(load("coldpress.runtime.sparsity", Selector, name).IN_PLANES for name in methods):
        return []
    pairs = ((name, finer_of(name)) for name in formats_for(AUTO))
    return [(name, finer) for name, finer in pairs if finer is not None]


def _asked(options: dict[str, Any], model: Model) -> tuple[dict[str, str], list[Along]]:
    """Returns why some candidates are not measured, and the curves of the others."""
    reasons: dict[str, str] = {}
    asked: list[Along] = []
    for name, own in options.items():
        if (reason := why_not(name)) is not None:
            reasons[name] = reason
            continue
        curves = [along for along in curves_of(name) if reached(along, own, model.spec)]
        asked += curves
        if not curves:
            reasons[name] = "its options allow none of the densities that are measured"
    return reasons, asked


def _loss(found: Differences, number: int) -> dict[str, Any]:
    kld = found.kld[number]
    ratio, ratio_error = perplexity((found.nll[number] - found.whole_nll).mean(axis=1))
    return {
        "mean_kld": float(kld.mean()),
        "mean_kld_error": _finite(standard_error(kld.mean(axis=1))),
        "p999_kld": float(np.percentile(kld, RARE)),
        "ppl_ratio": ratio,
        "ppl_ratio_error": _finite(ratio_error),
    }


def _finite(value: float) -> float | None:
    return value if np.isfinite(value) else None
