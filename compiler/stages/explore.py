"""explore: measures what each selector costs in quality at several densities, and what each format costs.

Runs only where the method is open (`method=auto`), once per model: nothing here depends on a device. Every candidate
whose loss a pass over text can show leaves out, at each density, the units that the runtime would leave out; all of
these variants share one pass over validation text, so that each layer is read once. Densities are the same in all
layers, divided among families by the selector; `allocate` divides better ones. The same pass records a trace: the
signals of a few layers, with which `allocate` replays each candidate's requests. A format's loss is that of matrices
rounded to nearest, row by row.

A selector that sees residency is measured with an LFU cache in the loop, at two sizes of DRAM. `flash` also prices
reads, which no model determines: its curves are for REFERENCE_FLASH and the default format.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from pydantic import Field

from coldpress.compiler.activity.calibration_pass import ComputeConfig, stream_of
from coldpress.compiler.activity.choice import REPLAYED_LAYERS, CachedChoice, Choice, replayed_layers
from coldpress.compiler.activity.forward import Hooks, LayerStream
from coldpress.compiler.activity.layer_counts import countable_families
from coldpress.compiler.activity.unit_statistics import NORMS, all_statistics, fit_all, unit_norms
from coldpress.compiler.activity.variants import Differences, Variant, compare, last_hidden
from coldpress.compiler.block_statistics import perplexity, standard_error
from coldpress.compiler.candidates import DEFAULT_FORMAT, candidates, own_options
from coldpress.compiler.cost_model import read_units_of, stored_format, unit_bytes
from coldpress.compiler.io import Workspace, load_arrays
from coldpress.compiler.shared_settings import MethodSetting
from coldpress.runtime import plugins
from coldpress.runtime.quantization import Format
from coldpress.runtime.sparsity import Selector
from coldpress.schemas.activations import Activations
from coldpress.schemas.base import Options, PositiveCount
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
RESIDENT_SHARES, CACHED_DENSITIES = (0.25, 0.6), (0.3, 0.5, 0.7, 0.9)
"""DRAM and densities of selectors that see residency: they choose token by token, which takes longer."""
REFERENCE_FLASH = (42_000, 4096, 420_000, 1.0)
"""Break-even gap, page, bytes of the first byte's latency, and overlap: a phone with UFS 3.1, 100,000 reads a second,
4.2 GB/s and 0.1 ms (ActiveFlow, Table 2; Ripple 2.2)."""
TRACE_TOKENS = 256
RARE = 99.9
"""Percentile of the divergence that stands for the worst tokens."""


class ExploreConfig(ComputeConfig, MethodSetting):
    """Settings of `explore`."""

    explore_tokens: Annotated[PositiveCount, Key()] = Field(
        default=1024,
        description="validation tokens that method=auto measures selectors and formats on; whole blocks, at least one",
    )


@dataclass(frozen=True)
class _Explored:
    """A selector at one density."""

    method: str
    density: float
    variant: Variant
    resident_share: float | None = None


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
    traced, whole = _traced(stream, tokens, trace_layers, config.options)
    reasons = {name: _why_not(name, model.spec) for name in candidates(model.spec, config.options)}
    asked = [
        explored
        for name, reason in reasons.items()
        if reason is None
        for explored in _variants(name, own_options(name, config.options), model, activations)
    ]
    return Curves(
        weights_sha256=model.weights_sha256,
        num_tokens=tokens.size,
        block_tokens=tokens.shape[1],
        curves=_curves(stream, tokens, whole, asked),
        formats=tuple(_format_loss(name, stream, tokens, whole) for name in _formats()),
        unexplored=tuple(Unexplored(method=name, reason=reason) for name, reason in reasons.items() if reason),
        trace=work.once("trace", lambda: traced | _norms(model, trace_layers)),
        trace_layers=trace_layers,
    )


def needs(build: "Build") -> StageNeeds:
    """Returns what the pass over all variants takes: a layer, their hidden states twice, and logits of a block."""
    settings, spec = build.settings["explore"], build.model.spec
    variants = len(candidates(spec, build.options)) * len(DENSITIES)
    tokens = max(settings["explore_tokens"], build.block_tokens)
    hidden = (2 * variants + 1) * 4 * tokens * spec.hidden_size
    logits = 4 * 4 * 4 * build.block_tokens * spec.vocab_size
    trace = 2 * REPLAYED_LAYERS * max(TRACE_TOKENS, build.block_tokens) * build.layer_units(countable_families(spec))
    passes = variants + len(_formats()) + 1
    return StageNeeds(
        stage="explore",
        ram_bytes=build.TORCH_BYTES + 2 * build.layer_weights_bytes + build.running_bytes(8) + hidden + logits + trace,
        disk_bytes=trace,
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
    return None


def _variants(method: str, options: Options, model: Model, activations: Activations) -> Iterator[_Explored]:
    """Yields a selector at each density, with the arrays that it would have in the artifact."""
    selector = plugins.load("coldpress.runtime.sparsity", Selector, method)
    own, spec = plugins.options_of(selector, options), model.spec
    families = selector.families(spec, own)
    reads = _reference_reads(families, spec) if selector.SEES_RESIDENCY else None
    for held in RESIDENT_SHARES if selector.SEES_RESIDENCY else (None,):
        statistics = all_statistics(model, activations, families, reads, held or 0.0)
        for density in DENSITIES if held is None else CACHED_DENSITIES:
            shares = selector.divide(density, spec, own)
            per_layer = {
                family: (used_share(family, spec) * shares[family],) * spec.num_hidden_layers for family in families
            }
            arrays = fit_all(selector, own, per_layer, spec, statistics)
            choice = Choice(selector, arrays, spec)
            if held is not None:
                choice = CachedChoice(selector, arrays, spec, held, getattr(own, "use_read_units", False))
            yield _Explored(method, density, Variant(choice, tuple(families)), held)


def _reference_reads(families: Sequence[str], spec: ModelSpec) -> dict[str, np.ndarray]:
    """Returns what a read costs on the reference flash; see `all_statistics`."""
    return {family: read_units_of(*REFERENCE_FLASH, unit_bytes(family, spec, DEFAULT_FORMAT)) for family in families}


def _curves(stream: LayerStream, tokens: np.ndarray, whole: "Tensor", asked: Sequence[_Explored]) -> tuple[Curve, ...]:
    """Runs all variants in one pass and compares them with the whole model."""
    if not asked:
        return ()
    found = compare(stream, tokens, whole, last_hidden(stream, tokens, [explored.variant for explored in asked]))
    points: dict[tuple[str, float | None], list[Point]] = {}
    for number, explored in enumerate(asked):
        along = points.setdefault((explored.method, explored.resident_share), [])
        along.append(Point(density=explored.density, **_loss(found, number)))
    for (method, held), along in points.items():
        beside = "" if held is None else f" with {held:.0%} in DRAM"
        LOG.info("explore: %s%s: %s", method, beside, ", ".join(f"{p.density:g} {p.ppl_ratio:.3f}" for p in along))
    return tuple(
        Curve(method=method, resident_share=held, points=tuple(along)) for (method, held), along in points.items()
    )


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


def _traced(
    stream: LayerStream, tokens: np.ndarray, layers: tuple[int, ...], options: Options
) -> tuple[dict[str, np.ndarray], "Tensor"]:
    """Runs the whole model; returns the trace, and the hidden states after the last layer."""
    families = countable_families(stream.spec)
    signals: tuple[Signal, ...] = tuple(dict.fromkeys(activity_of(family, stream.spec) for family in families))
    num_blocks = min(len(tokens), max(1, TRACE_TOKENS // tokens.shape[1]))
    seen: dict[tuple[int, Signal, int], np.ndarray] = {}

    def hooks(layer: int) -> Any:
        def of_block(block: int) -> Hooks:
            def record(signal: Signal) -> Any:
                def change(values: "Tensor") -> None:
                    seen[layer, signal, block] = values.float().cpu().numpy().astype(np.float16)

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


def _norms(model: Model, layers: Sequence[int]) -> dict[str, np.ndarray]:
    """Returns the norms of the traced layers' units, so that selectors can be fitted where no weights are."""
    families = countable_families(model.spec)
    return {f"{layer}.{family}.{NORMS}": unit_norms(model, layer, family) for layer in layers for family in families}


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


def _format_loss(name: FormatName, stream: LayerStream, tokens: np.ndarray, whole: "Tensor") -> FormatLoss:
    """Returns what rounding all layers' matrices to a format costs."""
    loss = _loss(compare(stream, tokens, whole, _Rounded(stream, name).last_hidden(tokens)), 0)
    LOG.info("explore: %s: perplexity ratio %.4f", name, loss["ppl_ratio"])
    return FormatLoss(format=name, **loss)
