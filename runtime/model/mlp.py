"""The MLP of a decoder layer, over blocks of units: the same arithmetic, dense in the prefill and sparse when decoding.

A block is some units of one family whose bytes are in memory; where they come from — a sequential pass over flash, or
the store's slots — and which units they are is not decided here. Every family set of design section 1 is served.
Shape letters: T tokens, N values across hidden_size or intermediate_size, K units of a block.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from runtime import _plugins
from runtime.kernels import matmul, rows
from runtime.model.arithmetic import activation
from runtime.model.matrix import Resident
from schemas.errors import ArtifactError
from schemas.families import FamilyName, FormatName, resident_roles, slice_length
from schemas.manifest import FamilyFormat
from schemas.model import MLP_ROLES, MlpRole, ModelSpec

KNOWN = "neuron, up_down (gated only), or mlp_in and mlp_mid"


@dataclass(frozen=True)
class Units:
    """A family's units: their format, and per role the slice's byte offset, byte count and number of values."""

    format: FormatName
    parts: Mapping[MlpRole, tuple[int, int, int]]


def units_of(family: FamilyFormat, spec: ModelSpec) -> Units:
    """Where the slices lie inside a unit: one after another, each encoded on its own."""
    nbytes = _plugins.load("runtime.quantization", family.format).nbytes
    parts: dict[MlpRole, tuple[int, int, int]] = {}
    offset = 0
    for piece in family.slices:
        length = slice_length(piece, spec)
        parts[piece.role] = (offset, nbytes(length), length)
        offset += nbytes(length)
    return Units(family.format, parts)


class Block(Protocol):
    """Some units in memory."""

    @property
    def ids(self) -> np.ndarray:
        """int32 [K], unit ids."""
        ...

    def dot(self, role: MlpRole, x_TN: np.ndarray) -> np.ndarray:
        """Each unit's slice times `x`: float32 [T, N] -> float32 [T, K]."""
        ...

    def axpy(self, role: MlpRole, c_TK: np.ndarray) -> np.ndarray:
        """The units' slices, weighted and summed: float32 [T, K] -> float32 [T, N]."""
        ...


Blocks = Callable[[int, FamilyName, np.ndarray], Iterable[Block]]
"""(layer, family, signal float32 [T, num_units or hidden_size]) -> the blocks to compute with."""


@dataclass(frozen=True)
class StreamedBlock:
    """Units as they follow each other on flash: `codes` uint8 [K, unit_bytes]. Any number of tokens."""

    ids: np.ndarray
    codes: np.ndarray
    units: Units

    def dot(self, role: MlpRole, x_TN: np.ndarray) -> np.ndarray:
        """See `Block`."""
        offset, size, length = self.units.parts[role]
        return matmul.matmul(self.codes[:, offset : offset + size], length, self.units.format, x_TN)

    def axpy(self, role: MlpRole, c_TK: np.ndarray) -> np.ndarray:
        """See `Block`."""
        offset, size, length = self.units.parts[role]
        return matmul.matmul_t(self.codes[:, offset : offset + size], length, self.units.format, c_TK)


@dataclass(frozen=True)
class SlotBlock:
    """Units in the store's slots: unit `ids[k]` is `memory[slots[k]]`, uint8 [unit_bytes]. One token."""

    ids: np.ndarray
    slots: np.ndarray
    memory: np.ndarray
    units: Units

    def dot(self, role: MlpRole, x_TN: np.ndarray) -> np.ndarray:
        """See `Block`."""
        offset, _, length = self.units.parts[role]
        return rows.dot_rows(self.memory, self.slots, offset, length, self.units.format, x_TN[0])[None]

    def axpy(self, role: MlpRole, c_TK: np.ndarray) -> np.ndarray:
        """See `Block`."""
        offset, _, length = self.units.parts[role]
        return rows.axpy_rows(self.memory, self.slots, offset, length, self.units.format, c_TK[0])[None]


