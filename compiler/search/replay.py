"""Models the seconds per token of a divided budget, before units are placed or ordered and predictors are trained.

Held-out tokens of a few layers run on the simulated device (compiler/seconds.py). A selector with a quality curve
chooses units from the signals in the trace of `explore`, during the run if it sees residency; for other selectors
calibration has counted them. Units lie in the model's own order. With the cache `static` DRAM holds the hottest units
that fit; another policy starts with these units and then decides, with nothing pinned. Placement and order can only
make it faster. A predictor's extra units are drawn at random, and so are units that nothing has counted: the worst case
for caches and orders. A dense run needs no replay (compiler/dense_run.py), except for a mixture's experts.
"""

import functools
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from coldpress.compiler import seconds
from coldpress.compiler.activity import expert_counts
from coldpress.compiler.activity.cached_routing import routed
from coldpress.compiler.activity.choice import Arrays, Choice, of_experts, replayed_layers
from coldpress.compiler.activity.unit_statistics import NORMS, all_statistics
from coldpress.compiler.cost_model import all_read_units, flash_bytes, unit_bytes
from coldpress.compiler.dense_run import dense_run
from coldpress.compiler.io import load_arrays
from coldpress.compiler.search.density import AllocationInputs
from coldpress.compiler.seconds import Key, Setting
from coldpress.compiler.sections import make_sections
from coldpress.compiler.shared_settings import OVERPREDICTION
from coldpress.runtime.cache import CachePolicy
from coldpress.runtime.dram.budget import Claim, units_with_room
from coldpress.runtime.plugins import load, load_class, options_of
from coldpress.runtime.quantization._mixed import format_at
from coldpress.runtime.routers import router_of
from coldpress.runtime.routing import PACKAGE, Routing
from coldpress.runtime.simulate import Choose, by_signals
from coldpress.runtime.sparsity import Residency, Selector, used_experts
from coldpress.schemas.activations import LayerStatistics
from coldpress.schemas.device import DeviceProfile
from coldpress.schemas.families import (
    BLOCKS,
    WHOLE_MLP,
    FamilyName,
    FormatName,
    activity_of,
    num_experts,
    num_units,
    slice_formats,
    unit_keys,
)
from coldpress.schemas.layout import PartPlan, Plan
from coldpress.schemas.metrics import DenseRun
from coldpress.schemas.model import Model, ModelSpec
from coldpress.schemas.sparsity import SearchedRouting, Sparsity

NUM_WINDOWS, WINDOW_TOKENS = 3, 16
"""The tokens that are counted: windows of consecutive tokens, spread over the held-out part of the text."""
WARM_TOKENS = 24
"""Tokens before each window that only fill an adaptive cache."""
HELD_OUT_SHARE = 0.25
KEPT_TEXTS = 16
"""Most choices of units to keep in memory; each takes some megabytes for a 7B model."""


class Replayed(NamedTuple):
    token_s: float
    hit_rate: float | None
    """None for a dense run, whose pinned units are no cache."""


@dataclass(frozen=True)
class UsedUnits:
    """The units that the tokens of a text use, of one family in one layer."""

    num_tokens: int
    ids: Mapping[int, np.ndarray]
    """Token number -> unit ids, int32 ascending; only tokens that may be replayed."""
    hot: np.ndarray
    """int32 [num_units]: all units, the most used before the held-out tokens first."""


class Chosen(NamedTuple):
    texts: Mapping[Key, UsedUnits]
    arrays: Arrays
    """The selector's arrays for the traced layers; empty where activity is known without a trace."""


