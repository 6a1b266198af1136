"""The MLP of a decoder layer over blocks of units of any families: it knows roles and slices only.

Units over the inputs are columns of gate and up; the MLP sums the columns of the selected inputs. Units over the inner
activation are rows of gate and up and columns of down, which belong to one entry of it. A matrix that is in no family
is resident. Shape letters: T tokens, N hidden_size, F intermediate_size, K units of a block, E experts, U units of a
family, the units of one expert after those of another.
"""

from collections.abc import Sequence

import numpy as np

from coldpress.runtime.arithmetic import activation, sigmoid, up_activation
from coldpress.runtime.decoder.blocks import WHOLE, Block, ColumnSums, Inner, StreamedBlock, widths_of, with_bias
from coldpress.runtime.decoder.matrix import Matrix, Resident
from coldpress.runtime.decoder.tokens import Prior, Tokens
from coldpress.runtime.kernels.mlp import Terms
from coldpress.runtime.routers import router_of
from coldpress.runtime.store.facts import Key
from coldpress.runtime.unit_numbers import distinct
from coldpress.schemas.errors import ArtifactError
from coldpress.schemas.families import (
    KNOWN_BEFORE,
    Family,
    Signal,
    block_neurons,
    missing_for_decoder,
    mlp_families,
    resident_roles,
    slices,
)
from coldpress.schemas.model import MLP_ROLES, MatrixRole, ModelSpec, matrices

OF_ALL = dict[MatrixRole, np.ndarray]
"""The outputs of gate and up, float32 [T, E, F], 0 for experts that a token does not use."""


class Mlp:
    def __init__(
        self, layer: int, spec: ModelSpec, families: tuple[str, ...], resident: Resident, name: str = ""
    ) -> None:
        """Takes the resident matrices and biases of `layer`; `name` ends in a dot if the tensors are those of a part of
        the layer. Raises `ArtifactError` if there is no way to compute an MLP from these families."""
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
        self.biases: dict[MatrixRole, np.ndarray | None] = {
            role: resident.optional_vector(f"{prefix}{role}.bias") for role in MLP_ROLES
        }
        self._has_biases = any(bias is not None for bias in self.biases.values())
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
        factors = None if self.inner.signal == "mlp_input" else np.ascontiguousarray(signal[:, ids])
        if not self._has_biases:
            return block.mlp(self.form, x_TN, Terms(None, None, factors))
        if self._block_neurons:
            ids = (ids[:, None] * self._block_neurons + np.arange(self._block_neurons)).reshape(-1)
        terms = Terms(self._bias_of(self.form.gate, ids), self._bias_of(self.form.up, ids), factors)
        return block.mlp(self.form, x_TN, terms)

    @property
    def needs_signal(self) -> bool:
        """Tells whether the signal is needed even if all units are used: as a factor in units of the inner family."""
        return self.inner is not None and self.inner.signal != "mlp_input"

    def down(self, known: dict[MatrixRole, np.ndarray], parts: Sequence[slice]) -> np.ndarray:
        """Computes the output if the down projection is resident, float32 [T, N]."""
        return self._down.apply(self._combine(known.get("gate_proj"), known["up_proj"]), parts)

    def _bias_of(self, role: MatrixRole | None, ids: np.ndarray) -> np.ndarray | None:
        bias = None if role is None else self.biases[role]
        return None if bias is None else bias[ids]

    def _combine(self, gate: np.ndarray | None, up: np.ndarray) -> np.ndarray:
        return self._act(up) if gate is None else self._act(gate) * self._act_up(up)


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
            self._columns[family] = ColumnSums(self._mlp.widths[family], self._x_TN, self._mlp.biases)
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
        return with_bias(self._y_TN, self._mlp.biases["down_proj"])

    def _outputs(self) -> dict[MatrixRole, np.ndarray]:
        """Returns the outputs of gate and up that are complete, float32 [T, F]."""
        for columns in self._columns.values():
            self._known |= columns.outputs()
        return self._known