class Mlp:
    """One layer's MLP: what of it is resident, and the order in which its families are computed."""

    def __init__(self, layer: int, spec: ModelSpec, families: tuple[FamilyName, ...], resident: Resident) -> None:
        """Takes the resident matrices and the biases of `layer`.

        Raises:
            ArtifactError: if there is no way to compute an MLP from these families.
        """
        if not _computable(families, spec):
            kind = "a gated" if spec.gated_mlp else "an ungated"
            raise ArtifactError(f"the artifact keeps {', '.join(families)} on flash, {kind} MLP runs from {KNOWN}")
        self._layer = layer
        self._spec = spec
        self._families = families
        self._act = activation(spec.hidden_act)
        prefix = f"layers.{layer}."
        self._matrices = {role: resident.matrix(prefix + role) for role in resident_roles(families, spec)}
        self._biases = {role: resident.optional_vector(f"{prefix}{role}.bias") for role in MLP_ROLES}

    def apply(self, x_TN: np.ndarray, blocks: Blocks) -> np.ndarray:
        """The MLP's output for its input after the norm, float32 [T, hidden_size] both."""
        if "neuron" in self._families:
            y_TN = self._neurons(x_TN, blocks)
        elif "up_down" in self._families:
            y_TN = self._up_down(x_TN, blocks)
        else:
            return self._down(self._inner(x_TN, blocks), blocks)
        return self._with_bias("down_proj", y_TN)

    def _neurons(self, x_TN: np.ndarray, blocks: Blocks) -> np.ndarray:
        y_TN = np.zeros_like(x_TN)
        for block in blocks(self._layer, "neuron", x_TN):
            gate = (
                self._with_bias("gate_proj", block.dot("gate_proj", x_TN), block.ids) if self._spec.gated_mlp else None
            )
            up = self._with_bias("up_proj", block.dot("up_proj", x_TN), block.ids)
            y_TN += block.axpy("down_proj", self._combine(gate, up))
        return y_TN

    def _up_down(self, x_TN: np.ndarray, blocks: Blocks) -> np.ndarray:
        y_TN = np.zeros_like(x_TN)
        active = self._act(self._matrices["gate_proj"].apply(x_TN))
        for block in blocks(self._layer, "up_down", active):
            up = self._with_bias("up_proj", block.dot("up_proj", x_TN), block.ids)
            y_TN += block.axpy("down_proj", active[:, block.ids] * up)
        return y_TN

    def _inner(self, x_TN: np.ndarray, blocks: Blocks) -> np.ndarray:
        """act(gate) * up, or act(up): float32 [T, intermediate_size]."""
        roles: tuple[MlpRole, ...] = ("gate_proj", "up_proj") if self._spec.gated_mlp else ("up_proj",)
        if "mlp_in" not in self._families:
            values = {role: self._matrices[role].apply(x_TN) for role in roles}
            return self._combine(values.get("gate_proj"), values["up_proj"])
        sums = {role: np.zeros((len(x_TN), self._spec.intermediate_size), np.float32) for role in roles}
        for block in blocks(self._layer, "mlp_in", x_TN):
            chosen = np.ascontiguousarray(x_TN[:, block.ids])
            for role in roles:
                sums[role] += block.axpy(role, chosen)
        values = {role: self._with_bias(role, sums[role]) for role in roles}
        return self._combine(values.get("gate_proj"), values["up_proj"])

    def _down(self, inner_TN: np.ndarray, blocks: Blocks) -> np.ndarray:
        if "mlp_mid" not in self._families:
            return self._matrices["down_proj"].apply(inner_TN)
        y_TN = np.zeros((len(inner_TN), self._spec.hidden_size), np.float32)
        for block in blocks(self._layer, "mlp_mid", inner_TN):
            y_TN += block.axpy("down_proj", np.ascontiguousarray(inner_TN[:, block.ids]))
        return self._with_bias("down_proj", y_TN)

    def _combine(self, gate: np.ndarray | None, up: np.ndarray) -> np.ndarray:
        return self._act(up) if gate is None else self._act(gate) * up

    def _with_bias(self, role: MlpRole, values: np.ndarray, ids: np.ndarray | None = None) -> np.ndarray:
        bias = self._biases[role]
        if bias is None:
            return values
        return values + (bias if ids is None else bias[ids])


def _computable(families: tuple[FamilyName, ...], spec: ModelSpec) -> bool:
    chosen = set(families)
    return chosen == {"neuron"} or (chosen == {"up_down"} and spec.gated_mlp) or chosen <= {"mlp_in", "mlp_mid"}


def streamed(blocks: Iterator[tuple[np.ndarray, np.ndarray]], units: Units) -> Iterator[StreamedBlock]:
    """The store's sequential pass as blocks."""
    return (StreamedBlock(ids, codes, units) for ids, codes in blocks)