class Replays:
    def __init__(self, inputs: AllocationInputs) -> None:
        self._inputs = inputs
        self._chosen: OrderedDict[object, Chosen] = OrderedDict()
        self._found: dict[tuple[str, SearchedRouting | None], Replayed] = {}

    def of(self, sparsity: Sparsity, routing: SearchedRouting | None = None) -> Replayed:
        """Returns the modelled cost of a decoded token, its experts chosen by `routing`; None: by the model's own.
        A division is replayed once, however many searches judge it."""
        key = sparsity.model_dump_json(), routing
        if key not in self._found:
            self._found[key] = self._replayed(sparsity, routing)
        return self._found[key]

    def _replayed(self, sparsity: Sparsity, routing: SearchedRouting | None) -> Replayed:
        run = self._dense(sparsity)
        if run is not None:
            return Replayed(run.token_s, None)
        found = [
            (share, seconds.choices_seconds(*self._run(one, routing)))
            for share, one in in_one_format(sparsity, self._inputs.model.spec)
        ]
        token_s, hit_rate = (sum(share * figures[at] for share, figures in found) for at in range(2))
        return Replayed(token_s, hit_rate)

    def tokens(self, sparsity: Sparsity, routing: SearchedRouting | None = None) -> list[seconds.TokenCost]:
        """Returns each replayed token's cost, whose mean `of` returns; one token stands for all of a dense run."""
        run = self._dense(sparsity)
        if run is None:
            parts = [
                (share, seconds.choices_tokens(*self._run(one, routing)))
                for share, one in in_one_format(sparsity, self._inputs.model.spec)
            ]
            shares = [share for share, _ in parts]
            return [_mean(shares, each) for each in zip(*(tokens for _, tokens in parts), strict=True)]
        return [seconds.TokenCost(run.token_s, run.flash_s, run.reads_per_token, run.flash_bytes_per_token, 0, 0)]

    def _dense(self, sparsity: Sparsity) -> DenseRun | None:
        """Returns the fastest run of a dense MLP in the room that the division leaves; None for other divisions, and
        for a mixture with a trace: a cache may hold some of the experts that its tokens use."""
        (family, *others) = sparsity.families
        is_mlp = not others and family in (WHOLE_MLP, BLOCKS)
        if sparsity.method != "dense" or not is_mlp or self._traces_experts(sparsity):
            return None
        budget, device = sparsity.budget, self._inputs.device
        shape = (sparsity.formats, sparsity.context_length, budget.dram_budget_bytes, device, sparsity.kv_cache)
        room_bytes = budget.buffer_bytes + budget.cache_bytes
        return dense_run(self._inputs.model, *shape, room_bytes=room_bytes, family=family)

    def _traces_experts(self, sparsity: Sparsity) -> bool:
        inputs = self._inputs
        return sparsity.method == "dense" and inputs.model.spec.is_mixture and inputs.curves is not None

    def _run(
        self, sparsity: Sparsity, routing: SearchedRouting | None
    ) -> tuple[Setting, Choose, list[range], int, dict[Key, np.ndarray]]:
        model, device = self._inputs.model, self._inputs.device
        chosen = self._choices(sparsity)
        texts = chosen.texts
        layers = sorted({layer for layer, _ in texts})
        setting = setting_of(sparsity, model, device, layers, {key: text.hot for key, text in texts.items()})
        parts = setting.plan.parts
        warm = WARM_TOKENS if any(part.cache_slots for part in parts) else 0
        num_tokens = min(text.num_tokens for text in texts.values())
        fill = {
            (part.layer, part.family): np.sort(texts[part.layer, part.family].hot[: part.cache_slots])
            for part in parts
            if part.cache_slots
        }
        windows, warm = windows_of(num_tokens, warm)
        choose = self._chooser(sparsity, chosen) if routing is None else self._router(routing)
        return setting, choose, windows, warm, fill

    def _router(self, routing: SearchedRouting) -> Choose:
        """Returns a chooser for the trace's tokens: all units of the experts that the routing picks."""
        way, router = load(PACKAGE, Routing, routing.routing), router_of(self._inputs.model.spec)

        def choose(key: Key, token: int, residency: Residency) -> np.ndarray:
            scores_E = self._trace[f"{key[0]}.router_scores"][token].astype(np.float32)
            return routed(way, router, scores_E, residency.present, routing.strength)[1]

        return choose

    def _chooser(self, sparsity: Sparsity, chosen: Chosen) -> Choose:
        selector = load("coldpress.runtime.sparsity", Selector, sparsity.method)
        texts, arrays, spec = chosen.texts, chosen.arrays, self._inputs.model.spec
        if not (selector.SEES_RESIDENCY and arrays):
            return lambda key, token, _: texts[key].ids[token]
        signals = {key: self._signal(key) for key in texts}
        counts = {key: num_experts(key[1], spec) for key in texts}
        experts = {key: used_experts(signals[key], count) for key, count in counts.items() if count > 1}
        return by_signals(selector, arrays, signals, experts)

    def _choices(self, sparsity: Sparsity) -> Chosen:
        """Makes choices once for all formats and caches that do not change them."""
        densities = tuple((entry.family, entry.per_layer) for entry in sparsity.densities)
        key: tuple[object, ...] = (sparsity.method, str(sorted(sparsity.options.items())), densities)
        if load("coldpress.runtime.sparsity", Selector, sparsity.method).SEES_RESIDENCY:
            key = (*key, sparsity.format, held_share(sparsity, self._inputs.model))
        if key not in self._chosen:
            self._chosen[key] = self._choose(sparsity)
            if len(self._chosen) > KEPT_TEXTS:
                self._chosen.popitem(last=False)
        return self._chosen[key]

    def _choose(self, sparsity: Sparsity) -> Chosen:
        activations, curves, spec = self._inputs.activations, self._inputs.curves, self._inputs.model.spec
        if curves is not None and (curves.of(sparsity.method) or self._traces_experts(sparsity)):
            selector = load("coldpress.runtime.sparsity", Selector, sparsity.method)
            choice = Choice(selector, self._arrays(sparsity), spec)
            return Chosen({key: _text(choice.mask(*key, self._signal(key))) for key in choice.arrays}, choice.arrays)
        entries = [activations.layers[number] for number in replayed_layers(spec)]
        texts = {
            (entry.layer, family): calibrated(sparsity, entry, family, num_units(family, spec), activations.num_tokens)
            for entry in entries
            for family in sparsity.families
        }
        return Chosen(texts, {})

    def _arrays(self, sparsity: Sparsity) -> Arrays:
        selector, spec = load("coldpress.runtime.sparsity", Selector, sparsity.method), self._inputs.model.spec
        own, curves = options_of(selector, sparsity.options), self._inputs.curves
        assert curves is not None
        activations = self._inputs.activations.of_layers(curves.trace_layers)
        shape = sparsity.families, sparsity.formats, sparsity.layers_per_group
        reads = all_read_units(self._inputs.device.flash, spec, *shape)
        held = held_share(sparsity, self._inputs.model)
        statistics = all_statistics(self._inputs.model, activations, sparsity.families, reads, held, self._norms)
        return {
            (layer, family): selector.fit(num_units(family, spec), sparsity.density(family, layer), known, own)
            for (layer, family), known in statistics.items()
        }

    @functools.cached_property
    def _norms(self) -> dict[Key, np.ndarray]:
        """Returns the norms of the traced layers' units, so that no weight is read again."""
        found: dict[Key, np.ndarray] = {}
        for name, array in self._trace.items():
            layer, _, family = name.partition(".")
            if family.endswith(f".{NORMS}"):
                found[int(layer), family.removesuffix(f".{NORMS}")] = array
        return found

    def _signal(self, key: Key) -> np.ndarray:
        """Returns the trace's activity of a family, float32 [num_tokens, num_units]; a block's is its largest."""
        (layer, family), spec = key, self._inputs.model.spec
        values = self._trace[f"{layer}.{activity_of(family, spec)}"].astype(np.float32)
        of_units = values.reshape(len(values), num_units(family, spec), -1)
        return np.abs(of_units).max(axis=2) if of_units.shape[2] > 1 else values

    @functools.cached_property
    def _trace(self) -> dict[str, np.ndarray]:
        """Returns the arrays of the trace, which is decompressed as a whole: once."""
        assert self._inputs.curves is not None
        return load_arrays(self._inputs.curves.trace)


