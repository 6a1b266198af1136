"""A mixture of experts as a module whose signals can be seen: Mixtral's block, its experts one matrix at a time.

transformers keeps all experts' matrices in one tensor and shows nothing of what is between them. Here a signal has an
entry for every unit of every expert, unit i of expert e at e * intermediate_size + i (design, section 1), and is zero
for the experts that a token does not use; so has each expert's input. What an expert gives is weighed by the softmax of
the chosen logits (Jiang et al. 2024, section 2.1), and since it is a sum over units, so are they: what a unit adds is
what its signal says. Shape letters: T tokens, N hidden_size, E experts, F intermediate_size, K experts per token, I
entries of a signal.
"""

import functools
from typing import TYPE_CHECKING, Any

from coldpress.compiler.architectures import _common
from coldpress.schemas.families import Signal

if TYPE_CHECKING:
    from torch import Tensor, nn

BLOCK = "block_sparse_moe"
"""Where a layer of the checkpoint has its experts."""
TAPS: dict[Signal, _common.Tap] = {
    "attention_input": _common.Tap("self_attn"),
    "attention_mixed": _common.Tap("self_attn.o_proj"),
    "router_logits": _common.Tap(f"{BLOCK}.gate", "output"),
    "mlp_input": _common.Tap(BLOCK),
    "expert_inputs": _common.Tap(f"{BLOCK}.given"),
    "mlp_activation": _common.Tap(f"{BLOCK}.activated"),
    "mlp_up": _common.Tap(f"{BLOCK}.up"),
    "mlp_inner": _common.Tap(f"{BLOCK}.inner"),
}


def adapt(layer: Any) -> None:
    """Puts such a block in the place of transformers' own, under the name that checkpoints have."""
    own = layer.mlp
    sizes = (own.experts.hidden_dim, own.experts.intermediate_dim, own.experts.num_experts, own.top_k)
    layer.register_module(BLOCK, _block_class()(*sizes, own.experts.act_fn))
    del layer.mlp
    layer.mlp = layer.get_submodule(BLOCK).__call__  # what transformers calls


@functools.cache
def _block_class() -> "type[nn.Module]":
    import torch

    class Expert(torch.nn.Module):
        """Gate w1, down w2 and up w3."""

        def __init__(self, hidden_size: int, intermediate_size: int) -> None:
            super().__init__()
            self.w1 = torch.nn.Linear(hidden_size, intermediate_size, bias=False)
            self.w2 = torch.nn.Linear(intermediate_size, hidden_size, bias=False)
            self.w3 = torch.nn.Linear(hidden_size, intermediate_size, bias=False)

    class Block(torch.nn.Module):
        def __init__(self, hidden_size: int, intermediate_size: int, num_experts: int, top_k: int, act: Any) -> None:
            super().__init__()
            self.gate = torch.nn.Linear(hidden_size, num_experts, bias=False)
            self.experts = torch.nn.ModuleList(Expert(hidden_size, intermediate_size) for _ in range(num_experts))
            self.act, self.top_k, self.width = act, top_k, intermediate_size
            # signals pass by here
            self.given, self.activated, self.up, self.inner = (torch.nn.Identity() for _ in range(4))

        def forward(self, hidden: "Tensor") -> "Tensor":
            """[..., N] -> the same."""
            x_TN = hidden.reshape(-1, hidden.shape[-1])
            top_TK, chosen_TK = self.gate(x_TN).float().topk(self.top_k, dim=-1)
            uses = [(chosen_TK == expert).any(dim=1).nonzero()[:, 0] for expert in range(len(self.experts))]
            weights_TE = torch.zeros(len(x_TN), len(uses), dtype=x_TN.dtype)
            weights_TE = weights_TE.to(x_TN.device).scatter(1, chosen_TK, top_TK.softmax(dim=-1).to(x_TN.dtype))
            used_TE = torch.zeros_like(weights_TE).scatter(1, chosen_TK, 1)
            given_TEN = self._seen(self.given, used_TE[..., None] * x_TN[:, None])
            gate_TEF, up_TEF = (self._first(given_TEN, uses, name) for name in ("w1", "w3"))
            inner_TEF = self._seen(self.activated, self.act(gate_TEF)) * self._seen(self.up, up_TEF)
            inner_TEF = self._seen(self.inner, inner_TEF * weights_TE[..., None])
            y_TN = torch.zeros_like(x_TN)
            for number, (tokens, expert) in enumerate(zip(uses, self.experts, strict=True)):
                y_TN.index_add_(0, tokens, expert.get_submodule("w2")(inner_TEF[tokens, number]))
            return y_TN.reshape(hidden.shape)

        def _first(self, given_TEN: "Tensor", uses: "list[Tensor]", name: str) -> "Tensor":
            """Each expert's products with the tokens that use it, [T, E, F]; 0 for the others."""
            matrices = [expert.get_submodule(name) for expert in self.experts]
            y_TEF = given_TEN.new_zeros(*given_TEN.shape[:2], self.width)
            for number, (tokens, matrix) in enumerate(zip(uses, matrices, strict=True)):
                y_TEF[tokens, number] = matrix(given_TEN[tokens, number])
            return y_TEF

        def _seen(self, signal: "nn.Module", values_TEI: "Tensor") -> "Tensor":
            return signal(values_TEI.flatten(1)).view_as(values_TEI)

    return Block
