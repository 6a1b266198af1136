"""Which of several divisions of the budget decodes fastest, before anything is placed, ordered or trained.

Held-out calibration tokens are replayed for a few layers: what is missed of the hottest units that DRAM holds becomes
reads by the runtime's own planner, in the model's own order, and seconds by the device's law, as in the simulator.
Placement, order and a cache that follows the text only make it faster. Where activity is not known yet, units are drawn
at random, the worst case for caches and orders; a predictor's extra units, too. A dense run is known exactly
(compiler/dense_run.py), and is taken unless another method is faster by MARGIN.
"""

import logging
from collections.abc import Iterator, Sequence

import numpy as np

from coldpress.compiler.cost_model import unit_bytes
from coldpress.compiler.dense_run import buffer_of, computed_bytes, dense_run, read_units
from coldpress.compiler.io import load_arrays
from coldpress.runtime.plugins import load
from coldpress.runtime.store.clock import dram_seconds, fetch_seconds
from coldpress.schemas.activations import Activations, LayerStatistics
from coldpress.schemas.device import DeviceProfile
from coldpress.schemas.families import FamilyName, num_units
from coldpress.schemas.model import Model
from coldpress.schemas.sparsity import Sparsity, Tried

LOG = logging.getLogger(__name__)
MARGIN = 0.05
"""Share of the dense run's time that another method must save: less may be noise, or what the estimate leaves out."""
REPLAYED_LAYERS, REPLAYED_TOKENS = 4, 48
HELD_OUT_SHARE = 0.25


def choose(
    divisions: Sequence[Sparsity], model: Model, activations: Activations, device: DeviceProfile, overprediction: float
) -> Sparsity:
    """The division to build with; its record keeps the seconds of a token that each was judged to take.

    Args:
        divisions: One of each method.
        model: That is built.
        activations: Of calibration text, of which the last part is replayed.
        device: Whose law gives seconds.
        overprediction: Predicted over active units. `predict` keeps predictors to it; `size` may go beyond it where
            perplexity asks, so a predictor may turn out slower than it was judged.
    """
    seconds = {found.method: token_seconds(found, model, activations, device, overprediction) for found in divisions}
    tried = tuple(Tried(method=method, token_s=value) for method, value in seconds.items())
    fastest = min(divisions, key=lambda found: seconds[found.method])
    dense = next((found for found in divisions if found.method == "dense"), None)
    if dense is not None and seconds[fastest.method] > (1 - MARGIN) * seconds["dense"]:
        fastest = dense
    LOG.info(
        "allocate: auto takes %s; a token takes about %s",
        fastest.method,
        ", ".join(f"{1e3 * value:.3g} ms with {method}" for method, value in seconds.items()),
    )
    return fastest.model_copy(update={"tried": tried})


def token_seconds(
    sparsity: Sparsity, model: Model, activations: Activations, device: DeviceProfile, overprediction: float
) -> float:
    """Modelled seconds of a decoded token; arguments as of `choose`."""
    if sparsity.method == "dense":
        budget = sparsity.budget.dram_budget_bytes
        run = dense_run(model, sparsity.format, sparsity.context_length, budget, device, sparsity.kv_cache)
        if run is not None:
            return run.token_s
    layers = activations.layers
    picked = np.unique(np.linspace(0, len(layers) - 1, min(REPLAYED_LAYERS, len(layers))).round().astype(int))
    costs = [
        _replay(sparsity, model, layers[number], activations.num_tokens, device, overprediction)
        for number in picked.tolist()
    ]
    budget = sparsity.budget
    computed = computed_bytes(model, sparsity.format, budget.resident_bytes, budget.kv_cache_bytes)
    computed += budget.predictor_bytes
    return float(np.mean(costs)) * len(layers) + dram_seconds(device, computed, 1)


def _replay(
    sparsity: Sparsity,
    model: Model,
    entry: LayerStatistics,
    num_tokens: int,
    device: DeviceProfile,
    overprediction: float,
) -> float:
    """Seconds of one layer's requests, the mean of held-out tokens; every missed unit counts as kept in the cache."""
    budget = sparsity.budget
    free = budget.buffer_bytes + budget.cache_bytes
    buffer_bytes = buffer_of(model, sparsity, free, device)
    gap_bytes = device.flash.break_even_gap_bytes

    def demand(family: FamilyName, layer: int) -> float:
        size = unit_bytes(family, model.spec, sparsity.format)
        return sparsity.density(family, layer) * num_units(family, model.spec) * size

    layers = range(model.spec.num_hidden_layers)
    total = sum(demand(family, layer) for family in sparsity.families for layer in layers)
    seconds = 0.0
    for family in sparsity.families:
        size = unit_bytes(family, model.spec, sparsity.format)
        held = int(budget.cache_bytes * demand(family, entry.layer) / max(1.0, total)) // size
        tokens, hot = _tokens(sparsity, entry, family, num_units(family, model.spec), num_tokens, overprediction)
        for chosen in tokens:
            missing = chosen[~np.isin(chosen, hot[:held])]
            flash_s = read_units(device, size, missing, gap_bytes, buffer_bytes)[2]
            seconds += fetch_seconds(device, flash_s, size * chosen.size, size * missing.size) / len(tokens)
    return seconds


def _tokens(
    sparsity: Sparsity, entry: LayerStatistics, family: str, units: int, num_tokens: int, overprediction: float
) -> tuple[list[np.ndarray], np.ndarray]:
    """(the units of each held-out token, ascending; all units, those that the tokens before use most often first)."""
    random = np.random.default_rng(entry.layer)
    known = entry.family(family)
    density = sparsity.density(family, entry.layer)
    if density >= 1 or known is None or known.density is None:
        count = min(units, max(1, round(density * units)))
        drawn = [np.sort(random.choice(units, count, replace=False)) for _ in range(REPLAYED_TOKENS)]
        return drawn, np.arange(units)
    bits = load_arrays(known.arrays, "bits")["bits"]
    active = np.unpackbits(bits, axis=1, count=num_tokens, bitorder="little").astype(bool)
    head = max(1, int((1 - HELD_OUT_SHARE) * num_tokens))
    hot = np.argsort(-active[:, :head].sum(axis=1), kind="stable")
    picked = np.unique(np.linspace(min(head, num_tokens - 1), num_tokens - 1, REPLAYED_TOKENS).astype(int))
    extra = load("coldpress.runtime.sparsity", sparsity.method).NEEDS_PREDICTORS
    return list(_used(active[:, picked].T, overprediction * density if extra else 0.0, random)), hot


def _used(active_TU: np.ndarray, predicted: float, random: np.random.Generator) -> Iterator[np.ndarray]:
    """Ids of each token's units, and random others up to the share `predicted`, which a predictor names in vain."""
    for row in active_TU:
        ids = np.flatnonzero(row)
        lacking = min(row.size, round(predicted * row.size)) - ids.size
        others = np.flatnonzero(~row)
        drawn = random.choice(others, max(0, min(lacking, others.size)), replace=False)
        yield np.sort(np.concatenate([ids, drawn]))