def in_one_format(sparsity: Sparsity, spec: ModelSpec) -> list[tuple[float, Sparsity]]:
    """Splits a division with several formats into one for each format, with the share of the matrices that have it;
    DRAM holds the same share of the units.

    The few replayed layers stand for all, but may not have typical formats: they are replayed in each, and averaged.
    """
    if len({*sparsity.layer_formats}) < 2:
        return [(1.0, sparsity)]
    held = sparsity.budget.cache_bytes / flash_bytes(sparsity.families, spec, sparsity.formats)

    def alone(name: FormatName) -> Sparsity:
        cache_bytes = round(held * flash_bytes(sparsity.families, spec, name))
        budget = sparsity.budget.model_copy(update={"cache_bytes": cache_bytes})
        return sparsity.model_copy(update={"format": name, "layer_formats": (), "budget": budget})

    count = max(len(slice_formats(name)) for name in sparsity.layer_formats)
    counts = Counter(name for layer in sparsity.layer_formats for name in slice_formats(layer, count))
    return [(number / counts.total(), alone(name)) for name, number in sorted(counts.items())]


def _mean(shares: Sequence[float], tokens: Sequence[seconds.TokenCost]) -> seconds.TokenCost:
    """Returns the mean of a token's figures, weighted by `shares`, which sum to 1; counts are rounded."""

    def mean(name: str) -> float:
        return sum(share * getattr(token, name) for share, token in zip(shares, tokens, strict=True))

    counts = round(mean("hits")), round(mean("misses"))
    return seconds.TokenCost(mean("token_s"), mean("flash_s"), mean("reads"), mean("read_bytes"), *counts)


