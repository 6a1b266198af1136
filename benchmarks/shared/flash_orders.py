"""Orders of units on flash for benchmarks.flash_selection: as they are, by co-activation, made for the choice."""

import dataclasses
import math
from collections.abc import Callable, Mapping

import numpy as np
from scipy.special import log_softmax

from benchmarks.evaluation.evaluate import Masks, Sparse
from benchmarks.shared.flash_prices import fitted
from benchmarks.shared.flash_setting import FAMILIES_PRUNED, UNIT_BYTES, Known, Orders, Setting, top_k
from coldpress.compiler.stages.order._task import Heuristic
from coldpress.runtime.plugins import load
from coldpress.runtime.sparsity import flash
from tests.support.statistics import task_of

ROUNDS = 3
TRIED_DENSITIES = (0.35, 0.45, 0.6)
KL_BLOCKS = 2
"""Of calibration text."""


def structural(setting: Setting) -> Orders:
    """The model's own order."""
    return {key: np.arange(norms.size) for key, norms in setting.known.norms.items()}


def coactivation(setting: Setting) -> Orders:
    """Ripple's Algorithm 1 on what top-k at half of the units uses of calibration text."""
    return {key: _arranged(top_k(signal, 0.5), key[1]) for key, signal in setting.known.signals.items()}


def own(setting: Setting) -> Orders:
    """Algorithm 1 and the choice in turns, at one KL divergence from the dense model; the fastest of all rounds.

    A round takes the density at which the order of the round before has that divergence, and orders anew: by the units
    that are worth their bytes by themselves, or by those that were chosen, whichever takes less on calibration text.
    """
    dense = _log_probabilities(setting.known, None)
    best = structural(setting)
    curve = _curve(setting, best, dense)
    target = curve[1][0]
    found = curve[1][1]
    for number in range(ROUNDS):
        losses, densities = zip(*sorted((kl, density) for kl, _, density in curve), strict=True)
        density = float(np.interp(target, losses, densities))
        candidates = [_anew(setting, best, density, chosen) for chosen in (False, True)]
        curves = [_curve(setting, orders, dense) for orders in candidates]
        times = [_ms_at(tried, target) for tried in curves]
        print(f"order, round {number}: {found:.4f} ms, by worth {times[0]:.4f}, by choice {times[1]:.4f}", flush=True)
        if not min(times) < found:
            break
        found, best, curve = min(zip(times, candidates, curves, strict=True), key=lambda entry: entry[0])
    return best


def _anew(setting: Setting, orders: Orders, density: float, by_choice: bool) -> Orders:
    arrays = fitted(setting, dict.fromkeys(setting.known.keys, density))
    made: dict[tuple[int, str], np.ndarray] = {}
    for key, signal in setting.known.signals.items():
        used = (signal * setting.known.norms[key]) ** 2 > arrays[key]["price"][0]
        if by_choice:
            order = orders[key]
            in_order = {**arrays[key], "unit_norms": setting.known.norms[key][order]}
            used[:, order] = flash.Plugin().select_many(np.ascontiguousarray(signal[:, order]), in_order)
        made[key] = _arranged(used, key[1])
    return made


def _curve(setting: Setting, orders: Orders, dense: np.ndarray) -> list[tuple[float, float, float]]:
    """(KL divergence, milliseconds of a token's reads, density), the density rising."""
    there = dataclasses.replace(setting, orders=orders)
    points: list[tuple[float, float, float]] = []
    for density in TRIED_DENSITIES:
        sparse = Sparse(flash.Plugin(), FAMILIES_PRUNED, fitted(there, dict.fromkeys(there.known.keys, density)))
        masks = Masks(sparse, there.known.case.stream.spec, reading=there.reading(there.kept_together, True))
        found = _log_probabilities(there.known, masks)
        kl = float((np.exp(dense) * (dense - found)).sum(axis=-1).mean())
        seconds = math.fsum(read.seconds for read in masks.read.values())
        points.append((kl, 1e3 * seconds / found[..., 0].size, density))
    return points


def _ms_at(curve: list[tuple[float, float, float]], kl: float) -> float:
    x, y, _ = zip(*sorted(curve), strict=True)
    return float(np.interp(math.log(kl), np.log(x), y))


def _log_probabilities(known: Known, masks: Masks | None) -> np.ndarray:
    """float64 [blocks, T, vocab_size]."""
    tokens, stream = known.case.splits["calibration"][:KL_BLOCKS], known.case.stream
    if masks is None:
        return log_softmax(stream.logits(tokens).astype(np.float64), axis=-1)
    logits = stream.head(stream.last_hidden(tokens, masks.layer)).numpy()
    return log_softmax(logits.astype(np.float64), axis=-1)


def _arranged(used: np.ndarray, family: str) -> np.ndarray:
    return (
        load("coldpress.compiler.stages.order", Heuristic, "ripple")
        .arrange(task_of(used.T, unit_bytes=UNIT_BYTES[family]))
        .order
    )


ORDERS: Mapping[str, Callable[[Setting], Orders]] = {
    "structural": structural,
    "coactivation": coactivation,
    "own": own,
}
