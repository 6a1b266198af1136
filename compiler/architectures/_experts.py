"""A mixture of experts as a module whose signals hooks can see: Mixtral's block, its experts one matrix at a time.

transformers stores all experts' matrices in one tensor and gives no access to the values between them. Here a signal
has one entry for every unit of every expert, unit i of expert e at e * intermediate_size + i (design, section 1). It is
zero for the experts that a token does not use; so is each expert's input. An expert's output is weighted by the softmax
of the chosen logits (Jiang et al. 2024, section 2.1). The output is a sum over units, so the weight goes to each unit:
its signal then says what it adds. Shape letters: T tokens, N hidden_size, E experts, F intermediate_size, K experts per
token, I entries of a signal.
"""

import functools
from typing import TYPE_CHECKING, Any

from coldpress.compiler.architectures import _common
from coldpress.schemas.families import Signal

if TYPE_CHECKING:
    from torch import Tensor, nn

BLOCK = "block_sparse_moe"
"""Path of the experts in a layer of the checkpoint."""
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
    """Replaces transformers' own block by this one, under the checkpoint's name."""
    own = layer.mlp
    sizes = (own.experts.hidden_dim, own.experts.intermediate_dim, own.experts.num_experts, own.top_k)
    layer.register_module(BLOCK, _block_class()(*sizes, own.experts.act_fn))
    del layer.mlp
    layer.mlp = layer.get_submodule(BLOCK).__call__  # transformers calls this name


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
            self.act, self.top_k = act, top_k
            # modules that change nothing: hooks on them see the signals
            self.given, self.activated, self.up, self.inner = (torch.nn.Identity() for _ in range(4))

        def forward(self, hidden: "Tensor") -> "Tensor":
            """[..., N] -> [..., N]."""
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
            """Returns each expert's products with the tokens that use it, [T, E, F]; 0 for the others."""
            matrices: list[Any] = [expert.get_submodule(name) for expert in self.experts]
            y_TEF = given_TEN.new_zeros(*given_TEN.shape[:2], matrices[0].weight.shape[0])
            for number, (tokens, matrix) in enumerate(zip(uses, matrices, strict=True)):
                y_TEF[tokens, number] = matrix(given_TEN[tokens, number])
            return y_TEF

        def _seen(self, signal: "nn.Module", values_TEI: "Tensor") -> "Tensor":
            return signal(values_TEI.flatten(1)).unflatten(1, (values_TEI.shape[1], -1))

    return Block
