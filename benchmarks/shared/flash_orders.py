"""Orders of units on flash for benchmarks.flash_selection: as they are, and by co-activation."""

from collections.abc import Callable, Mapping

import numpy as np

from benchmarks.shared.flash_setting import UNIT_BYTES, Orders, Setting, top_k
from coldpress.compiler.stages.order._task import Heuristic
from coldpress.runtime.plugins import load
from tests.support.statistics import task_of


def structural(setting: Setting) -> Orders:
    """The model's own order."""
    return {key: np.arange(norms.size) for key, norms in setting.known.norms.items()}


def coactivation(setting: Setting) -> Orders:
    """Ripple's Algorithm 1 on what top-k at half of the units uses of calibration text."""
    return {key: _arranged(top_k(signal, 0.5), key[1]) for key, signal in setting.known.signals.items()}


def _arranged(used: np.ndarray, family: str) -> np.ndarray:
    return (
        load("coldpress.compiler.stages.order", Heuristic, "ripple")
        .arrange(task_of(used.T, unit_bytes=UNIT_BYTES[family]))
        .order
    )


ORDERS: Mapping[str, Callable[[Setting], Orders]] = {
    "structural": structural,
    "coactivation": coactivation,
}
