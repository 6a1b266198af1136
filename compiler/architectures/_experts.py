"""A mixture of experts as a module whose signals can be seen: Mixtral's block, its experts one matrix at a time.

transformers keeps all experts' matrices in one tensor and shows nothing of what is between them. Here a signal has an
entry for every unit of every expert, unit i of expert e at e * intermediate_size + i (design, section 1), and is zero
for the experts that a token does not use. What an expert gives is weighed by the softmax of the chosen logits (Jiang et
al. 2024, section 2.1). Shape letters: T tokens, N hidden_size, E experts, F intermediate_size, K experts per token.
"""

import functools
from typing import TYPE_CHECKING, Any

from compiler.architectures import _common
from schemas.families import Signal

if TYPE_CHECKING:
    from torch import Tensor, nn

BLOCK = "block_sparse_moe"
"""Where a layer of the checkpoint has its experts."""
TAPS: dict[Signal, _common.Tap] = {
    "attention_input": _common.Tap("self_attn"),
    "attention_mixed": _common.Tap("self_attn.o_proj"),
    "router_logits": _common.Tap(f"{BLOCK}.gate", "output"),
    "mlp_input": _common.Tap(BLOCK),
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
            self.activated, self.up, self.inner = (torch.nn.Identity() for _ in range(3))  # signals pass by here

        def forward(self, hidden: "Tensor") -> "Tensor":
            """[..., N] -> the same."""
            x_TN = hidden.reshape(-1, hidden.shape[-1])
            top_TK, chosen_TK = self.gate(x_TN).float().topk(self.top_k, dim=-1)
            weights_TK = top_TK.softmax(dim=-1)
            uses = [(chosen_TK == expert).nonzero(as_tuple=True) for expert in range(len(self.experts))]
            gate_TU = self._first(x_TN, uses, "w1")
            inner_TU = self.activated(self.act(gate_TU)) * self.up(self._first(x_TN, uses, "w3"))
            inner_TU = self.inner(inner_TU)
            y_TN = torch.zeros_like(x_TN)
            for (tokens, place), expert, own in zip(uses, self.experts, self._units(), strict=True):
                given = expert.get_submodule("w2")(inner_TU[tokens, own]) * weights_TK[tokens, place, None]
                y_TN.index_add_(0, tokens, given.to(y_TN.dtype))
            return y_TN.reshape(hidden.shape)

        def _first(self, x_TN: "Tensor", uses: "list[tuple[Tensor, ...]]", name: str) -> "Tensor":
            """Each expert's products with the tokens that use it, [T, E * F]; 0 for the others."""
            units = self._units()
            y_TU = x_TN.new_zeros(len(x_TN), units[-1].stop)
            for (tokens, _), expert, own in zip(uses, self.experts, units, strict=True):
                y_TU[tokens, own] = expert.get_submodule(name)(x_TN[tokens])
            return y_TU

        def _units(self) -> list[slice]:
            return [slice(start, start + self.width) for start in range(0, len(self.experts) * self.width, self.width)]

    return Block
