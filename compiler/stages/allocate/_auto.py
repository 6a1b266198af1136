"""Picks the division of the budget that decodes fastest, before anything is placed, ordered or trained.

Held-out tokens of a few layers run on the simulated device (compiler/seconds.py): calibration's where activity is
known, else those of the trace of `explore`, from whose signals the selector chooses. DRAM holds the hottest units that
fit, and the others are read in the model's own order. Placement, order and an adaptive cache can only make it faster. A
predictor's extra units are drawn at random, and so are all units if there is no trace: the worst case for caches and
orders. A dense run is known exactly (compiler/dense_run.py), and wins unless another method is faster
by MARGIN.
"""

import logging
from collections.abc import Iterator, Sequence

import numpy as np

from coldpress.compiler import seconds
from coldpress.compiler.activity.choice import Choice, replayed_layers
from coldpress.compiler.activity.unit_statistics import all_statistics
from coldpress.compiler.cost_model import unit_bytes
from coldpress.compiler.dense_run import dense_run
from coldpress.compiler.io import load_arrays
from coldpress.compiler.seconds import Key, Setting
from coldpress.compiler.sections import make_sections
from coldpress.compiler.stages.allocate._quality import Floor
from coldpress.compiler.stages.allocate._rules import Inputs
from coldpress.runtime.plugins import load, options_of
from coldpress.runtime.sparsity import Selector
from coldpress.schemas.activations import LayerStatistics
from coldpress.schemas.device import DeviceProfile
from coldpress.schemas.families import FamilyName, activity_of, num_units
from coldpress.schemas.layout import PartPlan, Plan
from coldpress.schemas.model import Model
from coldpress.schemas.sparsity import Sparsity, Tried

LOG = logging.getLogger(__name__)
MARGIN = 0.05
"""Share of the dense run's time that another method must save; less may be noise, or beyond the estimate's accuracy."""
REPLAYED_TOKENS = 48
HELD_OUT_SHARE = 0.25


def choose(divisions: Sequence[Sparsity], inputs: Inputs, overprediction: float, floor: Floor) -> Sparsity:
    """Returns the fastest division; its record lists the estimated seconds per token of each.

    Args:
        divisions: One for each method.
        inputs: Of the stage; the device's law gives seconds.
        overprediction: Predicted over active units. `predict` keeps predictors below it; `size` may exceed it if
            perplexity requires it, so a predictor may turn out slower than estimated here.
        floor: Tells what each division loses.
    """
    token_s = {found.method: token_seconds(found, inputs, overprediction) for found in divisions}
    tried = tuple(_tried(found, token_s[found.method], inputs.model, floor) for found in divisions)
    fastest = min(divisions, key=lambda found: token_s[found.method])
    dense = next((found for found in divisions if found.method == "dense"), None)
    if dense is not None and token_s[fastest.method] > (1 - MARGIN) * token_s["dense"]:
        fastest = dense
    LOG.info(
        "allocate: auto takes %s; a token takes about %s",
        fastest.method,
        ", ".join(f"{1e3 * value:.3g} ms with {method}" for method, value in token_s.items()),
    )
    return fastest.model_copy(update={"tried": tried})


def _tried(found: Sparsity, token_s: float, model: Model, floor: Floor) -> Tried:
    density = found.mlp_density(model.spec)
    return Tried(method=found.method, token_s=token_s, density=density, ppl_ratio=floor.ratio(found.method, density))


def token_seconds(sparsity: Sparsity, inputs: Inputs, overprediction: float) -> float:
    """Returns the modelled seconds of a decoded token; the arguments are those of `choose`."""
    model, activations, device = inputs.model, inputs.activations, inputs.device
    if sparsity.method == "dense":
        budget = sparsity.budget.dram_budget_bytes
        run = dense_run(model, sparsity.format, sparsity.context_length, budget, device, sparsity.kv_cache)
        if run is not None:
            return run.token_s
    traced = _traced(sparsity, inputs)
    parts: list[PartPlan] = []
    rank: dict[Key, np.ndarray] = {}
    requests: dict[Key, list[np.ndarray]] = {}
    for entry in (activations.layers[number] for number in replayed_layers(len(activations.layers))):
        for part in _held(sparsity, model, entry.layer):
            key, units = (part.layer, part.family), num_units(part.family, model.spec)
            if key in traced:
                chosen_TU, hot = _replayed(traced[key])
                requests[key] = [np.flatnonzero(row) for row in chosen_TU]
            else:
                requests[key], hot = _tokens(
                    sparsity, entry, part.family, units, activations.num_tokens, overprediction
                )
            parts.append(part)
            rank[key] = hot.astype(np.int32)
    tokens = [dict(zip(requests, ids, strict=True)) for ids in zip(*requests.values(), strict=True)]
    sections = make_sections(model.spec, sparsity.families, sparsity.format, sparsity.layers_per_group)
    setting = Setting(model, sparsity.format, device, sections, _plan(sparsity, parts, device), rank=rank)
    return seconds.token_seconds(setting, seconds.requests_of(tokens))


