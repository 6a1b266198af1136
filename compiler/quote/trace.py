"""Makes the records that a search reads from a trace alone: for artifacts, which carry no calibration, and for drawn
signals."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from coldpress.compiler.activity.layer_counts import countable_families, exact_families, leaders
from coldpress.compiler.activity.signals import magnitude_edges, magnitude_histogram, pack_nonzero
from coldpress.compiler.io import load_arrays, save_arrays
from coldpress.runtime.sparsity import used_experts
from coldpress.schemas.activations import Activations, FamilyStatistics, LayerStatistics
from coldpress.schemas.base import ArrayFile
from coldpress.schemas.curves import Curves
from coldpress.schemas.families import WHOLE_MLP, activity_of, layers_of, num_units
from coldpress.schemas.model import ModelSpec


def activations_of(curves: Curves, spec: ModelSpec, folder: Path) -> Activations:
    """Returns activation statistics as `calibrate` writes them, counted in the trace, for each layer in the nearest
    traced one; files go into `folder`."""
    trace = load_arrays(curves.trace)
    traced = {layer: _families(trace, layer, spec, folder) for layer in curves.trace_layers}
    signal = next(name for name in trace if name.count(".") == 1)
    return Activations(
        num_tokens=len(trace[signal]),
        exact_zeros=spec.exact_zeros,
        weights_sha256=curves.weights_sha256,
        layers=tuple(
            LayerStatistics(
                layer=layer,
                families=tuple(
                    found
                    for found in traced[min(traced, key=lambda known: (abs(known - layer), known))]
                    if layer in layers_of(found.family, spec)
                ),
                inputs=curves.trace,
                input_similarity=None,
            )
            for layer in range(spec.num_hidden_layers)
        ),
    )


def expert_shares(curves: Curves, spec: ModelSpec) -> np.ndarray | None:
    """Returns the share of a trace's tokens that use each expert, float64 [traced layers, E]; None for a model without
    experts, or a trace without the signal that shows them."""
    trace = load_arrays(curves.trace) if spec.is_mixture else {}
    names = [f"{layer}.{activity_of(WHOLE_MLP, spec)}" for layer in curves.trace_layers]
    found = [used_experts(trace[name], spec.num_experts).mean(axis=0) for name in names if name in trace]
    return np.stack(found) if found else None


def _families(
    trace: Mapping[str, np.ndarray], layer: int, spec: ModelSpec, folder: Path
) -> tuple[FamilyStatistics, ...]:
    families = tuple(name for name in countable_families(spec) if f"{layer}.{activity_of(name, spec)}" in trace)
    exact, found = exact_families(families, spec), dict[str, FamilyStatistics]()
    for leader, same in leaders(families, spec).items():
        values = trace[f"{layer}.{activity_of(leader, spec)}"].astype(np.float32)
        density, arrays = _counted(values, leader in exact, folder / f"{layer}.{leader}.safetensors")
        for family in same:
            found[family] = FamilyStatistics(
                family=family, num_units=num_units(family, spec), density=density, arrays=arrays
            )
    return tuple(found[family] for family in families)


def _counted(values: np.ndarray, is_exact: bool, path: Path) -> tuple[float | None, ArrayFile]:
    """Returns the density, where zeros are exact, and the arrays of a signal, float32 [num_tokens, num_units]."""
    keys = values.view(np.uint32)
    arrays = {"magnitude_histogram": magnitude_histogram(keys).astype(np.uint64)}
    arrays["magnitude_edges"] = magnitude_edges()
    if not is_exact:
        return None, save_arrays(path, arrays)
    counts = np.count_nonzero(values, axis=0)
    arrays |= {"bits": pack_nonzero(keys), "counts": counts.astype(np.int64)}
    return int(counts.sum()) / values.size, save_arrays(path, arrays)