def setting_of(
    sparsity: Sparsity,
    model: Model,
    device: DeviceProfile,
    layers: Sequence[int],
    rank: Mapping[Key, np.ndarray] | None = None,
) -> Setting:
    budget = sparsity.budget
    plan = Plan(
        name="auto",
        method=sparsity.method,
        options=sparsity.options,
        cache=sparsity.cache,
        cache_options=sparsity.cache_options,
        dram_budget_bytes=budget.dram_budget_bytes,
        context_length=sparsity.context_length,
        resident_bytes=budget.resident_bytes,
        predictor_bytes=budget.predictor_bytes,
        kv_cache=sparsity.kv_cache,
        kv_cache_bytes=budget.kv_cache_bytes,
        read_buffer_bytes=budget.buffer_bytes,
        collapse_gap_bytes=device.flash.break_even_gap_bytes,
        queue_depth=device.flash.queue_depth.value,
        parts=_parts(sparsity, model, layers),
    )
    sections = make_sections(model.spec, sparsity.families, sparsity.formats, sparsity.layers_per_group)
    return Setting(model, sparsity.formats, device, sections, plan, rank=rank or {})


def windows_of(num_tokens: int, num_warm: int) -> tuple[list[range], int]:
    """Returns windows of held-out tokens, each with the tokens before it that warm a cache, and the number of these."""
    first = min(max(1, int((1 - HELD_OUT_SHARE) * num_tokens)), num_tokens - 1)
    length = min(WINDOW_TOKENS, num_tokens - first)
    starts = np.unique(np.linspace(first, num_tokens - length, NUM_WINDOWS).astype(int)).tolist()
    warm = min(num_warm, starts[0])
    return [range(start - warm, start + length) for start in starts], warm


