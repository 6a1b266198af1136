"""The MLP of a layer that is a mixture of experts, over blocks of units of all of them.

A resident router chooses some experts for each token; a token's units are of those alone, and what each gives is
weighed by the softmax of the chosen logits (Jiang et al. 2024, section 2.1). Gate and up may be resident, a matrix of
each expert; down is on flash. Each expert's inputs are chosen from on their own, and entries of the inner activation
are weighed as their expert is. Shape letters: T tokens, N hidden_size, F intermediate_size, K units of a block, E
experts, U units of a family, an expert's after another's.
"""

from collections.abc import Sequence

import numpy as np

from coldpress.runtime.decoder.arithmetic import activation
from coldpress.runtime.decoder.blocks import Blocks, Terms
from coldpress.runtime.decoder.matrix import Matrix, Resident
from coldpress.runtime.decoder.mlp import computable, held_roles, inner_of, mlp_families
from coldpress.runtime.kernels import FEW_TOKENS
from coldpress.schemas.errors import ArtifactError
from coldpress.schemas.families import FAMILIES, Family, slices
from coldpress.schemas.model import MatrixRole, ModelSpec, matrices

OF_ALL = dict[MatrixRole, np.ndarray]
"""Outputs of gate and up, float32 [T, E, F], 0 for experts that a token does not use."""


