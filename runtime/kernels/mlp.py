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

Slices = tuple[int, str]
"""First byte of a matrix's slices in a unit, and their format."""


@dataclass(frozen=True)
class UnitLayout:
    """The places of the slices inside a unit, where they lie one behind another, and the activation."""

    gate: Slices | None
    """The gate rows of the unit's neurons, whose products go through the activation; None if units have none."""
    up: Slices | None
    """The up rows, whose products multiply the gate's, after what the activation does to them; None if units have
    none."""
    down: Slices
    """The neuron's column of down; in a block, of each row of down the values of these neurons."""
    length: int
    """Values in a slice of gate and up, and rows of down: hidden_size."""
    activation: Activation
    threshold: float
    """`ModelSpec.activation_threshold`."""
    block: int = 1
    """Neurons in a unit: 1, or a multiple of 32."""


@dataclass(frozen=True)
class Terms:
    """Biases and factors of the k units of a selection, None if there are none."""

    gate_bias: np.ndarray | None = None
    up_bias: np.ndarray | None = None
    """Biases of the neurons, float32[k * block]."""
    factors: np.ndarray | None = None
    """Factors of the inner activation, float32[tokens, k]."""


def mlp(
    store: np.ndarray,
    slots: np.ndarray,
    layout: UnitLayout,
    x: np.ndarray,
    terms: Terms,
    num_threads: int = 0,
    activations: ActivationFormat = "fp32",
) -> np.ndarray:
    """Sums, over units, their neurons' inner activations times their part of down: float32[tokens, length].

    Units are read once for all tokens. Each token has the same bits as alone.

    Args:
        store: uint8[num_slots, unit_bytes]; units need not be adjacent.
        slots: int32[k], in any order, repeats allowed; units are added in this order, blocks of fewer than 256 neurons
            joined to 256.
        x: float32[tokens, length], 1 to 1024 tokens.
        num_threads: 0 for the process's default; no bit of the result depends on it.
        activations: format that x is rounded to first (runtime/kernels/activations.py), and inner activations of
            blocks.

    Raises:
        ValueError: if a slot, an offset, a length, the block, a format or the activation is out of range.
        TypeError: if an array has another dtype or is not contiguous.
    """
    out = np.empty((len(x), layout.length), np.float32)
    units = layout.gate, layout.up, layout.down, layout.block, layout.length, layout.activation, layout.threshold
    known = terms.gate_bias, terms.up_bias, terms.factors
    _native.mlp(store, slots, *units, x, *known, out, num_threads, BITS[activations])
    return out
