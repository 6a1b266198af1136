"""Blocks of units in memory, with which a layer computes: all units in the prefill, chosen units when decoding.

A block holds units of one family whose bytes are in memory. Other modules decide which units these are, and where they
come from (a sequential pass over flash, or the store's slots). Shape letters: T tokens, N values of a slice, K units of
a block, M rows of a matrix.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from coldpress.runtime.arithmetic import activation, up_activation
from coldpress.runtime.artifact.contents import nbytes
from coldpress.runtime.kernels import FEW_TOKENS, mlp, products
from coldpress.runtime.kernels.activations import ActivationFormat
from coldpress.runtime.kernels.mlp import Terms
from coldpress.runtime.store.dense import in_range
from coldpress.runtime.store.request import Batch
from coldpress.schemas.families import FormatName, Slice, UnitFormat, block_neurons, slice_formats, slice_shape, slices
from coldpress.schemas.model import Activation, MatrixRole, ModelSpec, role_shape

WHOLE = slice(None)
GATHERED_BYTES = 8 << 20
"""Bytes of units that are copied side by side at a time, to be multiplied by many tokens."""


class MatrixPart(NamedTuple):
    offset: int
    nbytes: int
    num_slices: int
    """One after another."""
    length: int
    """Values in a slice."""
    format: FormatName

    @property
    def place(self) -> mlp.Slices:
        return self.offset, self.format


@dataclass(frozen=True)
class Units:
    parts: Mapping[MatrixRole, MatrixPart]
    activations: ActivationFormat = "fp32"
    """The format that a decoded token's input is rounded to."""
    block_neurons: int = 1
    """Neurons of a unit."""
    _layouts: dict["Inner", mlp.UnitLayout] = field(default_factory=dict["Inner", mlp.UnitLayout])

    def layout(self, inner: "Inner") -> mlp.UnitLayout:
        """Returns the units' layout as the kernel takes it."""
        if inner not in self._layouts:
            gate, up = (None if role is None else self.parts[role].place for role in (inner.gate, inner.up))
            down, block = self.parts["down_proj"], self.block_neurons
            length = down.num_slices if block > 1 else down.length
            rest = inner.activation, inner.threshold, block
            self._layouts[inner] = mlp.UnitLayout(gate, up, down.place, length, *rest)
        return self._layouts[inner]


def units_of(
    name: UnitFormat, pieces: Sequence[Slice], spec: ModelSpec, activations: ActivationFormat = "fp32"
) -> Units:
    """Computes where the slices lie inside a unit: one after another, each encoded separately."""
    parts: dict[MatrixRole, MatrixPart] = {}
    offset = 0
    for piece, own in zip(pieces, slice_formats(name, len(pieces)), strict=True):
        count, length = slice_shape(piece, spec)
        parts[piece.role] = MatrixPart(offset, count * nbytes(own, length), count, length, own)
        offset += parts[piece.role].nbytes
    is_block = any(piece.axis == "columns" for piece in pieces)
    return Units(parts, activations, block_neurons(spec) if is_block else 1)


@dataclass(frozen=True)
class Inner:
    """The rows from which a unit computes its inner activation: the product of those not None, and a factor."""

    gate: MatrixRole | None
    """The row whose product goes through the activation."""
    up: MatrixRole | None
    """The row whose product multiplies the gate's; some activations change it, too."""
    activation: Activation
    threshold: float


