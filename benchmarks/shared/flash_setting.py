"""Defines how units lie, are read and are cached where choices see the flash, and what calibration text tells of them.

There are as many units as a model has, each as large as in a 7B (hidden 4096, inner 11008) in int4.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from benchmarks.evaluation.evaluate import CacheSettings, Sparse, evaluate
from benchmarks.evaluation.reads import FORMAT, Placed, Reading
from benchmarks.shared.cases import Case, Parts, case_of
from coldpress.compiler.activity.signals import magnitude_edges
from coldpress.compiler.activity.unit_statistics import unit_norms
from coldpress.compiler.cost_model import PEAK_READ_BYTES, read_units
from coldpress.compiler.seconds import Reading as Requests
from coldpress.runtime.sparsity import flash
from coldpress.runtime.store.computing import Weights, fetch_seconds
from coldpress.runtime.store.planner import MAX_READ_BYTES, Strided
from coldpress.schemas.device import DeviceProfile, Flash
from coldpress.schemas.families import WHOLE_MLP, used_share

FAMILIES_PRUNED = ("mlp_in", "mlp_mid")
UNIT_BYTES = {"mlp_in": 2 * 11008 * 18 // 32, "mlp_mid": 4096 * 18 // 32}
CALIBRATION_BLOCKS = 6
SPLITS: Parts = {
    "calibration": ("fit", slice(0, CALIBRATION_BLOCKS)),
    "validation": ("fit", slice(64, 80)),
    "test": ("test", slice(0, 64)),
}
Key = tuple[int, str]


@dataclass(frozen=True)
class Known:
    """A model, its text, and the signals and norms of its units on calibration text, by layer and family."""

    case: Case
    signals: Mapping[Key, np.ndarray]
    """Signals of the dense model, float32 [T, num_units]."""
    norms: Mapping[Key, np.ndarray]

    @property
    def used(self) -> float:
        """Share of the units that a dense token uses; densities are shares of these."""
        return used_share(WHOLE_MLP, self.case.model.spec)


@dataclass(frozen=True)
class Setting:
    """A layout of units, in the model's own order, with its device and caches."""

    known: Known
    device: DeviceProfile
    groups: int
    slots: float = 0.0
    """Share of its units that each layer keeps in a cache, which begins empty."""

    def reading(self, gap_bytes: float, use_read_units: bool) -> Reading:
        """Returns how the evaluation reads units."""
        placed = {
            (layer, family): Placed(
                Strided(layer % self.groups * UNIT_BYTES[family], UNIT_BYTES[family], self.groups * UNIT_BYTES[family]),
                np.arange(norms.size),
            )
            for (layer, family), norms in self.known.norms.items()
        }
        return Reading(self.flash, int(gap_bytes), MAX_READ_BYTES, use_read_units, placed, self.device)

    @property
    def flash(self) -> Flash:
        """The device's flash."""
        return self.device.flash

    @property
    def dense_ms(self) -> float:
        """Milliseconds of a token that uses all it may; units outside DRAM are read from front to back and not kept."""
        seconds = 0.0
        for key, norms in self.known.norms.items():
            size, count = UNIT_BYTES[key[1]], round(self.known.used * norms.size)
            held = min(count, round(self.slots * count))
            requests = Requests(self.flash, Strided(0, size, size), 0, PEAK_READ_BYTES)
            reads = requests.reads(np.arange(held, count)).arrival
            sizes = held * size, (count - held) * size, 0
            seconds += fetch_seconds(self.device, Weights(FORMAT, count * size), reads, *sizes)
        return 1e3 * seconds

    def cache(self, policy: str = "lru", requests: Mapping[Key, list[np.ndarray]] | None = None) -> CacheSettings:
        """Returns the cache that the evaluation simulates; `requests` are for a policy that looks ahead."""
        slots = {family: round(self.slots * norms.size) for (_, family), norms in self.known.norms.items()}
        return CacheSettings(policy, slots, requests=requests or {})

    @property
    def kept_together(self) -> float:
        """The least gap in bytes that keeps an interval of a layer group in one read, or 0 if such a read is slower."""
        between = (self.groups - 1) * max(UNIT_BYTES.values())
        return between if between < self.flash.break_even_gap_bytes else 0.0

    def flash_selector(self, density: float) -> Sparse:
        """Returns the product's selector `flash`, one density for all, fitted to calibration text and this device."""
        edges, arrays = magnitude_edges(), {}
        for key, norms in self.known.norms.items():
            statistics = {
                "magnitude_histogram": np.histogram(np.abs(self.known.signals[key]), edges)[0],
                "magnitude_edges": edges,
                "unit_norms": norms,
                "read_units": read_units(self.flash, UNIT_BYTES[key[1]], self.groups),
                "resident_share": np.array([self.slots]),
            }
            arrays[key] = flash.Plugin().fit(norms.size, self.known.used * density, statistics, flash.Options())
        return Sparse(flash.Plugin(), FAMILIES_PRUNED, arrays)


def known_of(name: str, folder: Path) -> Known:
    """Runs one dense pass over calibration text."""
    case = case_of(name, folder, SPLITS)
    case.stream.threads = 1
    seen: dict[Key, list[np.ndarray]] = {}

    def select_many(values: np.ndarray, arrays: Any) -> np.ndarray:
        seen.setdefault(arrays["key"], []).append(values.copy())
        return np.ones(values.shape, bool)

    keys = [(layer, family) for layer in range(case.model.spec.num_hidden_layers) for family in FAMILIES_PRUNED]
    noting: Any = SimpleNamespace(select_many=select_many, SEES_RESIDENCY=False)
    arrays: Any = {key: {"key": key} for key in keys}
    evaluate(case.stream, case.splits["calibration"], Sparse(noting, FAMILIES_PRUNED, arrays))
    signals = {key: np.concatenate(parts) for key, parts in seen.items()}
    return Known(case, signals, {key: unit_norms(case.model, *key) for key in keys})  # type: ignore[arg-type]


def at_ppl(curve: Iterable[tuple[float, float]], ppl: float) -> float:
    """Returns the value at `ppl` of a curve of (perplexity, value), linear in log perplexity; NaN outside of it."""
    x, y = zip(*sorted((math.log(at), value) for at, value in curve), strict=True)
    return float(np.interp(math.log(ppl), x, y)) if x[0] <= math.log(ppl) <= x[-1] else math.nan
