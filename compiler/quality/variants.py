"""Lists the measurements: formats; each selector at several densities, and several DRAM sizes if it sees residency;
each routing at several strengths, equal in all layers, at the same DRAM sizes."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from coldpress.compiler.activity.cached_routing import CachedRouting
from coldpress.compiler.activity.choice import CachedChoice, Choice
from coldpress.compiler.activity.forward import LayerStream
from coldpress.compiler.activity.unit_statistics import all_statistics, fit_all
from coldpress.compiler.activity.variants import Variant
from coldpress.compiler.candidates import AUTO, DEFAULT_FORMAT, compared_formats, routings_for
from coldpress.compiler.cost_model import HEAD_FORMAT, read_units_of, slice_bytes, unit_bytes
from coldpress.compiler.kept_codes import own_format, own_formats_of_mlps, own_layers
from coldpress.compiler.shared_settings import DEFAULT_CACHE
from coldpress.runtime.cache import CacheFacts, CachePolicy, make
from coldpress.runtime.plugins import load, options_of
from coldpress.runtime.routing import PACKAGE, Routing
from coldpress.runtime.sparsity import Selector
from coldpress.schemas.activations import Activations
from coldpress.schemas.base import Options
from coldpress.schemas.errors import ColdpressError
from coldpress.schemas.families import (
    FormatName,
    LayerFormats,
    Method,
    dense_family,
    num_units,
    slice_formats,
    used_share,
)
from coldpress.schemas.layout import RoutingName
from coldpress.schemas.model import Model, ModelSpec

if TYPE_CHECKING:
    from torch import Tensor

DENSITIES = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
RESIDENT_SHARES, CACHED_DENSITIES = (0.25, 0.6), (0.3, 0.5, 0.7, 0.9)
"""DRAM and densities of selectors that see residency: they choose token by token, which takes longer."""
SAMPLE = 256
"""Values of a slice by which formats are compared in size."""
REFERENCE_FLASH = (42_000, 4096, 420_000, 1.0)
"""Break-even gap, page, bytes of the first byte's latency, and overlap: a phone with UFS 3.1, 100,000 reads a second,
4.2 GB/s and 0.1 ms (ActiveFlow, Table 2; Ripple 2.2)."""
STRENGTHS = (0.05, 0.1, 0.2, 0.4, 0.8)


class Along(NamedTuple):
    """A curve to measure: a selector, and the share of the units that a cache holds meanwhile."""

    method: Method
    resident_share: float | None = None
    """None for a selector that does not see residency."""

    @property
    def densities(self) -> tuple[float, ...]:
        """The densities at which it is measured, those out of the selector's reach included."""
        return DENSITIES if self.resident_share is None else CACHED_DENSITIES

    @property
    def title(self) -> str:
        share = None if self.resident_share is None else f"{self.resident_share:g}-resident"
        return "-".join(filter(None, (self.method, share)))


def curves_of(method: Method) -> list[Along]:
    shares = RESIDENT_SHARES if _selector(method).SEES_RESIDENCY else (None,)
    return [Along(method, share) for share in shares]


def why_not(method: Method) -> str | None:
    selector = _selector(method)
    if selector.is_whole:
        return "uses every unit, so it loses nothing"
    if selector.EXACT:
        return "leaves out exact zeros only, so it loses nothing"
    if selector.NEEDS_PREDICTORS:
        return "its predictors are trained after this choice, to predictor_tolerance"
    return None


def asked(options: Mapping[Method, Options], spec: ModelSpec) -> tuple[dict[Method, str], list[Along]]:
    """Returns the reasons why some candidates (with their options) are not measured, and the others' curves."""
    reasons: dict[Method, str] = {}
    found: list[Along] = []
    for name, own in options.items():
        if (reason := why_not(name)) is not None:
            reasons[name] = reason
            continue
        curves = [along for along in curves_of(name) if reached(along, own, spec)]
        found += curves
        if not curves:
            reasons[name] = "its options allow none of the densities that are measured"
    return reasons, found


def layer_formats_of(model: Model) -> tuple[LayerFormats, ...]:
    """Returns the formats of all layers that are measured first, the largest first: a quantized file's own MLP formats,
    and compared ones up to their size. If a dense run keeps the file's own, which loses nothing, only those."""
    own = own_layers(model)
    return _up_to_own(model) if own is None else (own,)


def smaller_formats_of(model: Model) -> tuple[LayerFormats, ...]:
    """Returns the compared formats, the largest first, up to the size of a quantized file's own, which a dense run
    keeps: others gain only where the file's own do not fit in DRAM."""
    own = own_layers(model)
    return () if own is None else tuple(one for one in _up_to_own(model) if one != own)


def _up_to_own(model: Model) -> tuple[LayerFormats, ...]:
    """Returns a quantized file's own formats and those that are compared and not larger, the largest first."""
    own = _own(model)
    most_bytes = max(map(sample_bytes, own), default=math.inf)
    smaller = (name for name in compared_formats(AUTO, model.spec) if slice_bytes(SAMPLE, name) <= most_bytes)
    return tuple(sorted({*own, *smaller}, key=lambda one: (-sample_bytes(one), one not in own, str(one))))