def _traced(sparsity: Sparsity, inputs: Inputs) -> dict[Key, np.ndarray]:
    """Returns the units that the selector chooses for each token of the trace, bool [num_tokens, num_units], by layer
    and family; empty without a trace, or if activity is known without one."""
    curves = inputs.curves
    if curves is None or curves.curve(sparsity.method) is None:
        return {}
    selector, spec = load("coldpress.runtime.sparsity", Selector, sparsity.method), inputs.model.spec
    own = options_of(selector, sparsity.options)
    statistics = all_statistics(inputs.model, inputs.activations.of_layers(curves.trace_layers), sparsity.families)
    signals = load_arrays(curves.trace)
    found: dict[Key, np.ndarray] = {}
    for (layer, family), known in statistics.items():
        density = sparsity.density(family, layer)
        arrays = {(layer, family): selector.fit(num_units(family, spec), density, known, own)}
        activity = signals[f"{layer}.{activity_of(family, spec)}"].astype(np.float32)
        found[layer, family] = Choice(selector, arrays, spec).mask(layer, family, activity)
    return found


def _replayed(active_TU: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Divides a text, bool [num_tokens, num_units], into what DRAM is filled by and what is replayed.

    Returns:
        The units of the replayed tokens, which are held out; and all units, the most used before them first.
    """
    head, picked = _held_out(len(active_TU))
    return active_TU[picked], np.argsort(-active_TU[:head].sum(axis=0), kind="stable")


def _held_out(num_tokens: int) -> tuple[int, np.ndarray]:
    """Returns the number of tokens before those that are held out, and the replayed ones among these."""
    head = max(1, int((1 - HELD_OUT_SHARE) * num_tokens))
    first = min(head, num_tokens - 1)
    return head, np.unique(np.linspace(first, num_tokens - 1, REPLAYED_TOKENS).astype(int))


def _held(sparsity: Sparsity, model: Model, layer: int) -> list[PartPlan]:
    """Returns a layer's parts: each family pins as many units as its share of the cache's bytes holds; shares follow
    demand."""

    def demand(family: FamilyName, layer: int) -> float:
        size = unit_bytes(family, model.spec, sparsity.format)
        return sparsity.density(family, layer) * num_units(family, model.spec) * size

    layers = range(model.spec.num_hidden_layers)
    total = sum(demand(family, other) for family in sparsity.families for other in layers)
    return [
        PartPlan(
            layer=layer,
            family=family,
            density=sparsity.density(family, layer),
            num_pinned=min(
                num_units(family, model.spec),
                int(sparsity.budget.cache_bytes * demand(family, layer) / max(1.0, total))
                // unit_bytes(family, model.spec, sparsity.format),
            ),
            cache_slots=0,
        )
        for family in sparsity.families
    ]


def _plan(sparsity: Sparsity, parts: Sequence[PartPlan], device: DeviceProfile) -> Plan:
    """Returns a plan for the division while nothing else is known."""
    budget = sparsity.budget
    return Plan(
        name="auto",
        method=sparsity.method,
        options=sparsity.options,
        cache="static",
        dram_budget_bytes=budget.dram_budget_bytes,
        context_length=sparsity.context_length,
        resident_bytes=budget.resident_bytes,
        predictor_bytes=budget.predictor_bytes,
        kv_cache=sparsity.kv_cache,
        kv_cache_bytes=budget.kv_cache_bytes,
        read_buffer_bytes=budget.buffer_bytes,
        collapse_gap_bytes=device.flash.break_even_gap_bytes,
        queue_depth=device.flash.queue_depth.value,
        parts=tuple(parts),
    )


def _tokens(
    sparsity: Sparsity, entry: LayerStatistics, family: str, units: int, num_tokens: int, overprediction: float
) -> tuple[list[np.ndarray], np.ndarray]:
    """Returns (units of each held-out token, ascending; all units, the most used by the tokens before them first)."""
    random = np.random.default_rng(entry.layer)
    known = entry.family(family)
    density = sparsity.density(family, entry.layer)
    if density >= 1 or known is None or known.density is None:
        count = min(units, max(1, round(density * units)))
        drawn = [np.sort(random.choice(units, count, replace=False)) for _ in _held_out(num_tokens)[1]]
        return drawn, np.arange(units)
    bits = load_arrays(known.arrays, "bits")["bits"]
    active = np.unpackbits(bits, axis=1, count=num_tokens, bitorder="little").astype(bool)
    replayed_TU, hot = _replayed(active.T)
    extra = load("coldpress.runtime.sparsity", Selector, sparsity.method).NEEDS_PREDICTORS
    return list(_used(replayed_TU, overprediction * density if extra else 0.0, random)), hot


def _used(active_TU: np.ndarray, predicted: float, random: np.random.Generator) -> Iterator[np.ndarray]:
    """Yields the ids of each token's units plus random others, up to the share `predicted`: a predictor's false
    positives."""
    for row in active_TU:
        ids = np.flatnonzero(row)
        lacking = min(row.size, round(predicted * row.size)) - ids.size
        others = np.flatnonzero(~row)
        drawn = random.choice(others, max(0, min(lacking, others.size)), replace=False)
        yield np.sort(np.concatenate([ids, drawn]))
