"""How units lie, are read and cached in benchmarks.flash_selection, and what calibration text says of them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from benchmarks import sparsity
from benchmarks.evaluation.evaluate import CacheSettings, Sparse, evaluate
from benchmarks.evaluation.reads import FORMAT, Placed, Reading
from benchmarks.shared.cases import Case, case_of
from coldpress.compiler.activity.unit_statistics import unit_norms
from coldpress.compiler.cost_model import PEAK_READ_BYTES, read_units
from coldpress.compiler.seconds import Reading as Requests
from coldpress.runtime.sparsity import Residency, topk
from coldpress.runtime.store.computing import Weights, fetch_seconds
from coldpress.runtime.store.planner import Strided
from coldpress.runtime.store.reads import MAX_READ_BYTES
from coldpress.schemas.device import DeviceProfile, Flash
from coldpress.schemas.families import WHOLE_MLP, used_share

FAMILIES_PRUNED = ("mlp_in", "mlp_mid")
UNIT_BYTES = {"mlp_in": 2 * 11008 * 18 // 32, "mlp_mid": 4096 * 18 // 32}
CALIBRATION_BLOCKS = 6
Orders = Mapping[tuple[int, str], np.ndarray]


@dataclass(frozen=True)
class Known:
    """A model, its text, and what calibration text says of it, by layer and family."""

    case: Case
    test: np.ndarray
    signals: Mapping[tuple[int, str], np.ndarray]
    """float32 [T, num_units], of the dense model."""
    norms: Mapping[tuple[int, str], np.ndarray]
    priced: dict[Any, Any] = field(default_factory=dict)
    """What was fitted by loss so far (_flash_prices.py)."""

    @property
    def keys(self) -> list[tuple[int, str]]:
        """All layers and families."""
        return list(self.norms)

    @property
    def used(self) -> float:
        """Share of the units that a dense token uses: densities are shares of these."""
        return used_share(WHOLE_MLP, self.case.model.spec)


@dataclass(frozen=True)
class Setting:
    """How units lie and are read."""

    known: Known
    device: DeviceProfile
    groups: int
    orders: Orders
    slots: float = 0.0
    """Share of its units that each layer keeps in an LRU cache, which begins empty."""

    def reading(self, gap_bytes: float, use_read_units: bool) -> Reading:
        """For the evaluation."""
        placed = {
            (layer, family): Placed(
                Strided(layer % self.groups * UNIT_BYTES[family], UNIT_BYTES[family], self.groups * UNIT_BYTES[family]),
                self.orders[layer, family],
            )
            for layer, family in self.known.keys
        }
        return Reading(self.flash, int(gap_bytes), MAX_READ_BYTES, use_read_units, placed, self.device)

    @property
    def flash(self) -> Flash:
        """Of the device."""
        return self.device.flash

    @property
    def dense_ms(self) -> float:
        """Of a token that uses all that it may: what DRAM does not hold is read from front to back, and not kept."""
        seconds = 0.0
        for key, norms in self.known.norms.items():
            size, count = UNIT_BYTES[key[1]], round(self.known.used * norms.size)
            held = min(count, round(self.slots * count))
            requests = Requests(self.flash, Strided(0, size, size), 0, PEAK_READ_BYTES)
            reads = requests.reads(np.arange(held, count)).arrival
            sizes = held * size, (count - held) * size, 0
            seconds += fetch_seconds(self.device, Weights(FORMAT, count * size), reads, *sizes)
        return 1e3 * seconds

    def costs(self, family: str) -> np.ndarray:
        """See compiler/cost_model.py."""
        return read_units(self.flash, UNIT_BYTES[family], self.groups)

    @property
    def cache(self) -> CacheSettings | None:
        """For the evaluation."""
        if not self.slots:
            return None
        return CacheSettings("lru", {key[1]: self.num_slots(key) for key in self.known.keys})

    def num_slots(self, key: tuple[int, str]) -> int:
        """Units that a layer keeps."""
        return round(self.slots * self.known.norms[key].size)

    @property
    def kept_together(self) -> float:
        """The least gap that does not take an interval of a layer group apart, where one read of it is faster."""
        between = (self.groups - 1) * max(UNIT_BYTES.values())
        return between if between < self.flash.break_even_gap_bytes else 0.0


def known_of(name: str, folder: Path, num_blocks: int) -> Known:
    """One dense pass over calibration text."""
    case = case_of(name, folder, sparsity.SPLITS)
    case.stream.threads = 1
    calibration = case.splits["calibration"][:CALIBRATION_BLOCKS]
    seen: dict[tuple[int, str], list[np.ndarray]] = {}

    def select_many(values: np.ndarray, arrays: Any) -> np.ndarray:
        seen.setdefault(arrays["key"], []).append(values.copy())
        return np.ones(values.shape, bool)

    keys = [(layer, family) for layer in range(case.model.spec.num_hidden_layers) for family in FAMILIES_PRUNED]
    evaluate(case.stream, calibration, masked_by(select_many, keys))
    signals = {key: np.concatenate(parts) for key, parts in seen.items()}
    norms = {key: unit_norms(case.model, *key) for key in keys}  # type: ignore[arg-type]
    return Known(case, case.splits["test"][:num_blocks], signals, norms)


def masked_by(
    select_many: Callable[[np.ndarray, Any], np.ndarray],
    keys: list[tuple[int, str]],
    select: Callable[[np.ndarray, Any, Residency], np.ndarray] | None = None,
) -> Sparse:
    """A choice of a benchmark's own, whose arrays are its layer and family; `select` where it sees residency."""

    def alone(signal: np.ndarray, arrays: Any, residency: Residency) -> np.ndarray:
        return np.flatnonzero(select_many(signal[None], arrays)[0]).astype(np.int32)

    selector: Any = SimpleNamespace(select_many=select_many, select=select or alone, SEES_RESIDENCY=select is not None)
    return Sparse(selector, FAMILIES_PRUNED, {key: {"key": key} for key in keys})  # type: ignore[dict-item]


def top_k(values: np.ndarray, density: float) -> np.ndarray:
    """Marks the units that top-k uses of each token: float32 [T, num_units] -> bool [T, num_units]."""
    selector = topk.Plugin()
    return selector.select_many(values, selector.fit(values.shape[1], density, {}, topk.Options()))
