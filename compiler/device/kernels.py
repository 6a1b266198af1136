"""Measures how fast this machine computes: the runtime's own products by format and density, and copies to slots.

Weights are far larger than the processor's caches, rows are those of a 7B's MLP, and each call uses other rows, so that
memory is measured with the arithmetic. All threads of the runtime work, as when it decodes.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np

from coldpress.compiler.device.host import Rounds
from coldpress.runtime.kernels import NATIVE_FORMATS, mlp
from coldpress.runtime.plugins import load
from coldpress.runtime.quantization import Format
from coldpress.runtime.store.slot_memory import copy_rows
from coldpress.schemas.families import FormatName

LENGTH = 4096
WEIGHT_BYTES = 96 << 20
DENSITIES = (0.1, 0.5, 1.0)
ROUNDS = 9
ENCODED_UNITS = 64
ROLES = 3
"""Gate, up and down: the slices of a unit."""


def kernel_rates() -> Iterator[tuple[FormatName, float, Rounds]]:
    """Yields (format, density, bytes per second of the rows that are used), in that order of formats and densities."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal(LENGTH).astype(np.float32)
    for name in sorted(NATIVE_FORMATS):
        plugin = load("coldpress.runtime.quantization", Format, name)
        size = plugin.nbytes(LENGTH)
        num_units = max(1, WEIGHT_BYTES // (ROLES * size))
        block = plugin.encode(rng.standard_normal((ROLES * ENCODED_UNITS, LENGTH)).astype(np.float32) / 64)
        units = np.resize(block.reshape(ENCODED_UNITS, ROLES * size), (num_units, ROLES * size))
        layout = mlp.Layout(0, size, 2 * size, LENGTH, name, "silu", 0.0, False)
        rest = layout, x, mlp.Terms()
        for density in DENSITIES:
            count = max(1, round(density * num_units))
            drawn = [np.sort(rng.permutation(num_units)[:count]).astype(np.int32) for _ in range(ROUNDS + 1)]
            yield (
                name,
                density,
                timed(count * ROLES * size, [partial(mlp.mlp_rows, units, slots, *rest) for slots in drawn]),
            )


def copy_rate(unit_bytes: int = ROLES * LENGTH) -> Rounds:
    """Measures bytes per second of units that are copied from a buffer to scattered slots."""
    count = max(1, WEIGHT_BYTES // 4 // unit_bytes)
    rows, slots = np.ones((count, unit_bytes), np.uint8), np.zeros((count, unit_bytes), np.uint8)
    order = np.random.default_rng(0).permutation(count).astype(np.int32)
    copy = partial(copy_rows, rows, np.arange(count, dtype=np.int32), slots, order)
    return timed(count * unit_bytes, [copy] * (ROUNDS + 1))


def timed(num_bytes: int, calls: Sequence[Callable[[], object]]) -> Rounds:
    """Returns bytes per second of each call but the first, which does not count."""
    rates = []
    for call in calls:
        start = time.perf_counter()
        call()
        rates.append(num_bytes / (time.perf_counter() - start))
    return Rounds(tuple(rates[1:]))
