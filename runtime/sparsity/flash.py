"""Flash: the intervals of flash that are worth their reading time, instead of the most important units.

Reads the signals of top-k, where units lie, and which of them are in DRAM. A unit's importance is the square of its
signal times the norm of its weights (WINA): if units were independent, leaving the unit out would add this to the
squared error of the product. The selector maximizes importance less a price per second over sets of intervals, by the
device's law (runtime/kernels/intervals.py): it reads an unimportant unit if skipping it would take longer, and an
isolated unit must be worth a separate read. A unit in DRAM costs nothing; the selector names it if it would be worth
its bytes, so that the cache counts it as used, and `use_read_units` adds the other units in DRAM. Neuron Chunking
(2511.18692) takes chunks greedily by a similar measure.
"""

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
from pydantic import Field

from coldpress.runtime.kernels.intervals import Times, best_intervals
from coldpress.runtime.sparsity import Kept, Residency, Selector, topk
from coldpress.runtime.sparsity._magnitudes import SMALLEST, draws
from coldpress.schemas.errors import ColdpressError
from coldpress.schemas.model import ModelSpec

DRAWN_UNITS = 1 << 14
"""Units of the random tokens from which a density's price is found."""
MOST = float(np.finfo(np.float32).max)
STEPS = 14
"""Bisection steps on the logarithm of the price, which give it to 0.2 %."""


class Options(topk.Options):
    use_read_units: bool = Field(
        default=True,
        description="true or false: whether a token also uses what is in DRAM, and what the reads for its units bring",
    )


class Plugin(Selector[Options]):
    CHOOSES = ("mlp_in", "mlp_mid", "attn_in", "attn_out")
    OPTIONS = Options
    KEPT: ClassVar[Mapping[str, Kept]] = {
        "price": Kept("float32"),
        "read_units": Kept("float32", 4, ((0, MOST), (-MOST, MOST), (0, MOST), (0, 1))),
        "unit_norms": Kept("float32", None),
    }
    SEES_RESIDENCY = True

    def families(self, spec: ModelSpec, options: Options) -> tuple[str, ...]:
        return topk.linear_inputs(options)

    def fit(
        self, num_units: int, density: float, statistics: Mapping[str, np.ndarray], options: Options
    ) -> dict[str, np.ndarray]:
        """Computes `price` float32 [1], `read_units` float32 [4] and `unit_norms` float32 [num_units].

        At this price tokens name `density` of the units, if calibration's magnitudes lie in random order and a random
        `resident_share` of the units is in DRAM. With a flash order that groups units used together, and a cache that
        holds units used again, the same price buys more. The share matters because isolated units among units in DRAM
        are expensive to read: with a price found without it, tokens would name far fewer units. Raises `ColdpressError`
        if `statistics` lacks magnitudes, norms or the cost of a read.
        """
        if "unit_norms" not in statistics or "read_units" not in statistics:
            raise ColdpressError(
                f"{self.name()} needs the norms of the source's weights and what a read costs, which an artifact of "
                f"another method does not have; build with method={self.name()}"
            )
        norms = np.asarray(statistics["unit_norms"], np.float32)
        kept = {"read_units": np.asarray(statistics["read_units"], np.float32), "unit_norms": norms}
        gain = _gain(draws(statistics, (max(1, DRAWN_UNITS // num_units), num_units)), kept)
        share = float(statistics["resident_share"][0]) if "resident_share" in statistics else 0.0
        present = np.random.default_rng(1).random(gain.shape) < share
        return {"price": np.array([_price(gain, present, density, kept["read_units"])], np.float32), **kept}

    def select(self, signal: np.ndarray, arrays: Mapping[str, np.ndarray], residency: Residency) -> np.ndarray:
        """Chooses the units worth reading, and the units in DRAM worth their bytes: ids, int32 ascending, at least one.
        `signal` is float32 [num_units]."""
        gain, place = _gain(signal, arrays), residency.position
        laid_out, present = np.empty_like(gain), np.empty_like(residency.present)
        laid_out[place], present[place] = gain, residency.present
        named = _named(laid_out[None], present[None], float(arrays["price"][0]), arrays["read_units"])[0, place]
        return np.flatnonzero(named).astype(np.int32) if named.any() else np.array([gain.argmax()], np.int32)

    def select_many(self, activity: np.ndarray, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
        gain = _gain(activity, arrays)
        chosen = _chosen(gain, float(arrays["price"][0]), arrays["read_units"])
        empty = np.flatnonzero(~chosen.any(axis=1))
        chosen[empty, gain[empty].argmax(axis=1)] = True
        return chosen


def _price(gain: np.ndarray, present: np.ndarray, density: float, read_units: np.ndarray) -> float:
    """Finds the price at which tokens name `density` of all units; 0 for a density of 1."""
    if density >= 1:
        return 0.0
    high = float(gain.max(initial=SMALLEST))
    low = 1e-12 * high
    for _ in range(STEPS):
        middle = (low * high) ** 0.5
        if np.count_nonzero(_named(gain, present, middle, read_units)) > density * gain.size:
            low = middle
        else:
            high = middle
    return high


def _named(gain: np.ndarray, present: np.ndarray, price: float, read_units: np.ndarray) -> np.ndarray:
    """Marks units worth reading and units in DRAM worth their bytes, in flash order: bool [T, num_units]."""
    to_read = np.where(present, np.float32(0), gain)
    return np.where(present, gain > price, _chosen(to_read, price, read_units))


def _chosen(gain: np.ndarray, price: float, read_units: np.ndarray) -> np.ndarray:
    return best_intervals(gain, price, Times(*map(float, read_units)))


def _gain(signal: np.ndarray, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    with np.errstate(over="ignore"):  # an infinite importance has no difference to another one
        return np.minimum((signal * arrays["unit_norms"]) ** 2, np.float32(MOST))
