"""The MLP of a decoder layer over blocks of units of any families: it knows roles and slices only.

Units over the inputs are columns of gate and up; the MLP sums the columns of the selected inputs. Units over the inner
activation are rows of gate and up and columns of down, which belong to one entry of it. A matrix that is in no family
is resident. Mixtures of experts are in runtime/decoder/experts.py. Shape letters: T tokens, N hidden_size, F
intermediate_size, K units of a block.
"""

from collections.abc import Sequence

import numpy as np

from coldpress.runtime.arithmetic import activation, up_activation
from coldpress.runtime.decoder.blocks import Block, ColumnSums, Inner, Terms, widths_of
from coldpress.runtime.decoder.matrix import Matrix, Resident
from coldpress.runtime.decoder.tokens import Prior, Tokens
from coldpress.runtime.store.facts import Key
from coldpress.schemas.errors import ArtifactError
from coldpress.schemas.families import (
    KNOWN_BEFORE,
    Family,
    Signal,
    block_neurons,
    missing_for_decoder,
    mlp_families,
    resident_roles,
)
from coldpress.schemas.model import MLP_ROLES, MatrixRole, ModelSpec


class Mlp:
    def __init__(
        self,
        layer: int,
        spec: ModelSpec,
        families: tuple[str, ...],
        resident: Resident,
        name: str = "",
    ) -> None:
        """Takes the resident matrices and biases of `layer`; `name` ends in a dot if the tensors are those of a part of
        the layer.

        Raises:
            ArtifactError: if there is no way to compute an MLP from these families.
        """
        self._inputs, inner = checked_families(families, spec)
        self.inner = inner[0] if inner else None
        """The family over the inner activation."""
        self._block_neurons = block_neurons(spec) if self.inner and self.inner.axis == "blocks" else 0
        self._act = activation(spec.hidden_act, spec.activation_threshold)
        self._act_up = up_activation(spec.hidden_act, spec.activation_threshold)
        prefix = f"layers.{layer}.{name}"
        matrices: dict[MatrixRole, Matrix] = {
            role: resident.matrix(prefix + role) for role in held_roles(families, spec)
        }
        self.projections: list[tuple[MatrixRole, Matrix]] = [
            (role, matrix) for role, matrix in matrices.items() if role != "down_proj"
        ]
        """Gate and up, as far as they are resident."""
        self._biases = {role: resident.optional_vector(f"{prefix}{role}.bias") for role in MLP_ROLES}
        self._has_biases = any(bias is not None for bias in self._biases.values())
        self.widths = {family.name: widths_of(family.name, spec) for family in self._inputs}
        """By family over the inputs: the number of rows of each of its matrices."""
        if self.inner is None:
            self._down = matrices["down_proj"]
        else:
            self.form = inner_of(self.inner.signal, spec)
        self.requests = tuple((layer, family.name) for family in (*self._inputs, *inner))
        """The parts whose units each token requests, in order."""

    def begin(self, x_TN: np.ndarray, tokens: Tokens) -> "MlpWork":
        return MlpWork(self, x_TN, tokens)

    def input_signal(
        self, family: str, x_TN: np.ndarray, is_dense: bool, prior: Prior | None = None
    ) -> tuple[np.ndarray, None]:
        """Returns the signal of a family that is chosen by the input, float32 [T, n]; there are no experts. The input
        itself if `is_dense`: no selector needs a signal."""
        return (x_TN if is_dense or family in self.widths else self.inner_signal(x_TN, {})), None

    def inner_signal(self, x_TN: np.ndarray, known: dict[MatrixRole, np.ndarray]) -> np.ndarray:
        """Returns the signal of the inner family's selector, float32 [T, n], from the input or the outputs of gate and
        up."""
        assert self.inner is not None
        kind = self.inner.signal
        if kind == "mlp_input":
            return x_TN
        if kind == "mlp_up":
            return self._act_up(known["up_proj"])
        if kind == "mlp_activation":
            return self._act(known["gate_proj"])
        return self._combine(known.get("gate_proj"), known["up_proj"])

    def part(self, x_TN: np.ndarray, signal: np.ndarray, block: Block) -> np.ndarray:
        """Computes what units of the inner family contribute to the output, float32 [T, N]."""
        assert self.inner is not None
        ids = block.ids
        factors = None if self.inner.signal == "mlp_input" else signal[:, ids]
        if not self._has_biases:
            return block.mlp(self.form, x_TN, Terms(None, None, factors))
        if self._block_neurons:
            ids = (ids[:, None] * self._block_neurons + np.arange(self._block_neurons)).reshape(-1)
        terms = Terms(self._bias_of(self.form.gate, ids), self._bias_of(self.form.up, ids), factors)
        return block.mlp(self.form, x_TN, terms)

    @property
    def needs_signal(self) -> bool:
        """Tells whether the inner family's units need the signal even if all of them are used: as a factor."""
        return self.inner is not None and self.inner.signal != "mlp_input"

    def down(self, known: dict[MatrixRole, np.ndarray], parts: Sequence[slice]) -> np.ndarray:
        """Computes the output if the down projection is resident, float32 [T, N]."""
        return self._down.apply(self._combine(known.get("gate_proj"), known["up_proj"]), parts)

    def _bias_of(self, role: MatrixRole | None, ids: np.ndarray) -> np.ndarray | None:
        bias = None if role is None else self._biases[role]
        return None if bias is None else bias[ids]

    def _combine(self, gate: np.ndarray | None, up: np.ndarray) -> np.ndarray:
        return self._act(up) if gate is None else self._act(gate) * self._act_up(up)

    def with_bias(self, role: MatrixRole, values: np.ndarray) -> np.ndarray:
        bias = self._biases[role]
        return values if bias is None else values + bias


