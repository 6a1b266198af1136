"""explore: measures what each selector costs in quality at several densities, and what each format costs.

Runs only where the method is open (`method=auto`), once per model: nothing here depends on a device. Every candidate
whose loss a pass over text can show leaves out, at each density, the units that the runtime would leave out; all
densities of a candidate share one pass over validation text, so that each layer is read once. Densities are the same in
all layers, divided among families by the selector; `allocate` divides better ones. The pass of the whole model records
a trace: the signals of a few layers, with which `allocate` replays each candidate's requests. A format's loss is that
of matrices rounded to nearest, row by row. Each pass leaves a file, so that a run that was interrupted goes on with the
next pass.
"""

import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from pydantic import Field

from coldpress.compiler.activity.calibration_pass import ComputeConfig, stream_of
from coldpress.compiler.activity.choice import REPLAYED_LAYERS, Choice, replayed_layers
from coldpress.compiler.activity.forward import Hooks, LayerStream
from coldpress.compiler.activity.layer_counts import countable_families
from coldpress.compiler.activity.unit_statistics import all_statistics, fit_all
from coldpress.compiler.activity.variants import Differences, Variant, compare, last_hidden
from coldpress.compiler.block_statistics import perplexity, standard_error
from coldpress.compiler.candidates import candidates, own_options
from coldpress.compiler.cost_model import stored_format
from coldpress.compiler.io import PACKED, Workspace, load_arrays
from coldpress.compiler.shared_settings import MethodSetting
from coldpress.compiler.steps import Steps
from coldpress.runtime import plugins
from coldpress.runtime.quantization import Format
from coldpress.runtime.sparsity import Selector
from coldpress.schemas.activations import Activations
from coldpress.schemas.base import ArrayFile, Options, PositiveCount
from coldpress.schemas.config import Key
from coldpress.schemas.corpus import Corpus
from coldpress.schemas.curves import Curve, Curves, FormatLoss, Point, Unexplored
from coldpress.schemas.families import FormatName, Signal, activity_of, used_share
from coldpress.schemas.model import Model, ModelSpec
from coldpress.schemas.preflight import StageNeeds

if TYPE_CHECKING:
    from torch import Tensor

    from coldpress.compiler.needs import Build

LOG = logging.getLogger(__name__)
DENSITIES = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
TRACE = f"trace{PACKED}"
TRACE_TOKENS = 256
TRACE_BITS = 5
"""Bits of a signal's mantissa that the trace keeps, of float16's ten: it is smaller by a third, and one chosen unit in
300 is another one (EXPERIMENTS.md)."""
RARE = 99.9
"""Percentile of the divergence that stands for the worst tokens."""


