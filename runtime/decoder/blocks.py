"""Blocks of units in memory: what the arithmetic of a layer works on, dense in the prefill and sparse when decoding.

A block is some units of one family whose bytes are in memory; where they come from (a sequential pass over flash, or
the store's slots) and which units they are is decided elsewhere. A layer's attention and its MLP are `Sublayer`s: each
gives `Work` on its input, which asks for one family's units after the other. Shape letters: T tokens, N values of a
slice, K units of a block, M rows of a matrix.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from coldpress.runtime import plugins
from coldpress.runtime.decoder.arithmetic import activation
from coldpress.runtime.decoder.tokens import Tokens
from coldpress.runtime.kernels import NATIVE_FORMATS, matmul, mlp, rows
from coldpress.runtime.kernels.activations import ActivationFormat
from coldpress.runtime.quantization import Format
from coldpress.runtime.store.facts import Key
from coldpress.schemas.families import FormatName, slice_length, slices
from coldpress.schemas.manifest import FamilyFormat
from coldpress.schemas.model import Activation, MatrixRole, ModelSpec, role_shape

WHOLE = slice(None)


@dataclass(frozen=True)
class Units:
    """A family's units: their format, and per role the slice's byte offset, byte count and number of values."""

    format: FormatName
    parts: Mapping[MatrixRole, tuple[int, int, int]]
    activations: ActivationFormat = "fp32"
    """What a decoded token's input is rounded to."""
    _layouts: dict[int, tuple["Inner", mlp.Layout]] = field(
        default_factory=dict[int, tuple["Inner", mlp.Layout]], compare=False
    )

    def layout(self, inner: "Inner") -> mlp.Layout:
        """The same as the kernel takes it; made once for each `inner`, of which there is one per layer."""
        found = self._layouts.get(id(inner))
        if found is None:
            found = self._layouts[id(inner)] = inner, self._layout(inner)  # with `inner`, so that its id stays its own
        return found[1]

    def _layout(self, inner: "Inner") -> mlp.Layout:
        down_offset, _, length = self.parts["down_proj"]
        return mlp.Layout(
            gate_offset=None if inner.gate is None else self.parts[inner.gate][0],
            up_offset=None if inner.up is None else self.parts[inner.up][0],
            down_offset=down_offset,
            length=length,
            fmt=self.format,
            activation=inner.activation,
            threshold=inner.threshold,
            activated_up=inner.activated_up,
        )


def units_of(family: FamilyFormat, spec: ModelSpec, activations: ActivationFormat = "fp32") -> Units:
    """Where the slices lie inside a unit: one after another, each encoded on its own."""
    nbytes = plugins.load("coldpress.runtime.quantization", Format, family.format).nbytes
    parts: dict[MatrixRole, tuple[int, int, int]] = {}
    offset = 0
    for piece in family.slices:
        length = slice_length(piece, spec)
        parts[piece.role] = (offset, nbytes(length), length)
        offset += nbytes(length)
    return Units(family.format, parts, activations)


class Block(Protocol):
    """Some units in memory."""

    @property
    def ids(self) -> np.ndarray:
        """int32 [K], unit ids."""
        ...

    def some(self, chosen_K: np.ndarray) -> "Block":
        """Those units alone, bool [K]."""
        ...

    def dot(self, role: MatrixRole, x_TN: np.ndarray) -> np.ndarray:
        """Each unit's slice times `x`: float32 [T, N] -> float32 [T, K]."""
        ...

    def axpy(self, role: MatrixRole, c_TK: np.ndarray) -> np.ndarray:
        """The units' slices, weighted and summed: float32 [T, K] -> float32 [T, N]."""
        ...

    def mlp(self, inner: "Inner", x_TN: np.ndarray, terms: "Terms") -> np.ndarray:
        """The units' share of the MLP's output: float32 [T, N] -> float32 [T, N]."""
        ...


class Work(Protocol):
    """A sublayer at work on one input: for each of its `requests`, in order, first `signal`, then `add` for every block
    of the units, and `result` at last."""

    @property
    def experts(self) -> np.ndarray | None:
        """The experts that each token uses, bool [T, E]; None where there are none."""
        ...

    def signal(self, key: Key) -> np.ndarray:
        """What the selector of a family chooses by, float32 [T, n]."""
        ...

    def add(self, key: Key, block: Block) -> None:
        """Adds what some units of the family contribute."""
        ...

    def result(self) -> np.ndarray:
        """The output, float32 [T, hidden_size]."""
        ...


class Sublayer(Protocol):
    """Attention or the MLP of a layer."""

    @property
    def requests(self) -> tuple[Key, ...]:
        """The parts whose units an input asks for, in order."""
        ...

    def begin(self, x_TN: np.ndarray, tokens: Tokens) -> Work:
        """Begins on the input after the norm, float32 [T, hidden_size], with what is resident."""
        ...


@dataclass(frozen=True)
class Inner:
    """How a unit's inner activation is made of its slices: the product of what is not None, and of a factor."""

    gate: MatrixRole | None
    """The row that is activated."""
    up: MatrixRole | None
    """The row that it is multiplied with."""
    activation: Activation
    threshold: float
    """That of `fatrelu`."""
    activated_up: bool
    """Whether `up` goes through the activation, too."""


@dataclass(frozen=True)
class Terms:
    """What goes with the units of a block; None where there is nothing."""

    gate_bias_K: np.ndarray | None
    up_bias_K: np.ndarray | None
    factors_TK: np.ndarray | None


