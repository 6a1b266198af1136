"""A mixture of experts as a module whose signals hooks can see: its experts one matrix at a time.

A signal has one entry for every unit of every expert, unit i of expert e at e * intermediate_size + i (design, section
1). It is zero for the experts that a token does not use; so is each expert's input. The runtime's own router chooses
and weighs the experts (runtime/routers). The output is a sum over units, so an expert's weight goes to each
unit: its signal then says what it adds. Shape letters: T tokens, N hidden_size, E experts, F intermediate_size, I
entries of a signal.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from coldpress.compiler.architectures._experts import DOWN_BIAS, Names
from coldpress.runtime.arithmetic import SWIGLU_ALPHA
from coldpress.runtime.routers import router_of
from coldpress.schemas.model import MatrixRole, ModelSpec


class Gate(nn.Linear):
    """The router's matrix. Logits are always float32, since a token's experts follow from their order."""

    def forward(self, input: Tensor) -> Tensor:
        """[T, N] -> float32 [T, E]."""
        bias = None if self.bias is None else self.bias.float()
        return torch.nn.functional.linear(input.float(), self.weight.float(), bias)


class Expert(nn.Module):
    """Gate, up and down; down has the bias that its caller weights and adds."""

    def __init__(self, names: Names, spec: ModelSpec) -> None:
        super().__init__()
        for role, name in names.matrices.items():
            sizes = spec.hidden_size, spec.intermediate_size
            inputs, outputs = reversed(sizes) if role == "down_proj" else sizes
            has_bias = names.biases and role != "down_proj"
            matrix = nn.Linear(inputs, outputs, bias=has_bias)
            if names.biases and role == "down_proj":
                matrix.register_parameter(DOWN_BIAS, nn.Parameter(torch.zeros(spec.hidden_size)))
            self.register_module(name, matrix)


Lend = Callable[[Sequence[int], Sequence[str]], Iterator[tuple[int, Sequence[nn.Module]]]]
"""Yields (number, matrices of these names) of these experts; they may be gone when the next one is asked for."""

Tokens = dict[int, Tensor]
"""Expert -> the tokens of the block that use it, int64 [n]; without those that no token uses."""
Values = dict[int, Tensor]
"""Expert -> a row for each of those tokens, [n, I / E]."""
Function = Callable[[Tensor], Tensor]


def _activations(own: Any, spec: ModelSpec) -> tuple[Function, Function | None]:
    if spec.hidden_act != "swiglu_oai":
        return own.experts.act_fn, None
    limit = spec.activation_threshold

    def of_gate(x: Tensor) -> Tensor:
        clamped = x.clamp(max=limit)
        return clamped * torch.sigmoid(SWIGLU_ALPHA * clamped)

    return of_gate, lambda x: x.clamp(-limit, limit) + 1


class Block(nn.Module):
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
        self.lend: Lend | None = None
        """Source of experts; None: the block itself, which then holds all of them."""
        self.is_seen: Callable[[str], bool] = lambda _name: True
        """Returns whether anyone looks at a signal, by its module; one that nobody sees is not written out."""
        # modules that change nothing: hooks on them see the signals
        self.scored, self.given, self.activated, self.up, self.inner = (nn.Identity() for _ in range(5))

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., N] -> [..., N]."""
        x_TN = hidden.reshape(-1, hidden.shape[-1])
        used_TE, weights_TE = self._routed(x_TN)
        tokens = {e: at for e, used_T in enumerate(used_TE.T) if len(at := used_T.nonzero()[:, 0])}
        given = self._seen("given", tokens, {e: x_TN[at] for e, at in tokens.items()}, len(x_TN))
        gate, up = self._first(given)
        activated = self._seen("activated", tokens, {e: self.act(part) for e, part in gate.items()}, len(x_TN))
        up = self._seen("up", tokens, up if self.act_up is None else {e: self.act_up(up[e]) for e in up}, len(x_TN))
        inner = {e: activated[e] * up[e] * weights_TE[at, e, None] for e, at in tokens.items()}
        y_TN = self._last(tokens, self._seen("inner", tokens, inner, len(x_TN)), torch.zeros_like(x_TN), weights_TE)
        if self._names.shared:
            y_TN = y_TN + self._shared(x_TN)
        return y_TN.reshape(hidden.shape)

    def _first(self, given: Values) -> tuple[Values, Values]:
        gate, up = Values(), Values()
        for expert, lent in (self.lend or self._own)(list(given), self._names_of("gate_proj", "up_proj")):
            gate[expert], up[expert] = lent[0](given[expert]), lent[1](given[expert])
        return gate, up

    def _last(self, tokens: Tokens, inner: Values, y_TN: Tensor, weights_TE: Tensor) -> Tensor:
        for expert, lent in (self.lend or self._own)(list(tokens), self._names_of("down_proj")):
            at = tokens[expert]
            y_TN.index_add_(0, at, lent[0](inner[expert]))
            if self._names.biases:
                y_TN.index_add_(0, at, weights_TE[at, expert, None] * lent[0].get_parameter(DOWN_BIAS))
        return y_TN

    def _names_of(self, *roles: MatrixRole) -> list[str]:
        return [self._names.matrices[role] for role in roles]

    def _own(self, used: Sequence[int], names: Sequence[str]) -> Iterator[tuple[int, Sequence[nn.Module]]]:
        for expert in used:
            yield expert, [self.experts[expert].get_submodule(name) for name in names]

    def _shared(self, x_TN: Tensor) -> Tensor:
        """[T, N] -> the output of the expert that every token uses, [T, N]."""
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
        router, logits_TE = router_of(self._spec, correction), gate(x_TN).detach().cpu().numpy()
        scores_TE = self.scored(torch.from_numpy(router.scores(logits_TE)))
        chosen_TE = router.choose(scores_TE.numpy())
        found = chosen_TE, router.weights(logits_TE, chosen_TE)
        used_TE, weights_TE = (torch.from_numpy(part).to(x_TN.device, x_TN.dtype) for part in found)
        return used_TE, weights_TE

    def _seen(self, signal: str, tokens: Tokens, values: Values, num_tokens: int) -> Values:
        """Shows a signal of all experts, [T, I], 0 where a token does not use them; returns what hooks make of it."""
        if not self.is_seen(signal) or not values:
            return values
        some = next(iter(values.values()))
        whole_TEI = some.new_zeros(num_tokens, self._spec.num_experts, some.shape[1])
        for expert, part in values.items():
            whole_TEI[tokens[expert], expert] = part
        found_TEI = self.get_submodule(signal)(whole_TEI.flatten(1)).unflatten(1, (*whole_TEI.shape[1:2], -1))
        return {expert: found_TEI[at, expert] for expert, at in tokens.items()}