class Experts:
    """One layer's router, what of the experts is resident, and what comes in blocks."""

    def __init__(self, layer: int, spec: ModelSpec, families: tuple[str, ...], resident: Resident) -> None:
        """Takes the resident matrices of `layer`.

        Raises:
            ArtifactError: if there is no way to compute experts from these families.
        """
        self._inputs, inner = mlp_families(families, spec)
        if not inner or not computable(self._inputs, inner, spec):
            names = ", ".join(family.name for family in (*self._inputs, *inner))
            raise ArtifactError(
                f"the artifact keeps {names} on flash, expected families from which experts can be computed: down in "
                "one over intermediate_size, whose signal the others give"
            )
        self._layer, self._spec, (self._inner,) = layer, spec, inner
        self._router = resident.matrix(f"layers.{layer}.router")
        self._matrices: dict[MatrixRole, list[Matrix]] = {
            role: [resident.matrix(f"layers.{layer}.{name}") for name in matrices(role, spec)]
            for role in held_roles(families, spec)
        }
        self._act = activation(spec.hidden_act, spec.activation_threshold)
        self._form = inner_of(self._inner.signal, spec)

    def apply(self, x_TN: np.ndarray, blocks: Blocks, parts: Sequence[slice] = ()) -> np.ndarray:
        """The output for the input after the norm, float32 [T, hidden_size] both; `parts`: see `Matrix`."""
        chosen_TE, weights_TE = routed(self._router.apply(x_TN, parts), self._spec.num_experts_per_tok)
        known = self._resident(x_TN, chosen_TE, parts)
        for family in self._inputs:
            known |= self._column_sums(family, x_TN, chosen_TE, blocks)
        signal, y_TN = self._signal(x_TN, known, weights_TE), np.zeros_like(x_TN)
        for block in blocks(self._layer, self._inner.name, signal, chosen_TE):
            factors = self._factors(signal, weights_TE, block.ids)
            y_TN += block.mlp(self._form, x_TN, Terms(None, None, factors))
        return y_TN

    def signal(self, family: str, x_TN: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """What the selector of a family that the input tells sees for it, float32 [T, n], and the experts that each
        token uses, bool [T, E]."""
        chosen_TE, _ = routed(self._router.apply(x_TN), self._spec.num_experts_per_tok)
        return given(x_TN, chosen_TE) if FAMILIES[family] in self._inputs else x_TN, chosen_TE

    def _resident(self, x_TN: np.ndarray, chosen_TE: np.ndarray, parts: Sequence[slice]) -> OF_ALL:
        """What matrices in DRAM give. Of few tokens, each of which has the bits that it has alone, an expert multiplies
        those that use it; of more, all, since their bits hang on who is multiplied together."""
        known: OF_ALL = {}
        for role, each in self._matrices.items():
            known[role] = np.zeros((*chosen_TE.shape, self._spec.intermediate_size), np.float32)
            for expert, matrix in enumerate(each):
                own = chosen_TE[:, expert]
                if len(x_TN) > FEW_TOKENS:
                    known[role][own, expert] = matrix.apply(x_TN, parts)[own]
                elif own.any():
                    known[role][own, expert] = matrix.apply(np.ascontiguousarray(x_TN[own]))
        return known

    def _column_sums(self, family: Family, x_TN: np.ndarray, chosen_TE: np.ndarray, blocks: Blocks) -> OF_ALL:
        """What the inputs give that were chosen."""
        shape = (*chosen_TE.shape, self._spec.intermediate_size)
        sums: OF_ALL = {piece.role: np.zeros(shape, np.float32) for piece in slices(family.name, self._spec)}
        signal_TU = given(x_TN, chosen_TE)
        for block in blocks(self._layer, family.name, signal_TU, chosen_TE):
            experts_K = block.ids // self._spec.hidden_size
            for expert in np.unique(experts_K):
                own = block.some(experts_K == expert)
                inputs_TK = np.ascontiguousarray(signal_TU[:, own.ids])
                for role, total in sums.items():
                    total[:, expert] += own.axpy(role, inputs_TK)
        return sums

    def _signal(self, x_TN: np.ndarray, known: OF_ALL, weights_TE: np.ndarray) -> np.ndarray:
        """What the inner family's selector sees."""
        kind, values_TEF = self._inner.signal, np.float32(1)
        if kind == "mlp_input":
            return x_TN
        if kind != "mlp_up":
            values_TEF = values_TEF * self._act(known["gate_proj"])
        if kind != "mlp_activation":
            up_TEF = known["up_proj"]
            values_TEF = values_TEF * (self._act(up_TEF) if self._spec.activated_up else up_TEF)
        if kind == "mlp_inner":
            values_TEF = values_TEF * weights_TE[..., None]
        return values_TEF.reshape(len(x_TN), -1)

    def _factors(self, signal: np.ndarray, weights_TE: np.ndarray, ids: np.ndarray) -> np.ndarray:
        """What units' own values are multiplied by, float32 [T, K]: the rest of the inner activation, and the expert's
        weight, which is 0 where a token does not use it."""
        weights_TK = weights_TE[:, ids // self._spec.intermediate_size]
        if self._inner.signal == "mlp_input":
            return weights_TK
        return signal[:, ids] if self._inner.signal == "mlp_inner" else signal[:, ids] * weights_TK


def given(x_TN: np.ndarray, chosen_TE: np.ndarray) -> np.ndarray:
    """The input once for each expert, 0 for those that a token does not use: float32 [T, E * N]."""
    return (x_TN[:, None] * chosen_TE[..., None]).reshape(len(x_TN), -1)


def taken(signal_TU: np.ndarray, chosen_TE: np.ndarray) -> np.ndarray:
    """The input, float32 [T, N], from what `given` makes of it."""
    each_TEN = signal_TU.reshape(*chosen_TE.shape, -1)
    return each_TEN[np.arange(len(chosen_TE)), chosen_TE.argmax(axis=1)]


def routed(logits_TE: np.ndarray, num_chosen: int) -> tuple[np.ndarray, np.ndarray]:
    """The experts of the largest logits, bool [T, E], ties going to the lower number, and the softmax of those logits,
    float32 [T, E], 0 for the others (Jiang et al. 2024, section 2.1)."""
    order = np.argsort(-logits_TE, axis=1, kind="stable")[:, :num_chosen]
    chosen_TE = np.zeros(logits_TE.shape, bool)
    np.put_along_axis(chosen_TE, order, True, axis=1)
    largest = logits_TE.max(axis=1, keepdims=True)
    weights_TE = np.where(chosen_TE, np.exp(logits_TE - largest), np.float32(0))
    return chosen_TE, weights_TE / weights_TE.sum(axis=1, keepdims=True)