class Experts:
    """The MLP of a layer that is a mixture of experts, over blocks of units of all experts.

    A resident router chooses a few experts for each token (runtime/routers). A token uses only units of these experts,
    and multiplies each expert's output by its weight. Gate and up may be resident, with one matrix per expert; down is
    on flash. An expert that every token uses is resident. A selector chooses each expert's inputs separately; each
    entry of the inner activation is multiplied by its expert's weight.
    """

    def __init__(self, layer: int, spec: ModelSpec, families: tuple[str, ...], resident: Resident) -> None:
        """Takes the resident matrices of `layer`. Raises `ArtifactError` if there is no way to compute experts from
        these families."""
        inputs, inner = checked_families(families, spec)
        self._layer, self._spec, (self.inner,) = layer, spec, inner
        self._router = router_of(spec, resident.optional_vector(f"layers.{layer}.router.correction"))
        self.form = inner_of(self.inner.signal, spec)
        self._unit_neurons = block_neurons(spec) if self.inner.axis == "blocks" else 1
        self.num_units = spec.intermediate_size // self._unit_neurons
        """Units of the inner family in an expert."""
        self._routing = resident.matrix(f"layers.{layer}.router")
        self._matrices: dict[MatrixRole, list[Matrix]] = {
            role: [resident.matrix(f"layers.{layer}.{name}") for name in matrices(role, spec)]
            for role in held_roles(families, spec)
        }
        self._act = activation(spec.hidden_act, spec.activation_threshold)
        self._act_up = up_activation(spec.hidden_act, spec.activation_threshold)
        self.biases = {role: _biases(layer, role, spec, resident) for role in MLP_ROLES}
        self.shared = self._shared_gate = None
        if spec.shared_intermediate_size:
            gate = f"layers.{layer}.shared_expert_gate"
            self.shared = Mlp(layer, spec.of_shared_expert, (), resident, name="shared_expert.")
            self._shared_gate = resident.matrix(gate) if resident.has(f"{gate}.weight") else None
        self.inputs: dict[str, tuple[MatrixRole, ...]] = {
            family.name: tuple(piece.role for piece in slices(family.name, spec)) for family in inputs
        }
        """The roles of each family over the inputs."""
        self.requests = tuple((layer, family.name) for family in (*inputs, *inner))
        """The parts whose units each token requests, in order."""

    def begin(self, x_TN: np.ndarray, tokens: Tokens) -> "ExpertsWork":
        return ExpertsWork(self, x_TN, tokens)

    def route(
        self, x_TN: np.ndarray, parts: Sequence[slice] = (), prior: Prior | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the experts that each token uses, bool [T, E], and their weights, float32 [T, E]."""
        logits_TE = self._routing.apply(x_TN, parts)
        scores_TE = self._router.scores(logits_TE)
        chosen_TE = self._router.choose(scores_TE if prior is None else prior(self._layer, scores_TE))
        return chosen_TE, self._router.weights(logits_TE, chosen_TE)

    def input_signal(
        self, family: str, x_TN: np.ndarray, is_dense: bool, prior: Prior | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the signal of a family that is chosen by the input, float32 [T, n], as `Mlp.input_signal`, and each
        token's experts, bool [T, E]."""
        chosen_TE, weights_TE = self.route(x_TN, prior=prior)
        if family in self.inputs:
            return per_expert(x_TN, chosen_TE), chosen_TE
        return (x_TN if is_dense else self.inner_signal(x_TN, {}, chosen_TE, weights_TE)), chosen_TE

    def known(self, x_TN: np.ndarray, chosen_TE: np.ndarray, parts: Sequence[slice]) -> OF_ALL:
        """Returns the outputs of resident matrices; an expert multiplies only the tokens that use it."""
        known: OF_ALL = {}
        for role, each in self._matrices.items():
            known[role] = np.zeros((*chosen_TE.shape, self._spec.intermediate_size), np.float32)
            for expert, matrix in enumerate(each):
                own = np.flatnonzero(chosen_TE[:, expert])
                if own.size:
                    known[role][own, expert] = matrix.apply(x_TN, parts, own)
        return known

    def inner_signal(
        self, x_TN: np.ndarray, known: OF_ALL, chosen_TE: np.ndarray, weights_TE: np.ndarray
    ) -> np.ndarray:
        """Returns the signal of the inner family's selector, float32 [T, n]."""
        kind, values_TEF = self.inner.signal, np.float32(1)
        if kind == "mlp_input":
            return x_TN
        if kind != "mlp_up":
            values_TEF = values_TEF * self._act(known["gate_proj"])
        if kind != "mlp_activation":
            up_TEF = self._act_up(known["up_proj"])
            if self._spec.activated_up:  # it may map 0 to another number
                up_TEF = np.where(chosen_TE[..., None], up_TEF, np.float32(0))
            values_TEF = values_TEF * up_TEF
        if kind == "mlp_inner":
            values_TEF = values_TEF * weights_TE[..., None]
        return values_TEF.reshape(len(x_TN), -1)

    def beginning(self, role: MatrixRole, chosen_TE: np.ndarray) -> np.ndarray:
        """Returns the biases of gate or up for the experts that tokens use, float32 [T, E, F], 0 for others."""
        found_TEF = np.zeros((*chosen_TE.shape, self._spec.intermediate_size), np.float32)
        for expert, bias in self.biases[role].items():
            found_TEF[chosen_TE[:, expert], expert] = bias
        return found_TEF

    def part(
        self, x_TN: np.ndarray, signal: np.ndarray, weights_TE: np.ndarray, block: Block, own: np.ndarray | slice
    ) -> np.ndarray:
        """Computes what units of the inner family contribute to the output of the tokens `own`, float32 [n, N]."""
        x_TN, ids = np.ascontiguousarray(x_TN[own]), block.ids
        biases = self._bias_of(self.form.gate, ids), self._bias_of(self.form.up, ids)
        return block.mlp(self.form, x_TN, Terms(*biases, self.factors(signal, weights_TE, ids, own)))

    def _bias_of(self, role: MatrixRole | None, ids: np.ndarray) -> np.ndarray | None:
        if role is None or not self.biases[role]:
            return None
        experts_K, units_K = np.divmod(ids, self.num_units)
        found = np.zeros((ids.size, self._unit_neurons), np.float32)
        for expert in distinct(experts_K).tolist():
            own_K, bias = experts_K == expert, self.biases[role].get(expert)
            if bias is not None:
                found[own_K] = bias.reshape(self.num_units, -1)[units_K[own_K]]
        return found.reshape(-1)

    def factors(
        self, signal: np.ndarray, weights_TE: np.ndarray, ids: np.ndarray, own: np.ndarray | slice
    ) -> np.ndarray:
        """Returns the factors of the units' products for the tokens `own`, float32 [n, K]: the rest of the inner
        activation, times the expert's weight, which is 0 if a token does not use the expert."""
        weights_TK = _some(weights_TE, own, ids // self.num_units)
        if self.inner.signal == "mlp_input":
            return weights_TK
        rest_TK = _some(signal, own, ids)
        return rest_TK if self.inner.signal == "mlp_inner" else rest_TK * weights_TK

    def with_shared(self, y_TN: np.ndarray, x_TN: np.ndarray, tokens: Tokens) -> np.ndarray:
        """Adds to the routed experts' sum the output of the MLP in DRAM that every token uses (DeepSeek-AI 2024,
        section 2.1.2), if there is one, times the sigmoid of its gate's product (Qwen1.5-MoE), if it has one."""
        if self.shared is None:
            return y_TN
        shared_TN = self.shared.begin(x_TN, tokens).result()
        if self._shared_gate is not None:
            shared_TN = shared_TN * sigmoid(self._shared_gate.apply(x_TN, tokens.parts))
        return y_TN + shared_TN


class ExpertsWork:
    def __init__(self, layer: Experts, x_TN: np.ndarray, tokens: Tokens) -> None:
        self._layer, self._x_TN, self._tokens, self._is_dense = layer, x_TN, tokens, tokens.is_dense
        self.experts, self._weights_TE = layer.route(x_TN, tokens.parts, tokens.prior)
        self._known = layer.known(x_TN, self.experts, tokens.parts)
        self._signal, self._y_TN = x_TN, np.zeros_like(x_TN)

    def signal(self, key: Key) -> np.ndarray:
        if key[1] in self._layer.inputs:
            roles = self._layer.inputs[key[1]]
            self._known |= {role: self._layer.beginning(role, self.experts) for role in roles}
            self._signal = self._x_TN if self._is_dense else per_expert(self._x_TN, self.experts)
        elif not self._is_dense or self._layer.inner.signal != "mlp_input":
            self._signal = self._layer.inner_signal(self._x_TN, self._known, self.experts, self._weights_TE)
        return self._signal

    def add(self, key: Key, block: Block) -> None:
        layer, is_inner, is_many = self._layer, key[1] not in self._layer.inputs, isinstance(block, StreamedBlock)
        if is_inner and not is_many:
            self._y_TN += layer.part(self._x_TN, self._signal, self._weights_TE, block, WHOLE)
            return
        num_together = layer.num_units if is_inner else self._x_TN.shape[1]
        experts_K = block.ids // num_together
        for expert in distinct(experts_K).tolist():
            own, of_expert = WHOLE, block.some(experts_K == expert)
            if isinstance(of_expert, StreamedBlock):
                own = np.flatnonzero(self.experts[:, expert])
                if not own.size:
                    continue
                of_expert = of_expert.of(own)
            if is_inner:
                self._y_TN[own] += layer.part(self._x_TN, self._signal, self._weights_TE, of_expert, own)
                continue
            inputs_TK = _some(self._x_TN, own, of_expert.ids % num_together)
            for role in layer.inputs[key[1]]:
                self._known[role][own, expert] += of_expert.axpy(role, inputs_TK)

    def result(self) -> np.ndarray:
        for expert, bias in self._layer.biases["down_proj"].items():
            own = self.experts[:, expert]
            self._y_TN[own] += self._weights_TE[own, expert, None] * bias
        return self._layer.with_shared(self._y_TN, self._x_TN, self._tokens)


def _biases(layer: int, role: MatrixRole, spec: ModelSpec, resident: Resident) -> dict[int, np.ndarray]:
    """Returns the biases of the experts that have one, float32 [F], or [N] of down."""
    names = {expert: f"layers.{layer}.{name}.bias" for expert, name in enumerate(matrices(role, spec))}
    return {expert: resident.vector(name) for expert, name in names.items() if resident.has(name)}


def _some(values: np.ndarray, rows: np.ndarray | slice, columns: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values[:, columns] if isinstance(rows, slice) else values[np.ix_(rows, columns)])


def per_expert(x_TN: np.ndarray, chosen_TE: np.ndarray) -> np.ndarray:
    """Repeats the input for each expert, with 0 for experts that a token does not use: float32 [T, E * N]."""
    return (x_TN[:, None] * chosen_TE[..., None]).reshape(len(x_TN), -1)


def checked_families(names: Sequence[str], spec: ModelSpec) -> tuple[list[Family], list[Family]]:
    """Returns the MLP's families among `names`: those over its inputs, and those over its inner activation. Raises
    `ArtifactError` if there is no way to compute an MLP from them."""
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