def with_bias(values: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
    return values if bias is None else values + bias


@dataclass(frozen=True)
class StreamedBlock:
    """Consecutive units on flash, as the dense pass reads them: `codes` uint8 [K, unit_bytes]. Any number of tokens."""

    ids: np.ndarray
    """int32 [K]."""
    codes: np.ndarray
    units: Units
    own_TK: np.ndarray | None = None
    """bool: which units each token uses; None for all. `axpy` adds nothing of unused units."""

    def some(self, chosen_K: np.ndarray) -> "StreamedBlock":
        """Returns a block of the chosen units only, bool [K]."""
        if chosen_K.all():
            return self
        places = in_range(np.flatnonzero(chosen_K))
        own_TK = None if self.own_TK is None else self.own_TK[:, places]
        return replace(self, ids=self.ids[places], codes=self.codes[places], own_TK=own_TK)

    def of(self, tokens: np.ndarray) -> "StreamedBlock":
        """Returns the block for some of the tokens, int [n] ascending, at least one."""
        return self if self.own_TK is None else replace(self, own_TK=self.own_TK[tokens])

    def _dot(self, role: MatrixRole, x_TN: np.ndarray) -> np.ndarray:
        """Multiplies each row of the units' neurons by `x`: float32 [T, N] -> float32 [T, K * block_neurons]."""
        offset, size, count, length, fmt = self.units.parts[role]
        codes = self.codes[:, offset : offset + size]
        rows_of_units = codes if count == 1 else codes.reshape(-1, size // count)
        return products.matmul(rows_of_units, length, fmt, x_TN)

    def axpy(self, role: MatrixRole, c_TK: np.ndarray) -> np.ndarray:
        """Sums the units' slices, weighted by `c_TK`: float32 [T, K] -> float32 [T, N]."""
        offset, size, _, length, fmt = self.units.parts[role]
        if self.own_TK is not None:
            c_TK = np.where(self.own_TK, c_TK, np.float32(0))
        return products.matmul_t(self.codes[:, offset : offset + size], length, fmt, c_TK)

    def _down(self, values_TF: np.ndarray) -> np.ndarray:
        """Multiplies the inner activation of the units' neurons by their columns of down: float32 [T, N]. Blocks are
        used whole: those of an expert by all tokens that it multiplies."""
        offset, size, count, _, fmt = self.units.parts["down_proj"]
        if count == 1:
            return self.axpy("down_proj", values_TF)
        codes = self.codes[:, offset : offset + size].reshape(self.ids.size, count, -1)
        return products.matmul(codes.transpose(1, 0, 2).reshape(count, -1), values_TF.shape[1], fmt, values_TF)

    def mlp(self, inner: Inner, x_TN: np.ndarray, terms: Terms) -> np.ndarray:
        """Computes the units' contribution to the MLP's output: float32 [T, N] -> float32 [T, N]."""
        act, neurons = activation(inner.activation, inner.threshold), self.units.block_neurons
        values_TK = np.ones((len(x_TN), neurons * self.ids.size), np.float32)
        if terms.factors is not None:
            values_TK *= np.repeat(terms.factors, neurons, axis=1)
        if inner.gate is not None:
            values_TK = values_TK * act(with_bias(self._dot(inner.gate, x_TN), terms.gate_bias))
        if inner.up is not None:
            up_TK = with_bias(self._dot(inner.up, x_TN), terms.up_bias)
            values_TK = values_TK * up_activation(inner.activation, inner.threshold)(up_TK)
        return self._down(values_TK)


@dataclass(frozen=True)
class SlotBlock:
    """Units in the store's slots or read buffer: unit `ids[k]` is `memory[slots[k]]`, uint8 [unit_bytes]. Each token
    sums over only the units that it uses, in the order of `ids`, so its sums have the same bits as alone."""

    ids: np.ndarray
    slots: np.ndarray
    memory: np.ndarray
    units: Units
    own_TK: np.ndarray | None = None
    """bool: which units each token uses; None for all."""

    def some(self, chosen_K: np.ndarray) -> "SlotBlock":
        own_TK = None if self.own_TK is None else self.own_TK[:, chosen_K]
        return replace(self, ids=self.ids[chosen_K], slots=self.slots[chosen_K], own_TK=own_TK)

    def axpy(self, role: MatrixRole, c_TK: np.ndarray) -> np.ndarray:
        offset, _, _, length, fmt = self.units.parts[role]
        y_TN = np.empty((len(c_TK), length), np.float32)
        for token, c in enumerate(c_TK):
            own = WHOLE if self.own_TK is None else self.own_TK[token]
            place = self.memory, self.slots[own], offset, length, fmt
            y_TN[token] = products.axpy_rows(*place, c[own])
        return y_TN

    def mlp(self, inner: Inner, x_TN: np.ndarray, terms: Terms) -> np.ndarray:
        x_TN, layout, kind = np.ascontiguousarray(x_TN), self.units.layout(inner), self.units.activations
        if self.own_TK is None or self.own_TK.all():  # the units are read once for all tokens
            return mlp.mlp(self.memory, self.slots, layout, x_TN, terms, activations=kind)
        y_TN = np.empty_like(x_TN)
        for token, own in enumerate(self.own_TK):
            one = slice(token, token + 1)
            own_terms = _terms_of(terms, one, own)
            y_TN[one] = mlp.mlp(self.memory, self.slots[own], layout, x_TN[one], own_terms, activations=kind)
        return y_TN


def _terms_of(terms: Terms, token: slice, own_K: np.ndarray) -> Terms:
    """Returns a token's terms for the chosen units only, bool [K]."""
    gate, up = (
        None if bias is None else bias.reshape(own_K.size, -1)[own_K].reshape(-1)
        for bias in (terms.gate_bias, terms.up_bias)
    )
    return Terms(gate, up, None if terms.factors is None else np.ascontiguousarray(terms.factors[token, own_K]))


Block = StreamedBlock | SlotBlock


def chosen_blocks(batches: Iterable[Batch], units: Units, used_TU: np.ndarray | None) -> Iterator[Block]:
    """Yields units in memory as the kernels take them: in their slots for few tokens, else copied side by side.

    Args:
        used_TU: bool [T, num_units]: which token uses which unit; None for a single token, which uses all of them.
    """
    if used_TU is None or len(used_TU) <= FEW_TOKENS:
        for batch in batches:
            own_TK = None if used_TU is None else used_TU[:, batch.ids]
            yield SlotBlock(batch.ids, batch.slots, batch.rows, units, own_TK)
        return
    for ids, codes in _side_by_side(batches):
        yield StreamedBlock(ids, codes, units, own_TK=used_TU[:, ids])


def _side_by_side(batches: Iterable[Batch]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Copies units, GATHERED_BYTES at a time: large products take less time than many small ones; yields their ids,
    int32 [K], and their bytes, uint8 [K, unit_bytes]."""
    ids, codes = list[np.ndarray](), list[np.ndarray]()
    for batch in batches:
        step = max(1, GATHERED_BYTES // batch.rows.shape[1])
        for start in range(0, batch.ids.size, step):
            ids.append(batch.ids[start : start + step])
            codes.append(batch.rows[batch.slots[start : start + step]])  # the store uses the rows again
            if sum(each.nbytes for each in codes) >= GATHERED_BYTES:
                yield np.concatenate(ids), np.concatenate(codes)
                ids, codes = [], []
    if ids:
        yield np.concatenate(ids), np.concatenate(codes)


class ColumnSums:
    """Products of `x` with matrices whose columns are a family's units: entry i of `x` multiplies unit i."""

    def __init__(
        self, widths: Mapping[MatrixRole, int], x_TN: np.ndarray, biases: Mapping[MatrixRole, np.ndarray | None]
    ) -> None:
        """Begins with zero sums for matrices of `widths` rows; `x_TN` is the family's signal."""
        self._x_TN, self._biases = x_TN, biases
        self._sums: dict[MatrixRole, np.ndarray] = {
            role: np.zeros((len(x_TN), width), np.float32) for role, width in widths.items()
        }

    def add(self, block: Block) -> None:
        chosen = np.ascontiguousarray(self._x_TN[:, block.ids])
        for role, total in self._sums.items():
            total += block.axpy(role, chosen)

    def outputs(self) -> dict[MatrixRole, np.ndarray]:
        """Returns the products of the units so far with the biases, by role, float32 [T, M]."""
        return {role: with_bias(total, self._biases[role]) for role, total in self._sums.items()}


def widths_of(family: str, spec: ModelSpec) -> dict[MatrixRole, int]:
    return {piece.role: role_shape(spec, f"{piece.role}.weight")[0] for piece in slices(family, spec)}
