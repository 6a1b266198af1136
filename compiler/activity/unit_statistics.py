"""The input for fitting selectors: calibration's arrays of one family of one layer, its units' weight norms, and read
costs. Norms are computed only when a selector asks for them, from the source's tensors a few rows at a time."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from coldpress.compiler.checkpoint.tensors import read_rows
from coldpress.compiler.io import load_arrays
from coldpress.runtime.sparsity import Selector
from coldpress.schemas.activations import Activations
from coldpress.schemas.families import FamilyName, num_units, slices, unit_keys
from coldpress.schemas.model import Model, ModelSpec, matrices, role_shape

NORMS = "unit_norms"
BY_TOKEN = ("bits", "context_counts")
"""Arrays that grow with the text: no selector is fitted to them."""
CHUNK_VALUES = 1 << 20
"""Values of a matrix in memory at a time."""


class UnitStatistics(Mapping[str, np.ndarray]):
    """Calibration's arrays by name, and `unit_norms`, which are computed on first use unless they are known."""

    def __init__(self, model: Model, layer: int, family: FamilyName, counted: Mapping[str, np.ndarray]) -> None:
        self._unit, self._known = (model, layer, family), dict(counted)

    def __getitem__(self, name: str) -> np.ndarray:
        if name == NORMS and name not in self._known:
            self._known[name] = unit_norms(*self._unit)
        return self._known[name]

    def __contains__(self, name: object) -> bool:
        return name == NORMS or name in self._known

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys((*self._known, NORMS)))

    def __len__(self) -> int:
        return len({*self._known, NORMS})


def all_statistics(
    model: Model,
    activations: Activations,
    families: Iterable[FamilyName],
    read_units: Mapping[tuple[int, str], np.ndarray] | None = None,
    resident_share: float = 0.0,
    norms: Mapping[tuple[int, str], np.ndarray] | None = None,
) -> dict[tuple[int, str], UnitStatistics]:
    """Returns the statistics that selectors are fitted to, by layer and family; a family that `calibrate` did not count
    has no magnitudes. `read_units` has the cost of reads beyond their units' bytes, in units, float64 [4]
    (compiler/cost_model.py), None without a device; `resident_share` is the share of each family that DRAM will hold;
    `norms` are known `unit_norms`: others are computed from the source's weights."""
    found: dict[tuple[int, str], UnitStatistics] = {}
    having, families = {entry.layer: entry for entry in activations.layers}, tuple(families)
    for layer, family in unit_keys(families, model.spec):
        if layer not in having:
            continue
        known = having[layer].family(family)
        counted = load_arrays(known.arrays) if known else {}
        for name in BY_TOKEN:
            counted.pop(name, None)
        if read_units is not None:
            counted |= {"read_units": read_units[layer, family], "resident_share": np.array([resident_share])}
        if norms and (layer, family) in norms:
            counted[NORMS] = norms[layer, family]
        found[layer, family] = UnitStatistics(model, layer, family, counted)
    return found


def fit_all(
    selector: Selector[Any],
    options: Any,
    densities: Mapping[FamilyName, tuple[float, ...]],
    spec: ModelSpec,
    statistics: Mapping[tuple[int, str], Mapping[str, np.ndarray]],
) -> dict[tuple[int, str], dict[str, np.ndarray]]:
    """Returns a selector's arrays by layer and family; `densities` has each family's density of every layer."""
    return {
        (layer, family): selector.fit(num_units(family, spec), densities[family][layer], known, options)
        for (layer, family), known in statistics.items()
    }


def unit_norms(model: Model, layer: int, family: FamilyName) -> np.ndarray:
    """Returns the Euclidean norm of each unit's weights, over all its slices, float32 [num_units]; sums are float64."""
    squares = np.zeros(num_units(family, model.spec))
    for piece in slices(family, model.spec):
        names = matrices(piece.role, model.spec)
        for own, name in zip(squares.reshape(len(names), -1), names, strict=True):  # experts' units follow each other
            _add_squares(model, f"layers.{layer}.{name}.weight", piece.axis, own)
    return np.sqrt(squares).astype(np.float32)


def _add_squares(model: Model, role: str, axis: str, squares: np.ndarray) -> None:
    num_rows, num_columns = role_shape(model.spec, role)
    step = max(1, CHUNK_VALUES // num_columns)
    for start in range(0, num_rows, step):
        stop = min(num_rows, start + step)
        values = read_rows(model, role, start, stop).astype(np.float64) ** 2
        if axis == "row":
            squares[start:stop] += values.sum(axis=1)
        else:
            squares += values.sum(axis=0)
