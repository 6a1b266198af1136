"""explore: measures what each format of weights, and of keys and values, costs in quality, and records how the model's
signals look on held-out text; with explore=whole, on more text, also what each selector costs at several densities, and
routings.

Runs only where the method is open (`method=auto`), once per model: nothing here depends on a device. What else is worth
measuring does depend on it: nothing where the whole model fits in DRAM, and otherwise what can still win under the
device's law. So `allocate` measures the rest (compiler/stages/allocate/_finalists.py), unless explore=whole asks for
all selectors here. Of a quantized file whose codes a dense run keeps, its own formats alone are listed: they lose
nothing.

Every candidate leaves out, at each density, the units that the runtime would leave out; all its densities share one
pass over validation text. Densities are the same in all layers, divided among families by the selector. A selector or
router that sees residency is measured with an LFU cache in the loop; `flash` also prices reads, which no model
determines: its curves are for a reference flash and the default format (compiler/quality/variants.py).

The pass of the whole model records a trace: the signals of a few layers, with which `allocate` replays each candidate's
requests. A format's loss is that of all matrices of the layers, or of the head alone; a KV cache's, that of keys and
values rounded head by head. Where the build's algorithm needs Gram matrices, they are those of the whole model, since
nothing is left out yet. Each pass leaves a file, so that a run that was interrupted goes on with the next one.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from coldpress.compiler.activity.calibration_pass import stream_of
from coldpress.compiler.activity.choice import replayed_layers
from coldpress.compiler.candidates import candidates, fits_columns, own_options
from coldpress.compiler.io import Workspace, load_arrays
from coldpress.compiler.quality.needs import needs_of_passes
from coldpress.compiler.quality.passes import Passes, PassesConfig, remove_grams, rounding_of
from coldpress.compiler.quality.trace import few_tokens, whole_run
from coldpress.compiler.quality.variants import (
    asked,
    head_formats_of,
    larger_formats_of,
    layer_formats_of,
    routing_curves,
    smaller_formats_of,
)
from coldpress.compiler.rounding._matrix import NEAREST, Rounding
from coldpress.compiler.shared_settings import WHOLE, MethodSetting, RoutingSetting
from coldpress.compiler.steps import Steps
from coldpress.runtime.dram.kv_cache import formats_of
from coldpress.schemas.activations import Activations
from coldpress.schemas.corpus import Corpus
from coldpress.schemas.curves import Curves, FormatLoss, Unexplored
from coldpress.schemas.families import WHOLE_MLP, Method, dense_family
from coldpress.schemas.model import Model, ModelSpec
from coldpress.schemas.preflight import StageNeeds

if TYPE_CHECKING:
    from coldpress.compiler.needs import Build

USELESS_RATIO = 3.0
"""A format that takes perplexity to more than this is the smallest that is measured."""


class ExploreConfig(PassesConfig, MethodSetting, RoutingSetting):
    """Settings of `explore`."""


def run(
    config: ExploreConfig, model: Model, corpus: Corpus, activations: Activations, work: Workspace, threads: int
) -> Curves:
    """Measures all formats, and with explore=whole all candidates. Raises ColdpressError if there is no such device, or
    a candidate refuses its options."""
    methods = candidates(model.spec, config.options) if config.explore == WHOLE else None
    rounding = rounding_of(config, model, corpus, activations, work, threads)
    found = explored(methods, config, model, corpus, activations, work, threads, rounding=rounding)
    if rounding.gram is not None:
        remove_grams(model, work)
    return found


def explored(
    methods: Iterable[Method] | None,
    config: ExploreConfig,
    model: Model,
    corpus: Corpus,
    activations: Activations,
    work: Workspace,
    threads: int,
    as_large: ModelSpec | None = None,
    rounding: Rounding = NEAREST,
) -> Curves:
    """Measures some selectors and all that goes with them, and all formats on the whole validation text; None: formats
    alone, on the tokens of the trace. Reads have the prices of `as_large`'s units; None: of the model's."""
    blocks = load_arrays(corpus.split("validation").arrays, "tokens")["tokens"]
    tokens = few_tokens(blocks) if methods is None else blocks[: max(1, config.explore_tokens // blocks.shape[1])]
    stream, _ = stream_of(config, model, threads)
    trace_layers, spec, options = replayed_layers(model.spec), model.spec, {}
    kv_caches, routings = formats_of(spec)[1:], []
    if methods is not None:
        options = {name: own_options(name, config.options) for name in methods}
        routings = routing_curves(config.routing, spec)
    reasons, curves = asked(options, spec)
    of_layers, of_head, dense = layer_formats_of(model), head_formats_of(model), dense_family(spec)
    smaller = smaller_formats_of(model)
    if methods is not None:
        of_layers = (*larger_formats_of(model)[::-1], *of_layers, *smaller)
    elif smaller:
        of_head = ()  # a quantized file's own may do
    of_families = [(name, dense) for name in of_layers]
    if methods is not None and dense != WHOLE_MLP:  # a selector's units have columns of down
        of_families += [(name, WHOLE_MLP) for name in of_layers if fits_columns(name, spec)]
    measured = (of_families, of_head, curves, kv_caches, routings)
    steps = Steps("explore", 1 + sum(map(len, measured)), "passes")
    trace, whole = whole_run(stream, tokens, trace_layers, work)
    steps.add()
    passes = Passes("explore", stream, tokens, whole, work, steps, rounding)
    of_formats = passes if methods is None or len(tokens) == len(blocks) else _on_every_block(passes, blocks)
    formats: list[FormatLoss] = []
    for name, family in of_families:
        if not (formats and formats[-1].family == family and formats[-1].ppl_ratio > USELESS_RATIO):
            formats.append(of_formats.format(name, family))  # smaller formats than a useless one lose more
    return Curves(
        weights_sha256=model.weights_sha256,
        num_tokens=tokens.size,
        block_tokens=tokens.shape[1],
        curves=tuple(passes.curve(along, options[along.method], activations, as_large=as_large) for along in curves),
        formats=tuple(formats),
        heads=tuple(map(passes.head, of_head)),
        kv_caches=tuple(map(passes.kv_cache, kv_caches)),
        routings=tuple(map(passes.routing, routings)),
        unexplored=tuple(Unexplored(method=name, reason=reason) for name, reason in reasons.items()),
        trace=trace,
        trace_layers=trace_layers,
    )


def _on_every_block(passes: Passes, blocks: np.ndarray) -> Passes:
    """Returns passes over the whole validation text: layers' formats decide first, and few tokens leave them open."""
    work = Workspace(passes.work.folder / "formats", passes.work.fingerprint)
    return replace(passes, tokens=blocks, whole=passes.stream.last_hidden(blocks), work=work)


def needs(build: "Build") -> StageNeeds:
    whole = build.settings["explore"].get("explore") == WHOLE
    return needs_of_passes("explore", build, candidates(build.model.spec, build.options) if whole else ())
