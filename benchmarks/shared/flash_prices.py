"""What the product's selector `flash` is fitted to in benchmarks.flash_selection, and densities by measured loss.

Densities are those of the product's own rule `greedy` (compiler/stages/allocate), which runs the model with this
selector: a price per layer and family follows from each. They depend on the device and on the layer groups, not on
the order of units, so each is looked for once.
"""

import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from benchmarks.shared.flash_setting import FAMILIES_PRUNED, UNIT_BYTES, Setting
from coldpress.compiler.activity.signals import magnitude_edges
from coldpress.compiler.io import Workspace
from coldpress.compiler.stages.allocate import greedy
from coldpress.compiler.stages.allocate._losses import MeasuredLosses
from coldpress.compiler.stages.allocate._magnitudes import Magnitudes
from coldpress.compiler.stages.allocate._task import Key, Shares, Task
from coldpress.runtime.sparsity import flash

ALLOCATION_BLOCKS = 8
"""Of calibration text, that losses are measured on, and of validation text."""
Arrays = dict[tuple[int, str], dict[str, np.ndarray]]


def fitted(setting: Setting, shares: Shares) -> Arrays:
    """By the selector's own `fit`."""
    counted = _counted(setting)
    return {key: _fit(setting, counted[key], key, share, setting.slots) for key, share in shares.items()}


def priced(setting: Setting, density: float) -> Arrays:
    """Of densities that measured loss divides among layers and families, `density` of all bytes together."""
    known = setting.known.priced
    key = (setting.device.name, setting.groups, setting.slots, density)
    if key not in known:
        known[key] = fitted(setting, _allocated(setting, density))
    return known[key]


def _allocated(setting: Setting, density: float) -> Shares:
    known, counted = setting.known, _counted(setting)
    curves = {key: Magnitudes(found, str(key), known.used) for key, found in counted.items()}
    calibration, validation = (known.case.splits[name][:ALLOCATION_BLOCKS] for name in ("calibration", "validation"))
    with tempfile.TemporaryDirectory() as folder:
        losses = MeasuredLosses(
            known.case.stream,
            flash.Plugin(),
            lambda key, share: _fit(setting, counted[key], key, share, 0.0),
            calibration,
            validation,
            Workspace(Path(folder), "benchmark"),
        )
        task = Task(
            density=density,
            num_layers=known.case.model.spec.num_hidden_layers,
            num_units={family: round(known.used * known.norms[0, family].size) for family in FAMILIES_PRUNED},
            unit_bytes=UNIT_BYTES,
            own=dict.fromkeys(FAMILIES_PRUNED, density),
            magnitudes=curves.__getitem__,
            losses=lambda: losses,
        )
        return greedy.Plugin().densities(task)


def _counted(setting: Setting) -> dict[Key, dict[str, np.ndarray]]:
    """What calibration counts, and norms."""
    edges = magnitude_edges()
    return {
        key: {
            "magnitude_histogram": np.histogram(np.abs(signal), edges)[0],
            "magnitude_edges": edges,
            "unit_norms": setting.known.norms[key],
        }
        for key, signal in setting.known.signals.items()
    }


def _fit(
    setting: Setting, counted: Mapping[str, np.ndarray], key: Key, share: float, resident_share: float
) -> dict[str, np.ndarray]:
    statistics = {**counted, "read_units": setting.costs(key[1]), "resident_share": np.array([resident_share])}
    return flash.Plugin().fit(setting.known.norms[key].size, setting.known.used * share, statistics, flash.Options())
