"""Computes the MLP of selected units in one call: rows of gate and up, the activation, down.

A unit is a neuron with its column of down, or a block of neurons with its part of each row of down, so that all codes
are those of whole rows. Slices are read while they are in the processor's cache, and the rest of a neuron whose inner
activation is exactly zero is skipped (PowerInfer 5.4); a block is read whole. Projections that the family does not hold
are computed before and passed as factors, or the model does not have them.
"""

from dataclasses import dataclass

import numpy as np

from coldpress.runtime import _native
from coldpress.runtime.kernels.activations import BITS, ActivationFormat
from coldpress.schemas.model import Activation


@dataclass(frozen=True)
class Layout:
    """The places of the slices, all of one length, inside a unit, and the activation."""

    gate_offset: int | None
    """First byte of the gate's slice, whose product goes through the activation; None if units have none."""
    up_offset: int | None
    """First byte of the slice whose product multiplies the gate's, after what the activation does to it; None if units
    have none."""
    down_offset: int
    length: int
    """Values in a slice."""
    fmt: str
    activation: Activation
    threshold: float
    """`ModelSpec.activation_threshold`."""
    gate_fmt: str | None = None
    up_fmt: str | None = None
    """The formats of gate and up; None if it is `fmt`."""


@dataclass(frozen=True)
class BlockLayout:
    """The places of the slices inside a unit of several neurons, and the activation.

    At each offset slices lie one behind another: the gate rows of the unit's neurons in order, their up rows, and of
    each row of down in order the values of these neurons. Offsets and activation are as in `Layout`.
    """

    gate_offset: int | None
    up_offset: int | None
    down_offset: int
    block: int
    """Neurons in a unit, a multiple of 32: values in a slice of down."""
    length: int
    """Values in a slice of gate and up, and slices of down: hidden_size."""
    activation: Activation
    threshold: float
    gate_fmt: str | None
    up_fmt: str | None
    """The formats of gate and up; None if it is `down_fmt`."""
    down_fmt: str


@dataclass(frozen=True)
class Terms:
    """Biases and factors of the k units of a selection: float32[k] each, None if there are none."""

    gate_bias: np.ndarray | None = None
    up_bias: np.ndarray | None = None
    """Of blocks, the biases of all neurons: float32[k * block]."""
    factors: np.ndarray | None = None
    """Multiply the inner activation."""


def mlp_rows(
    store: np.ndarray,
    slots: np.ndarray,
    layout: Layout,
    x: np.ndarray,
    terms: Terms,
    num_threads: int = 0,
    activations: ActivationFormat = "fp32",
) -> np.ndarray:
    """Sums, over units, the inner activation times the down column: float32[length].

    Args:
        store: uint8[num_slots, unit_bytes]; units need not be adjacent.
        slots: int32[k], in any order, repeats allowed.
        x: float32[length].
        num_threads: 0 for the process's default; no bit of the result depends on it.
        activations: format that x is rounded to first (runtime/kernels/activations.py).

    Raises:
        ValueError: if a slot, an offset, a length, the format or the activation is out of range.
        TypeError: if an array has another dtype or is not contiguous.
    """
    alone = Terms(terms.gate_bias, terms.up_bias, None if terms.factors is None else terms.factors[None])
    return mlp_rows_each(store, slots, layout, x[None], alone, num_threads, activations)[0]


def mlp_rows_each(
    store: np.ndarray,
    slots: np.ndarray,
    layout: Layout,
    x: np.ndarray,
    terms: Terms,
    num_threads: int = 0,
    activations: ActivationFormat = "fp32",
) -> np.ndarray:
    """Computes `mlp_rows` for a few vectors with the same units, which are read once: float32[tokens, length].

    `x` is float32[tokens, length]; 1 to 1024 tokens, each with the same bits as alone. The factors of `terms` are
    float32[tokens, k]. All else is as in `mlp_rows`.
    """
    out = np.empty((len(x), layout.length), np.float32)
    _native.mlp_rows(
        store,
        slots,
        None if layout.gate_offset is None else (layout.gate_offset, layout.gate_fmt or layout.fmt),
        None if layout.up_offset is None else (layout.up_offset, layout.up_fmt or layout.fmt),
        layout.down_offset,
        layout.length,
        layout.fmt,
        layout.activation,
        layout.threshold,
        x,
        terms.gate_bias,
        terms.up_bias,
        terms.factors,
        out,
        num_threads,
        BITS[activations],
    )
    return out


def mlp_blocks(
    store: np.ndarray,
    slots: np.ndarray,
    layout: BlockLayout,
    x: np.ndarray,
    terms: Terms,
    num_threads: int = 0,
    activations: ActivationFormat = "fp32",
) -> np.ndarray:
    """Sums, over units, their neurons' inner activations times their part of down: float32[tokens, length].

    Units are read once for all tokens. Each token has the same bits as alone.

    Args:
        store: uint8[num_slots, unit_bytes]; units need not be adjacent.
        slots: int32[k], in any order, repeats allowed; units are added in this order, smaller ones than 256 neurons
            joined to 256.
        x: float32[tokens, length], 1 to 1024 tokens.
        terms: biases of the k * block neurons, and factors of the units, float32[tokens, k].
        num_threads: 0 for the process's default; no bit of the result depends on it.
        activations: format that x and the inner activations are rounded to (runtime/kernels/activations.py).

    Raises:
        ValueError: if a slot, an offset, a length, the block, a format or the activation is out of range.
        TypeError: if an array has another dtype or is not contiguous.
    """
    out = np.empty((len(x), layout.length), np.float32)
    _native.mlp_blocks(
        store,
        slots,
        None if layout.gate_offset is None else (layout.gate_offset, layout.gate_fmt or layout.down_fmt),
        None if layout.up_offset is None else (layout.up_offset, layout.up_fmt or layout.down_fmt),
        (layout.down_offset, layout.down_fmt),
        layout.block,
        layout.length,
        layout.activation,
        layout.threshold,
        x,
        terms.gate_bias,
        terms.up_bias,
        terms.factors,
        out,
        num_threads,
        BITS[activations],
    )
    return out
