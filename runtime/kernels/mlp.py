"""The MLP of selected units in one call: rows of the gate's and the up projection's, activation, columns of down.

Each unit's slices are read while they are near, and a unit whose inner activation is exactly zero is not read further
(PowerInfer 5.4). What a family does not hold is either computed before and given as factors, or is not there at all.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from coldpress.runtime import _native
from coldpress.runtime.kernels.activations import BITS, ActivationFormat, reference_rounded
from coldpress.runtime.kernels.rows import reference_axpy_rows, reference_rows
from coldpress.schemas.model import Activation


@dataclass(frozen=True)
class Layout:
    """Where the slices lie inside a unit, all of one length, and what is done with them."""

    gate_offset: int | None
    """Byte of the slice that is activated; None where units have none."""
    up_offset: int | None
    """Byte of the slice that it is multiplied with; None where units have none."""
    down_offset: int
    length: int
    """Values in a slice."""
    fmt: str
    activation: Activation
    threshold: float
    """That of `fatrelu`."""
    activated_up: bool
    """Whether the second one goes through the activation, too."""


@dataclass(frozen=True)
class Terms:
    """What goes with each unit k of a selection: float32[k], None where there is nothing."""

    gate_bias: np.ndarray | None = None
    up_bias: np.ndarray | None = None
    factors: np.ndarray | None = None
    """What the inner activation is multiplied with."""


def mlp_rows(
    store: np.ndarray,
    slots: np.ndarray,
    layout: Layout,
    x: np.ndarray,
    terms: Terms,
    num_threads: int = 0,
    activations: ActivationFormat = "fp32",
) -> np.ndarray:
    """float32[length]: the sum over units of their inner activation times their down column.

    Args:
        store: uint8[num_slots, unit_bytes]; units may lie apart.
        slots: int32[k], in any order, repeats allowed.
        layout: of the units; its format is one of NATIVE_FORMATS.
        x: float32[length].
        terms: of the selection.
        num_threads: 0 for the process's default; no bit of the result depends on it.
        activations: what x is rounded to first (runtime/kernels/activations.py).

    Raises:
        ValueError: if a slot, an offset, a length, the format or the activation is out of range.
        TypeError: if an array has another dtype or is not contiguous.
    """
    out = np.empty(layout.length, np.float32)
    _native.mlp_rows(
        store,
        slots,
        layout.gate_offset,
        layout.up_offset,
        layout.down_offset,
        layout.length,
        layout.fmt,
        layout.activation,
        layout.threshold,
        layout.activated_up,
        x,
        terms.gate_bias,
        terms.up_bias,
        terms.factors,
        out,
        num_threads,
        BITS[activations],
    )
    return out


def reference_mlp_rows(
    store: np.ndarray,
    slots: np.ndarray,
    layout: Layout,
    x: np.ndarray,
    terms: Terms,
    act: Callable[[np.ndarray], np.ndarray],
    activations: ActivationFormat = "fp32",
) -> np.ndarray:
    """What `mlp_rows` computes, in numpy: float64[length]; `act` is the activation function of that name."""
    taken = reference_rounded(x, layout.fmt, activations)

    def projected(offset: int, bias: np.ndarray | None, activated: bool) -> np.ndarray:
        values = reference_rows(store, slots, offset, layout.length, layout.fmt) @ taken
        values = values if bias is None else values + bias
        return act(values) if activated else values

    inner = np.ones(slots.size) if terms.factors is None else terms.factors.astype(np.float64)
    if layout.gate_offset is not None:
        inner = inner * projected(layout.gate_offset, terms.gate_bias, True)
    if layout.up_offset is not None:
        inner = inner * projected(layout.up_offset, terms.up_bias, layout.activated_up)
    return reference_axpy_rows(store, slots, layout.down_offset, layout.length, layout.fmt, inner)