def larger_formats_of(model: Model) -> tuple[FormatName, ...]:
    """Returns the other formats that are compared, the smallest first: a quantized file gains by them only where its
    own formats lose too much, as where down projections are rounded by columns."""
    most_bytes = max(map(sample_bytes, _own(model)), default=math.inf)
    larger = (name for name in compared_formats(AUTO, model.spec) if slice_bytes(SAMPLE, name) > most_bytes)
    return _largest_first(larger)[::-1]


def sample_bytes(formats: LayerFormats) -> float:
    """Returns the bytes of SAMPLE values in formats of layers, in the mean over layers and matrices."""
    layers = (formats,) if isinstance(formats, str) else formats
    return fmean(fmean(slice_bytes(SAMPLE, name) for name in slice_formats(one)) for one in layers)


def _own(model: Model) -> set[LayerFormats]:
    own = own_layers(model)
    return {*own_formats_of_mlps(model)} if own is None else {own}


def head_formats_of(model: Model) -> tuple[FormatName, ...]:
    """Returns the head's measured formats: those in four bits or more, smaller than its usual or a file's own one."""
    own, compared = own_format(model, model.spec.head_role), head_formats(model.spec)
    most = slice_bytes(SAMPLE, HEAD_FORMAT if own is None else own)
    return tuple(name for name in compared if slice_bytes(SAMPLE, name) < most)


def head_formats(spec: ModelSpec) -> tuple[FormatName, ...]:
    """Returns the formats in four bits or more that take fewer bytes than the head's usual one."""
    most, least = slice_bytes(SAMPLE, HEAD_FORMAT), SAMPLE // 2
    return _largest_first(name for name in compared_formats(AUTO, spec) if least <= slice_bytes(SAMPLE, name) < most)


def _largest_first(names: Iterable[FormatName]) -> tuple[FormatName, ...]:
    return tuple(sorted(names, key=lambda name: (-slice_bytes(SAMPLE, name), name)))


def reached(along: Along, options: Options, spec: ModelSpec) -> tuple[float, ...]:
    selector = _selector(along.method)
    own, found = options_of(selector, options), []
    for density in along.densities:
        try:
            selector.divide(density, spec, own)
        except ColdpressError:  # out of its reach
            continue
        found.append(density)
    return tuple(found)


def variants(
    along: Along,
    options: Options,
    model: Model,
    activations: Activations,
    densities: Iterable[float],
    as_large: ModelSpec | None = None,
    *,
    in_cache: bool = True,
) -> Iterator[Variant]:
    """Yields a selector at each of `densities`, which it must reach, with its arrays as in the artifact. Reads have the
    prices of `as_large`'s units, which may be larger than the model's own (None). With `in_cache`, a selector that sees
    residency chooses with a cache in the loop; without, as if DRAM were empty, which takes a fraction of the time and
    loses less."""
    selector, held = _selector(along.method), along.resident_share
    own, spec = options_of(selector, options), model.spec
    families = selector.families(spec, own)
    reads = None if held is None else _reference_reads(families, as_large or spec, spec)
    statistics = all_statistics(model, activations, families, reads, held or 0.0)
    for density in densities:
        shares = selector.divide(density, spec, own)
        per_layer = {
            family: (used_share(family, spec) * shares[family],) * spec.num_hidden_layers for family in families
        }
        arrays = fit_all(selector, own, per_layer, spec, statistics)
        choice = Choice(selector, arrays, spec)
        if held is not None and in_cache:
            choice = CachedChoice(selector, arrays, spec, held, getattr(own, "use_read_units", False))
        yield Variant(choice, tuple(families))


def _selector(method: Method) -> Selector[Any]:
    return load("coldpress.runtime.sparsity", Selector, method)


def _reference_reads(
    families: Sequence[str], as_large: ModelSpec, spec: ModelSpec
) -> dict[tuple[int, str], np.ndarray]:
    """Returns the cost of a read of units of `as_large`'s size on the reference flash; see `all_statistics`."""
    layers, sizes = range(spec.num_hidden_layers), [unit_bytes(family, as_large, DEFAULT_FORMAT) for family in families]
    known = {family: read_units_of(*REFERENCE_FLASH, size) for family, size in zip(families, sizes, strict=True)}
    return {(layer, family): known[family] for layer in layers for family in families}


class AlongStrengths(NamedTuple):
    """A curve to measure: a way of routing, and the share of the experts' units that a cache holds meanwhile."""

    routing: RoutingName
    resident_share: float

    @property
    def title(self) -> str:
        return f"{self.routing}-{self.resident_share:g}-resident"

    def last_hidden(self, stream: LayerStream, tokens: np.ndarray) -> "Tensor":
        """Returns the hidden states after the last layer at all strengths, [len(STRENGTHS) * B, T, hidden_size]."""
        spec = stream.spec
        units = num_units(dense_family(spec), spec)
        slots, natural = max(1, round(self.resident_share * units)), np.arange(units, dtype=np.int32)

        def cache(_: int) -> CachePolicy:
            return make(DEFAULT_CACHE, {}, CacheFacts(units, slots, np.empty(0, np.int32), natural))

        routing = CachedRouting(stream, load(PACKAGE, Routing, self.routing), cache)
        return routing.run(tokens, np.tile(np.array(STRENGTHS)[:, None], spec.num_hidden_layers))[0]


def routing_curves(named: str, spec: ModelSpec) -> list[AlongStrengths]:
    names = routings_for(named, spec.is_mixture)
    return [AlongStrengths(name, share) for name in names for share in RESIDENT_SHARES]