class ExploreConfig(ComputeConfig, MethodSetting):
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
    blocks = load_arrays(corpus.split("validation").arrays, "tokens")["tokens"]
    tokens = blocks[: max(1, config.explore_tokens // blocks.shape[1])]
    stream, _ = stream_of(config, model, threads)
    trace_layers = replayed_layers(model.spec.num_hidden_layers)
    reasons = {name: _why_not(name, model.spec) for name in candidates(model.spec, config.options)}
    measured = [name for name, reason in reasons.items() if reason is None]
    steps = Steps("explore", 1 + len(measured) + len(_formats()), "passes")
    trace, whole = _whole(stream, tokens, trace_layers, work)
    steps.add()

    def curve(name: str) -> Curve:
        def measure() -> Differences:
            variants = list(_variants(name, own_options(name, config.options), model, activations))
            return compare(stream, tokens, whole, last_hidden(stream, tokens, variants))

        found = _once(work, f"curve-{name}", measure)
        points = tuple(Point(density=at, **_loss(found, number)) for number, at in enumerate(DENSITIES))
        LOG.info("explore: %s: %s", name, ", ".join(f"{p.density:g} {p.ppl_ratio:.3f}" for p in points))
        steps.add()
        return Curve(method=name, points=points)

    def format_loss(name: FormatName) -> FormatLoss:
        def measure() -> Differences:
            return compare(stream, tokens, whole, _Rounded(stream, name).last_hidden(tokens))

        loss = _loss(_once(work, f"format-{name}", measure), 0)
        LOG.info("explore: %s: perplexity ratio %.4f", name, loss["ppl_ratio"])
        steps.add()
        return FormatLoss(format=name, **loss)

    return Curves(
        weights_sha256=model.weights_sha256,
        num_tokens=tokens.size,
        block_tokens=tokens.shape[1],
        curves=tuple(map(curve, measured)),
        formats=tuple(map(format_loss, _formats())),
        unexplored=tuple(Unexplored(method=name, reason=reason) for name, reason in reasons.items() if reason),
        trace=trace,
        trace_layers=trace_layers,
    )


def needs(build: "Build") -> StageNeeds:
    """Returns what the passes take: a layer, hidden states of all densities twice, and logits of a block."""
    settings, spec = build.settings["explore"], build.model.spec
    tokens = max(settings["explore_tokens"], build.block_tokens)
    whole = 4 * tokens * spec.hidden_size
    hidden = (2 * len(DENSITIES) + 1) * whole
    logits = 4 * 4 * 4 * build.block_tokens * spec.vocab_size
    trace = 2 * REPLAYED_LAYERS * max(TRACE_TOKENS, build.block_tokens) * build.layer_units(countable_families(spec))
    num_candidates = len(candidates(spec, build.options))
    figures = 8 * tokens * (2 * len(DENSITIES) + 2) * num_candidates
    passes = num_candidates * len(DENSITIES) + len(_formats()) + 1
    return StageNeeds(
        stage="explore",
        ram_bytes=build.TORCH_BYTES + 2 * build.layer_weights_bytes + build.running_bytes(8) + hidden + logits + trace,
        disk_bytes=trace + whole + figures,
        runtime_s=600 + passes * build.forward_s(tokens),
    )


def _formats() -> tuple[FormatName, ...]:
    return plugins.names("coldpress.runtime.quantization")


def _why_not(method: str, spec: ModelSpec) -> str | None:
    """Returns why a candidate's loss is not measured; None if it is."""
    selector = plugins.load("coldpress.runtime.sparsity", Selector, method)
    if selector.is_whole:
        return "uses every unit, so it loses nothing"
    if selector.EXACT:
        return "leaves out exact zeros only, so it loses nothing"
    if selector.NEEDS_PREDICTORS:
        return "its predictors are trained after this choice, to predictor_tolerance"
    if selector.SEES_RESIDENCY:
        return "its choice depends on which units are in DRAM, so text alone does not show its loss"
    return None


def _variants(method: str, options: Options, model: Model, activations: Activations) -> Iterator[Variant]:
    """Yields a selector at each density, with the arrays that it would have in the artifact."""
    selector = plugins.load("coldpress.runtime.sparsity", Selector, method)
    own, spec = plugins.options_of(selector, options), model.spec
    families = selector.families(spec, own)
    statistics = all_statistics(model, activations, families)
    for density in DENSITIES:
        shares = selector.divide(density, spec, own)
        per_layer = {
            family: (used_share(family, spec) * shares[family],) * spec.num_hidden_layers for family in families
        }
        arrays = fit_all(selector, own, per_layer, spec, statistics)
        yield Variant(Choice(selector, arrays, spec), tuple(families))


def _once(work: Workspace, key: str, measure: Callable[[], Differences]) -> Differences:
    """Returns what a pass measured; an interrupted run of the same inputs may have left it."""
    return Differences(**load_arrays(work.once(key, lambda: vars(measure()))))


def _loss(found: Differences, number: int) -> dict[str, Any]:
    """Returns the figures of one variant."""
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


def _whole(
    stream: LayerStream, tokens: np.ndarray, layers: tuple[int, ...], work: Workspace
) -> tuple[ArrayFile, "Tensor"]:
    """Returns the trace, and the whole model's hidden states after the last layer; an interrupted run may have left
    them."""
    import torch

    trace, kept = work.current(TRACE), work.current("whole")
    if trace is None or kept is None:
        traced, whole = _traced(stream, tokens, layers)
        trace, kept = work.save(TRACE, traced), work.save("whole", {"hidden": whole.float().numpy()})
    return trace, torch.from_numpy(load_arrays(kept)["hidden"]).to(stream.dtype)


def _traced(stream: LayerStream, tokens: np.ndarray, layers: tuple[int, ...]) -> tuple[dict[str, np.ndarray], "Tensor"]:
    """Runs the whole model; returns the trace, and the hidden states after the last layer."""
    families = countable_families(stream.spec)
    signals: tuple[Signal, ...] = tuple(dict.fromkeys(activity_of(family, stream.spec) for family in families))
    num_blocks = min(len(tokens), max(1, TRACE_TOKENS // tokens.shape[1]))
    seen: dict[tuple[int, Signal, int], np.ndarray] = {}

    def hooks(layer: int) -> Any:
        def of_block(block: int) -> Hooks:
            def record(signal: Signal) -> Any:
                def change(values: "Tensor") -> None:
                    seen[layer, signal, block] = rounded(values.float().cpu().numpy().astype(np.float16))

                return change

            return {signal: record(signal) for signal in signals} if block < num_blocks else {}

        return of_block if layer in layers else None

    whole = stream.last_hidden(tokens, hooks)
    trace = {
        f"{layer}.{signal}": np.concatenate([seen[layer, signal, block] for block in range(num_blocks)])
        for layer in layers
        for signal in signals
        if (layer, signal, 0) in seen
    }
    return trace, whole


def rounded(values: np.ndarray) -> np.ndarray:
    """Rounds float16 to TRACE_BITS bits of mantissa, to nearest, halves away from zero."""
    dropped = 10 - TRACE_BITS
    codes = values.view(np.uint16).astype(np.uint32) + (1 << (dropped - 1))
    return (codes >> dropped << dropped).astype(np.uint16).view(np.float16)


class _Rounded(LayerStream):
    """A model whose layers' matrices are rounded to nearest in a format, row by row."""

    def __init__(self, source: LayerStream, format_name: FormatName) -> None:
        """Computes as `source` does."""
        dtype: Any = str(source.dtype).removeprefix("torch.")
        super().__init__(source.model, source.threads, str(source.device), dtype=dtype)
        self._format = format_name

    def _of_role(self, role: str) -> "Tensor":
        import torch

        tensor = super()._of_role(role)
        stored = stored_format(role, self._format)
        if stored is None:
            return tensor
        codec = plugins.load("coldpress.runtime.quantization", Format, stored)
        values = np.ascontiguousarray(tensor.float().numpy())
        return torch.from_numpy(codec.decode(codec.encode(values), values.shape[1])).to(tensor.dtype)
