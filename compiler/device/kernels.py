"""Measures how fast this machine computes: the runtime's own products by format and density, and copies to slots.

Weights are far larger than the processor's caches, rows are those of a 7B's MLP, and each call uses other rows, so that
memory is measured with the arithmetic. All threads of the runtime work, as when it decodes.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np

from coldpress.compiler.device.host import Rounds
from coldpress.runtime.kernels import mlp
from coldpress.runtime.plugins import load, names
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
FORMAT, PASS_TOKENS = "int4_group32", 5
"""The format and the tokens of the pass in which tokens share the passing of weights."""


def kernel_rates() -> Iterator[tuple[FormatName, float, Rounds]]:
    """Yields (format, density, bytes per second of the rows that are used), in that order of formats and densities."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal(LENGTH).astype(np.float32)
    for name in names("coldpress.runtime.quantization"):
        units, layout = _units(name, rng)
        rest = layout, x, mlp.Terms()
        for density in DENSITIES:
            count = max(1, round(density * len(units)))
            drawn = [np.sort(rng.permutation(len(units))[:count]).astype(np.int32) for _ in range(ROUNDS + 1)]
            yield (
                name,
                density,
                timed(count * units.shape[1], [partial(mlp.mlp_rows, units, slots, *rest) for slots in drawn]),
            )


def further_shares() -> list[float]:
    """Measures what each further token of a pass takes of the first one's products, at most all of it; in order."""
    rng = np.random.default_rng(0)
    units, layout = _units(FORMAT, rng)
    slots = np.arange(len(units), dtype=np.int32)
    x = rng.standard_normal((PASS_TOKENS, LENGTH)).astype(np.float32)
    one, several = (
        partial(mlp.mlp_rows_each, units, slots, layout, x[:count], mlp.Terms()) for count in (1, PASS_TOKENS)
    )
    rates = timed(1, [several, *[one, several] * ROUNDS]).rates
    shares = [
        (alone / together - 1) / (PASS_TOKENS - 1) for alone, together in zip(rates[::2], rates[1::2], strict=True)
    ]
    return sorted(min(1.0, max(0.0, share)) for share in shares)


def _units(name: FormatName, rng: np.random.Generator) -> tuple[np.ndarray, mlp.Layout]:
    """Returns units of random weights, uint8 [num_units, unit_bytes], and where their slices lie."""
    plugin = load("coldpress.runtime.quantization", Format, name)
    size = plugin.nbytes(LENGTH)
    block = plugin.encode(rng.standard_normal((ROLES * ENCODED_UNITS, LENGTH)).astype(np.float32) / 64)
    num_units = max(1, WEIGHT_BYTES // (ROLES * size))
    units = np.resize(block.reshape(ENCODED_UNITS, ROLES * size), (num_units, ROLES * size))
    return units, mlp.Layout(0, size, 2 * size, LENGTH, name, "silu", 0.0)


def copy_rate(unit_bytes: int = ROLES * LENGTH) -> Rounds:
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
