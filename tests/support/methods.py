"""Asks the selectors of runtime/sparsity for families and arrays, for tests that make records and artifacts by hand."""

import functools
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import pytest
from _pytest.mark import ParameterSet

from coldpress.compiler.io import save_arrays
from coldpress.runtime.plugins import load, options_of
from coldpress.runtime.sparsity import Residency, Selector
from coldpress.schemas.families import num_units
from coldpress.schemas.model import ModelSpec
from coldpress.schemas.sparsity import Sparsity


def families_of(method: str, spec: ModelSpec) -> tuple[str, ...]:
    """Returns the families of an artifact of `method` without options."""
    selector = load("coldpress.runtime.sparsity", Selector, method)
    return selector.families(spec, selector.OPTIONS())


def pairs(methods: Iterable[str], formats: Iterable[str]) -> list[ParameterSet]:
    """Returns all (selector, format); those whose names both occur in earlier ones are slow."""
    seen, found = set[str](), list[ParameterSet]()
    for pair in ((method, name) for method in methods for name in formats):
        found.append(pytest.param(*pair, marks=pytest.mark.slow if seen.issuperset(pair) else ()))
        seen.update(pair)
    return found


@functools.cache
def counted(num_units: int) -> Mapping[str, np.ndarray]:
    """Returns statistics that calibration might count for a family: normal signals, and unit norms between 1 and 2.

    A read costs as much as five units. The histogram is finer than a selector needs and its bins are not the
    compiler's. Callers share the arrays.
    """
    random = np.random.default_rng(num_units)
    edges = np.linspace(0, 8, 4001).astype(np.float32)
    histogram = np.histogram(np.abs(random.normal(size=100_000)), edges)[0].astype(np.uint64)
    norms = random.uniform(1, 2, num_units).astype(np.float32)
    return {
        "magnitude_histogram": histogram,
        "magnitude_edges": edges,
        "unit_norms": norms,
        "read_units": np.array([5.0, 0.5, 2.0, 0.5]),
    }


def fit(method: str, num_units: int, density: float, **options: bool | int | float | str) -> dict[str, np.ndarray]:
    """Returns a selector's arrays, fitted to the statistics of `counted`."""
    selector = load("coldpress.runtime.sparsity", Selector, method)
    return selector.fit(num_units, density, counted(num_units), options_of(selector, options))


def kept(
    method: str, num_units: int, density: float, options: Mapping[str, bool | int | float | str] | None = None
) -> dict[str, np.ndarray]:
    """Returns the arrays of `fit` that an artifact stores."""
    names = load("coldpress.runtime.sparsity", Selector, method).KEPT
    return {name: array for name, array in fit(method, num_units, density, **options or {}).items() if name in names}


def fitted(sparsity: Sparsity, spec: ModelSpec, folder: Path) -> Sparsity:
    """Returns `sparsity` with its selector's arrays, saved in `folder`."""
    selector = load("coldpress.runtime.sparsity", Selector, sparsity.method)
    options = options_of(selector, sparsity.options)
    arrays = {
        f"{layer}.{entry.family}.{name}": array
        for entry in sparsity.densities
        for layer, density in enumerate(entry.per_layer)
        for units in [num_units(entry.family, spec)]
        for name, array in selector.fit(units, density, counted(units), options).items()
    }
    saved = save_arrays(folder / "selector.safetensors", arrays) if arrays else None
    return sparsity.model_copy(update={"arrays": saved})


def nothing_cached(num_units: int) -> Residency:
    """Returns the residency of units that are all on flash, unit i at position i."""
    return Residency(np.zeros(num_units, bool), np.arange(num_units, dtype=np.int32))
