"""Adapters of low rank that learn while the weights stay as they are stored (Hu et al. 2021): W + A B takes W's place.

There is one copy of the weights, in the dtype that they are stored in; with the adapters off the model is its own
teacher, and the backward pass runs each layer again. That is what fits training a model of 7 billion parameters into 24
GB. At the end the adapters are fused into the weights. Sizes come from shapes alone, without torch, since preflight
asks for them before anything long.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from coldpress.compiler.training.memory import Size

if TYPE_CHECKING:
    from peft.tuners.lora import Linear
    from torch import Tensor, nn

    from coldpress.compiler.training.source import Source

ADAPTER = "learned"
BYTES_PER_PARAMETER = 4 * (1 + 1 + 2 + 1)
"""Of an adapter: itself, its gradient, Adam's two moments and the best so far."""
STATE_BYTES_PER_PARAMETER = 4 * 4


def num_parameters(size: Size, roles: Iterable[str], rank: int) -> int:
    """rank * (inputs + outputs) of the matrices of `roles`, of all layers."""
    return size.spec.num_hidden_layers * rank * sum(sum(size.shape_of(role)) for role in roles)


def ram_bytes(size: Size, roles: Iterable[str], rank: int, kept_bytes: int = 0) -> int:
    """Bytes of memory: the weights as stored, the adapters with a gradient for each block that runs, and the blocks.

    Args:
        size: Of the model.
        roles: Of matrices that have adapters.
        rank: Of each.
        kept_bytes: What there is beside them, throughout.
    """
    adapters = (BYTES_PER_PARAMETER + 4 * size.threads) * num_parameters(size, roles, rank)
    return (
        size.weight_bytes
        + adapters
        + kept_bytes
        + max(size.threads * size.running_bytes(widened=True), size.writing_bytes)
    )


def state_bytes(size: Size, roles: Iterable[str], rank: int) -> int:
    """Bytes of one state that training goes on from."""
    return STATE_BYTES_PER_PARAMETER * num_parameters(size, roles, rank)


@dataclass(frozen=True)
class Adapters:
    """Of one model."""

    source: "Source"
    model: "nn.Module"
    """The whole model, which nothing of but the adapters moves."""
    adapted: "dict[str, Linear]"
    """By the name of the matrix, without `.weight`."""
    parameters: "list[nn.Parameter]"
    """float32, whatever the weights are in."""

    @staticmethod
    def of(source: "Source", device: str, roles: Iterable[str], rank: int, alpha: int, seed: int) -> "Adapters":
        """Builds the model on `device` with adapters, which add nothing yet, on the matrices that hold `roles`.

        Args:
            source: The checkpoint.
            device: torch's name of it.
            roles: Such as `up_proj`; a matrix that holds several has one adapter.
            rank: Of each.
            alpha: What adapters add is multiplied by alpha / rank.
            seed: Of their first values.
        """
        import torch
        from peft import LoraConfig, inject_adapter_in_model
        from peft.tuners.lora import Linear

        model = source.build(device, stored=True)
        targets = [name.removesuffix(".weight") for name in source.matrices(frozenset(roles))]
        config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=targets, bias="none")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            inject_adapter_in_model(config, model, adapter_name=ADAPTER)
        adapted = {name: part for name, part in model.named_modules() if isinstance(part, Linear)}
        if adapted.keys() != set(targets):
            raise AssertionError(f"{len(adapted)} of {len(targets)} matrices have adapters")
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        for parameter in parameters:
            parameter.data = parameter.data.float()
        return Adapters(source, model, adapted, parameters)

    def turn(self, on: bool) -> None:
        """Has the model run with what adapters add, or as it was."""
        for part in self.adapted.values():
            part.enable_adapters(on)

    def weight(self, name: str) -> "Tensor":
        """A tensor with what its adapter adds, float32; as it is stored where it has none."""
        kept = self.source.tensor(self.source.names[name])
        part = self.adapted.get(name.removesuffix(".weight")) if name.endswith(".weight") else None
        return kept if part is None else kept.float() + part.get_delta_weight(ADAPTER).detach().cpu()

    def at_share(self, trained: "Sequence[Tensor]", share: float) -> None:
        """Has the adapters add `share` of what they add with the values `trained` of `parameters`."""
        import torch

        grown = {id(part.lora_B[ADAPTER].weight) for part in self.adapted.values()}
        with torch.no_grad():
            for parameter, values in zip(self.parameters, trained, strict=True):
                parameter.copy_(share * values if id(parameter) in grown else values)