def _replayed_tokens(num_tokens: int) -> list[int]:
    return sorted({token for window in windows_of(num_tokens, WARM_TOKENS)[0] for token in window})


def _text(used: np.ndarray) -> UsedUnits:
    """Returns the units of each token, from bool [num_tokens, num_units]."""
    head = max(1, int((1 - HELD_OUT_SHARE) * len(used)))
    hot = np.argsort(-used[:head].sum(axis=0), kind="stable").astype(np.int32)
    ids = {token: np.flatnonzero(used[token]).astype(np.int32) for token in _replayed_tokens(len(used))}
    return UsedUnits(len(used), ids, hot)


def held_share(sparsity: Sparsity, model: Model) -> float:
    """Returns the share of the units that the cache of a division holds."""
    return min(1.0, sparsity.budget.cache_bytes / flash_bytes(sparsity.families, model.spec, sparsity.formats))


def _parts(sparsity: Sparsity, model: Model, layers: Sequence[int]) -> tuple[PartPlan, ...]:
    """Returns pinned units for a cache that admits nothing, else slots, shared by demand (runtime/dram/budget.py)."""
    spec, policy = model.spec, load_class("coldpress.runtime.cache", CachePolicy, sparsity.cache)
    keys = unit_keys(sparsity.families, spec)
    claims = [
        Claim(
            sparsity.density(family, layer),
            num_units(family, spec),
            unit_bytes(family, spec, format_at(sparsity.formats, layer, family)),
            0,
        )
        for layer, family in keys
    ]
    counts = dict(zip(keys, units_with_room(claims, sparsity.budget.cache_bytes), strict=True))
    return tuple(
        PartPlan(
            layer=layer,
            family=family,
            density=sparsity.density(family, layer),
            num_pinned=0 if policy.admits else counts[layer, family],
            cache_slots=counts[layer, family] if policy.admits else 0,
        )
        for layer in layers
        for family in sparsity.families
    )


def calibrated(
    sparsity: Sparsity, entry: LayerStatistics, family: FamilyName, units: int, num_tokens: int
) -> UsedUnits:
    """Returns the units that calibration's tokens use; drawn ones where activity is not known. `predict` keeps
    predictors below OVERPREDICTION; `size` may exceed it if perplexity requires it, so a predictor may turn out slower
    than estimated here."""
    if family == BLOCKS and entry.experts is not None:
        return _text(of_experts(expert_counts.used_experts(entry.experts, num_tokens), units))
    random = np.random.default_rng(entry.layer)
    known = entry.family(family)
    density = sparsity.density(family, entry.layer)
    if density >= 1 or known is None or known.density is None:
        count = min(units, max(1, round(density * units)))
        drawn = {
            token: np.sort(random.choice(units, count, replace=False)).astype(np.int32)
            for token in _replayed_tokens(num_tokens)
        }
        return UsedUnits(num_tokens, drawn, np.arange(units, dtype=np.int32))
    bits = load_arrays(known.arrays, "bits")["bits"]
    active = np.unpackbits(bits, axis=1, count=num_tokens, bitorder="little").astype(bool).T
    text = _text(active)
    if not load("coldpress.runtime.sparsity", Selector, sparsity.method).NEEDS_PREDICTORS:
        return text
    predicted = {
        token: _with_false_positives(ids, units, OVERPREDICTION * density, random) for token, ids in text.ids.items()
    }
    return UsedUnits(num_tokens, predicted, text.hot)


def _with_false_positives(ids: np.ndarray, num_units: int, share: float, random: np.random.Generator) -> np.ndarray:
    """Returns a token's units plus random others, up to the share of all units that a predictor names."""
    lacking = min(num_units, round(share * num_units)) - ids.size
    others = np.setdiff1d(np.arange(num_units), ids, assume_unique=True)
    drawn = random.choice(others, max(0, min(lacking, others.size)), replace=False)
    return np.sort(np.concatenate([ids, drawn])).astype(np.int32)