class MlpWork:
    experts = None

    def __init__(self, mlp: Mlp, x_TN: np.ndarray, tokens: Tokens) -> None:
        self._mlp, self._x_TN, self._parts, self._is_dense = mlp, x_TN, tokens.parts, tokens.is_dense
        self._known: dict[MatrixRole, np.ndarray] = {}
        for role, matrix in mlp.projections:
            self._known[role] = matrix.apply(x_TN, tokens.parts)
        self._columns: dict[str, ColumnSums] = {}
        self._signal, self._y_TN = x_TN, np.zeros_like(x_TN)

    def signal(self, key: Key) -> np.ndarray:
        _, family = key
        if family in self._mlp.widths:
            self._columns[family] = ColumnSums(self._mlp.widths[family], self._x_TN)
            return self._x_TN
        if self._is_dense and not self._mlp.needs_signal:
            return self._x_TN
        self._signal = self._mlp.inner_signal(self._x_TN, self._outputs())
        return self._signal

    def add(self, key: Key, block: Block) -> None:
        columns = self._columns.get(key[1])
        if columns is not None:
            columns.add(block)
        else:
            self._y_TN += self._mlp.part(self._x_TN, self._signal, block)

    def result(self) -> np.ndarray:
        if self._mlp.inner is None:
            return self._mlp.down(self._outputs(), self._parts)
        return self._mlp.with_bias("down_proj", self._y_TN)

    def _outputs(self) -> dict[MatrixRole, np.ndarray]:
        """Returns the outputs of gate and up that are complete, float32 [T, F]."""
        for columns in self._columns.values():
            for role, total in columns.sums.items():
                self._known[role] = self._mlp.with_bias(role, total)
        return self._known


def checked_families(names: Sequence[str], spec: ModelSpec) -> tuple[list[Family], list[Family]]:
    """Returns the MLP's families among `names`: those over its inputs, and those over its inner activation.

    Raises:
        ArtifactError: if there is no way to compute an MLP from them.
    """
    inputs, inner = mlp_families(names, spec)
    found = [family.name for family in (*inputs, *inner)]
    if expected := missing_for_decoder(found, spec):
        raise ArtifactError(f"the artifact keeps {', '.join(found)} on flash, expected {expected}")
    return inputs, inner


def held_roles(names: Sequence[str], spec: ModelSpec) -> list[MatrixRole]:
    return [role for role in resident_roles(names, spec) if role in MLP_ROLES]


def inner_of(signal: Signal, spec: ModelSpec) -> Inner:
    """Returns the rows from which units compute their inner activation; the signal supplies the other factors."""
    gate: MatrixRole = "gate_proj" if spec.gated_mlp else "up_proj"
    known = KNOWN_BEFORE[signal]
    return Inner(
        gate=None if gate in known else gate,
        up=None if "up_proj" in known or not spec.gated_mlp else "up_proj",
        activation=spec.hidden_act,
        threshold=spec.activation_threshold,
    )
