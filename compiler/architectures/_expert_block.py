"""A mixture of experts as a module whose signals hooks can see: its experts one matrix at a time.

A signal has one entry for every unit of every expert, unit i of expert e at e * intermediate_size + i (design, section
1). It is zero for the experts that a token does not use; so is each expert's input. The runtime's own router chooses
and weighs the experts (runtime/decoder/router.py). The output is a sum over units, so an expert's weight goes to each
unit: its signal then says what it adds. Shape letters: T tokens, N hidden_size, E experts, F intermediate_size, I
entries of a signal.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from coldpress.compiler.architectures._experts import DOWN_BIAS, Names
from coldpress.runtime.decoder.arithmetic import SWIGLU_ALPHA
from coldpress.runtime.decoder.router import Router
from coldpress.schemas.model import MatrixRole, ModelSpec


class Gate(nn.Linear):
    """The router's matrix. Logits are float32 whatever the weights are, since a token's experts follow from their
    order."""

    def forward(self, input: Tensor) -> Tensor:
        """[T, N] -> float32 [T, E]."""
        bias = None if self.bias is None else self.bias.float()
        return torch.nn.functional.linear(input.float(), self.weight.float(), bias)


class Expert(nn.Module):
    """Gate, up and down, and the bias of down, which its caller weights and adds."""

    def __init__(self, names: Names, spec: ModelSpec) -> None:
        """Makes the matrices under their names."""
        super().__init__()
        for role, name in names.matrices.items():
            sizes = spec.hidden_size, spec.intermediate_size
            inputs, outputs = reversed(sizes) if role == "down_proj" else sizes
            has_bias = names.biases and role != "down_proj"
            self.register_module(name, nn.Linear(inputs, outputs, bias=has_bias))
        if names.biases:
            self.register_parameter(DOWN_BIAS, nn.Parameter(torch.zeros(spec.hidden_size)))


Function = Callable[[Tensor], Tensor]


def _activations(own: Any, spec: ModelSpec) -> tuple[Function, Function | None]:
    """Returns what the products of gate and of up go through, by transformers' `own` block; None: nothing."""
    if spec.hidden_act != "swiglu_oai":
        return own.experts.act_fn, None
    limit = spec.activation_threshold

    def of_gate(x: Tensor) -> Tensor:
        clamped = x.clamp(max=limit)
        return clamped * torch.sigmoid(SWIGLU_ALPHA * clamped)

    return of_gate, lambda x: x.clamp(-limit, limit) + 1


class Block(nn.Module):
    """A layer's router and experts."""

    def __init__(self, names: Names, own: Any, spec: ModelSpec) -> None:
        """Takes the activation and the shared expert of transformers' `own` block."""
        super().__init__()
        self._names, self._spec = names, spec
        self.act, self.act_up = _activations(own, spec)
        gate = Gate(spec.hidden_size, spec.num_experts, bias=names.biases)
        if names.correction:
            gate.register_parameter(names.correction, nn.Parameter(torch.zeros(spec.num_experts)))
        self.register_module(names.router, gate)
        for name in filter(None, (names.shared, names.shared_gate)):
            self.register_module(name, own.get_submodule(name))
        self.experts = nn.ModuleList(Expert(names, spec) for _ in range(spec.num_experts))
        # modules that change nothing: hooks on them see the signals
        self.scored, self.given, self.activated, self.up, self.inner = (nn.Identity() for _ in range(5))

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., N] -> [..., N]."""
        x_TN = hidden.reshape(-1, hidden.shape[-1])
        used_TE, weights_TE = self._routed(x_TN)
        uses = [used_E.nonzero()[:, 0] for used_E in used_TE.T]
        given_TEN = self._seen(self.given, used_TE[..., None] * x_TN[:, None])
        gate_TEF, up_TEF = (self._first(given_TEN, uses, role) for role in ("gate_proj", "up_proj"))
        if self.act_up is not None:  # of 0 it may make another number
            up_TEF = self.act_up(up_TEF) * used_TE[..., None]
        inner_TEF = self._seen(self.activated, self.act(gate_TEF)) * self._seen(self.up, up_TEF)
        inner_TEF = self._seen(self.inner, inner_TEF * weights_TE[..., None])
        y_TN = torch.zeros_like(x_TN)
        for number, (tokens, down) in enumerate(zip(uses, self._all("down_proj"), strict=True)):
            y_TN.index_add_(0, tokens, down(inner_TEF[tokens, number]))
            if self._names.biases:
                bias_N = self.experts[number].get_parameter(DOWN_BIAS)
                y_TN.index_add_(0, tokens, weights_TE[tokens, number, None] * bias_N)
        if self._names.shared:
            y_TN = y_TN + self._shared(x_TN)
        return y_TN.reshape(hidden.shape)

    def _shared(self, x_TN: Tensor) -> Tensor:
        """Returns what the expert that every token uses adds, [T, N]."""
        assert self._names.shared is not None
        y_TN = self.get_submodule(self._names.shared)(x_TN)
        gate = self._names.shared_gate
        return y_TN if gate is None else y_TN * self.get_submodule(gate)(x_TN).sigmoid()

    def _routed(self, x_TN: Tensor) -> tuple[Tensor, Tensor]:
        """Returns 1 for each token's experts, 0 for the others, and the experts' weights, both [T, E]."""
        gate: Any = self.get_submodule(self._names.router)
        correction = None
        if self._names.correction:
            correction = gate.get_parameter(self._names.correction).detach().float().cpu().numpy()
        router, logits_TE = Router(self._spec, correction), gate(x_TN).detach().cpu().numpy()
        scores_TE = self.scored(torch.from_numpy(router.scores(logits_TE)))
        chosen_TE = router.choose(scores_TE.numpy())
        found = chosen_TE, router.weights(logits_TE, chosen_TE)
        used_TE, weights_TE = (torch.from_numpy(part).to(x_TN.device, x_TN.dtype) for part in found)
        return used_TE, weights_TE

    def _first(self, given_TEN: Tensor, uses: list[Tensor], role: MatrixRole) -> Tensor:
        """Returns each expert's products with the tokens that use it, [T, E, F]; 0 for the others."""
        matrices: list[Any] = self._all(role)  # wider than the model's own where each unit stands twice (in_planes.py)
        y_TEF = given_TEN.new_zeros(*given_TEN.shape[:2], len(matrices[0].weight))
        for number, (tokens, matrix) in enumerate(zip(uses, matrices, strict=True)):
            y_TEF[tokens, number] = matrix(given_TEN[tokens, number])
        return y_TEF

    def _all(self, role: MatrixRole) -> list[nn.Module]:
        """Returns each expert's matrix with a role."""
        return [expert.get_submodule(self._names.matrices[role]) for expert in self.experts]

    def _seen(self, signal: nn.Module, values_TEI: Tensor) -> Tensor:
        return signal(values_TEI.flatten(1)).unflatten(1, (values_TEI.shape[1], -1))
