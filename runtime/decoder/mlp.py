"""The MLP of a decoder layer over blocks of units, whatever families they are of: it knows roles and slices only.

Columns of the gate's and the up projection's are added up for the inputs that were selected; rows of them, and columns
of the down projection, belong to one entry of the inner activation. A matrix that no family holds is resident. Mixtures
of experts are in runtime/decoder/experts.py. Shape letters: T tokens, N hidden_size, F intermediate_size, K units of a
block.
"""

from collections.abc import Sequence

import numpy as np

from coldpress.runtime.decoder.arithmetic import activation
from coldpress.runtime.decoder.blocks import Blocks, Inner, Terms, column_sums
from coldpress.runtime.decoder.matrix import Resident
from coldpress.schemas.errors import ArtifactError
from coldpress.schemas.families import FAMILIES, Family, Signal, resident_roles, slices
from coldpress.schemas.model import MLP_ROLES, MatrixRole, ModelSpec

NEEDED: dict[Signal, tuple[MatrixRole, ...]] = {
    "mlp_input": (),
    "mlp_activation": ("gate_proj",),
    "mlp_up": ("up_proj",),
    "mlp_inner": ("gate_proj", "up_proj"),
}
"""Matrices that must be known before a signal is, in an MLP with a gate."""


class Mlp:
    """One layer's MLP: what of it is resident, and what comes in blocks."""

    def __init__(self, layer: int, spec: ModelSpec, families: tuple[str, ...], resident: Resident) -> None:
        """Takes the resident matrices and the biases of `layer`.

        Raises:
            ArtifactError: if there is no way to compute an MLP from these families.
        """
        self._layer, self._spec = layer, spec
        self._inputs, inner = mlp_families(families, spec)
        if not computable(self._inputs, inner, spec):
            kind = "a gated" if spec.gated_mlp else "an ungated"
            names = ", ".join(family.name for family in (*self._inputs, *inner))
            raise ArtifactError(
                f"the artifact keeps {names} on flash, expected families from which {kind} MLP can be computed: each "
                "matrix in one of them, and at most one over intermediate_size, whose signal the others give"
            )
        self._inner = inner[0] if inner else None
        self._act = activation(spec.hidden_act, spec.activation_threshold)
        self._act_up = self._act if spec.activated_up else _as_it_is
        prefix = f"layers.{layer}."
        self._matrices = {role: resident.matrix(prefix + role) for role in held_roles(families, spec)}
        self._biases = {role: resident.optional_vector(f"{prefix}{role}.bias") for role in MLP_ROLES}
        if self._inner is not None:
            self._form = inner_of(self._inner.signal, spec)

    def apply(self, x_TN: np.ndarray, blocks: Blocks, parts: Sequence[slice] = ()) -> np.ndarray:
        """The MLP's output for its input after the norm, float32 [T, hidden_size] both; `parts`: see `Matrix`."""
        known = self._projections(x_TN, blocks, parts)
        if self._inner is None:
            return self._matrices["down_proj"].apply(self._combine(known.get("gate_proj"), known["up_proj"]), parts)
        signal = self._signal(self._inner.signal, x_TN, known)
        y_TN = np.zeros_like(x_TN)
        for block in blocks(self._layer, self._inner.name, signal):
            terms = Terms(
                self._bias_of(self._form.gate, block.ids),
                self._bias_of(self._form.up, block.ids),
                None if self._inner.signal == "mlp_input" else signal[:, block.ids],
            )
            y_TN += block.mlp(self._form, x_TN, terms)
        return self._with_bias("down_proj", y_TN)

    def _projections(self, x_TN: np.ndarray, blocks: Blocks, parts: Sequence[slice]) -> dict[MatrixRole, np.ndarray]:
        """Outputs of the gate and the up projection that are known whole, float32 [T, F]."""
        known: dict[MatrixRole, np.ndarray] = {
            role: matrix.apply(x_TN, parts)
            for role, matrix in self._matrices.items()
            if role in ("gate_proj", "up_proj")
        }
        for family in self._inputs:
            roles: list[MatrixRole] = [piece.role for piece in slices(family.name, self._spec)]
            sums = column_sums(self._layer, family, roles, self._spec, x_TN, blocks)
            known |= {role: self._with_bias(role, total) for role, total in sums.items()}
        return known

    def _signal(self, kind: Signal, x_TN: np.ndarray, known: dict[MatrixRole, np.ndarray]) -> np.ndarray:
        """What the inner family's selector sees."""
        if kind == "mlp_input":
            return x_TN
        if kind == "mlp_up":
            return self._act_up(known["up_proj"])
        if kind == "mlp_activation":
            return self._act(known["gate_proj"])
        return self._combine(known.get("gate_proj"), known["up_proj"])

    def _bias_of(self, role: MatrixRole | None, ids: np.ndarray) -> np.ndarray | None:
        bias = None if role is None else self._biases[role]
        return None if bias is None else bias[ids]

    def _combine(self, gate: np.ndarray | None, up: np.ndarray) -> np.ndarray:
        return self._act(up) if gate is None else self._act(gate) * self._act_up(up)

    def _with_bias(self, role: MatrixRole, values: np.ndarray) -> np.ndarray:
        bias = self._biases[role]
        return values if bias is None else values + bias


def mlp_families(names: Sequence[str], spec: ModelSpec) -> tuple[list[Family], list[Family]]:
    """The families of these that are an MLP's: those over its inputs, those over its inner activation."""
    own = [FAMILIES[name] for name in names if any(piece.role in MLP_ROLES for piece in slices(name, spec))]
    return [each for each in own if each.axis == "hidden_size"], [each for each in own if each.axis != "hidden_size"]


def held_roles(names: Sequence[str], spec: ModelSpec) -> list[MatrixRole]:
    """The roles of an MLP's matrices that are resident where these families are on flash."""
    return [role for role in resident_roles(names, spec) if role in MLP_ROLES]


def inner_of(signal: Signal, spec: ModelSpec) -> Inner:
    """What of the inner activation units have rows for; the rest of it is the signal."""
    gate: MatrixRole = "gate_proj" if spec.gated_mlp else "up_proj"
    known = NEEDED[signal]
    return Inner(
        gate=None if gate in known else gate,
        up=None if "up_proj" in known or not spec.gated_mlp else "up_proj",
        activation=spec.hidden_act,
        threshold=spec.activation_threshold,
        activated_up=spec.activated_up,
    )


def _as_it_is(values: np.ndarray) -> np.ndarray:
    return values


def computable(inputs: list[Family], inner: list[Family], spec: ModelSpec) -> bool:
    """Every matrix in one place, at most one family over the inner activation, its signal known before its units."""
    roles = [role for family in (*inputs, *inner) for role in family.roles]
    if len(set(roles)) != len(roles) or len(inner) > 1:
        return False
    if any(role == "down_proj" for family in inputs for role in family.roles):
        return False
    if not inner:
        return True
    (family,) = inner
    present = set(NEEDED[family.signal]) if family.signal in NEEDED else {"down_proj"}
    gate_matters = spec.gated_mlp or family.signal in ("mlp_input", "mlp_inner")
    return "down_proj" in family.roles and not present & set(family.roles) and gate_matters