def step_by_step(block: Block, inner: Inner, x_TN: np.ndarray, terms: Terms) -> np.ndarray:
    """`Block.mlp` from the block's other products."""
    act = activation(inner.activation, inner.threshold)
    values_TK = np.ones((len(x_TN), block.ids.size), np.float32) if terms.factors_TK is None else terms.factors_TK
    if inner.gate is not None:
        values_TK = values_TK * act(_with_bias(block.dot(inner.gate, x_TN), terms.gate_bias_K))
    if inner.up is not None:
        up_TK = _with_bias(block.dot(inner.up, x_TN), terms.up_bias_K)
        values_TK = values_TK * (act(up_TK) if inner.activated_up else up_TK)
    return block.axpy("down_proj", values_TK)


def _with_bias(values: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
    return values if bias is None else values + bias


@dataclass(frozen=True)
class StreamedBlock:
    """Units as they follow each other on flash: `codes` uint8 [K, unit_bytes]. Any number of tokens."""

    ids: np.ndarray
    codes: np.ndarray
    units: Units
    parts: Sequence[slice] = matmul.WHOLE
    """Tokens whose sums have the bits that they have without the others."""

    def some(self, chosen_K: np.ndarray) -> "StreamedBlock":
        """See `Block`."""
        return self if chosen_K.all() else replace(self, ids=self.ids[chosen_K], codes=self.codes[chosen_K])

    def dot(self, role: MatrixRole, x_TN: np.ndarray) -> np.ndarray:
        """See `Block`."""
        offset, size, length = self.units.parts[role]
        return matmul.matmul(self.codes[:, offset : offset + size], length, self.units.format, x_TN, self.parts)

    def axpy(self, role: MatrixRole, c_TK: np.ndarray) -> np.ndarray:
        """See `Block`."""
        offset, size, length = self.units.parts[role]
        return matmul.matmul_t(self.codes[:, offset : offset + size], length, self.units.format, c_TK, self.parts)

    def mlp(self, inner: Inner, x_TN: np.ndarray, terms: Terms) -> np.ndarray:
        """See `Block`."""
        return step_by_step(self, inner, x_TN, terms)


@dataclass(frozen=True)
class SlotBlock:
    """Units where the store keeps or read them: unit `ids[k]` is `memory[slots[k]]`, uint8 [unit_bytes].

    Each token uses its own units in their order here, so that its sums have the bits that they have alone.
    """

    ids: np.ndarray
    slots: np.ndarray
    memory: np.ndarray
    units: Units
    own_TK: np.ndarray | None = None
    """bool: which units each token uses, None for all; for the others `dot` gives 0, and `axpy` leaves them out."""

    def some(self, chosen_K: np.ndarray) -> "SlotBlock":
        """See `Block`."""
        own_TK = None if self.own_TK is None else self.own_TK[:, chosen_K]
        return replace(self, ids=self.ids[chosen_K], slots=self.slots[chosen_K], own_TK=own_TK)

    def dot(self, role: MatrixRole, x_TN: np.ndarray) -> np.ndarray:
        """See `Block`."""
        offset, _, length = self.units.parts[role]
        y_TK = np.zeros((len(x_TN), self.ids.size), np.float32)
        for token, x in enumerate(x_TN):
            own = WHOLE if self.own_TK is None else self.own_TK[token]
            place = self.memory, self.slots[own], offset, length, self.units.format
            y_TK[token, own] = rows.dot_rows(*place, x, activations=self.units.activations)
        return y_TK

    def axpy(self, role: MatrixRole, c_TK: np.ndarray) -> np.ndarray:
        """See `Block`."""
        offset, _, length = self.units.parts[role]
        y_TN = np.empty((len(c_TK), length), np.float32)
        for token, c in enumerate(c_TK):
            slots = self.slots
            if self.own_TK is not None:
                slots, c = slots[self.own_TK[token]], c[self.own_TK[token]]
            y_TN[token] = rows.axpy_rows(self.memory, slots, offset, length, self.units.format, c)
        return y_TN

    def mlp(self, inner: Inner, x_TN: np.ndarray, terms: Terms) -> np.ndarray:
        """See `Block`."""
        if self.units.format not in NATIVE_FORMATS:
            return step_by_step(self, inner, x_TN, terms)
        layout, y_TN = self.units.layout(inner), np.empty_like(x_TN)
        for token, x in enumerate(x_TN):
            own = WHOLE if self.own_TK is None else self.own_TK[token]
            gate_bias = None if terms.gate_bias_K is None else terms.gate_bias_K[own]
            up_bias = None if terms.up_bias_K is None else terms.up_bias_K[own]
            factors = None if terms.factors_TK is None else np.ascontiguousarray(terms.factors_TK[token, own])
            slots = self.slots[own]
            own_terms = mlp.Terms(gate_bias, up_bias, factors)
            kind = self.units.activations
            y_TN[token] = mlp.mlp_rows(self.memory, slots, layout, x, own_terms, activations=kind)
        return y_TN


class ColumnSums:
    """Products of matrices whose columns are a family's units with `x`, whose entry i goes with unit i; no bias."""

    def __init__(self, widths: Mapping[MatrixRole, int], x_TN: np.ndarray) -> None:
        """Zeros.

        Args:
            widths: Rows of each matrix.
            x_TN: The family's signal, float32 [T, N].
        """
        self._x_TN = x_TN
        self.sums: dict[MatrixRole, np.ndarray] = {
            role: np.zeros((len(x_TN), width), np.float32) for role, width in widths.items()
        }
        """float32 [T, M] of each role."""

    def add(self, block: Block) -> None:
        """Adds the block's columns, each times its entry."""
        chosen = np.ascontiguousarray(self._x_TN[:, block.ids])
        for role, total in self.sums.items():
            total += block.axpy(role, chosen)


def widths_of(family: str, spec: ModelSpec) -> dict[MatrixRole, int]:
    """Rows of each matrix whose columns are units of a family."""
    return {piece.role: role_shape(spec, f"{piece.role}.weight")[0] for piece in slices(family, spec)}
