"""Adapters of low rank that train while the weights keep their stored dtype (Hu et al. 2021): W + A B replaces W.

There is one copy of the weights, in its stored dtype. With the adapters off the model is its own teacher, and the
backward pass recomputes each layer. So training a model of 7 billion parameters fits into 24 GB. At the end the
adapters are fused into the weights.
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
"""Bytes per parameter of an adapter: itself, its gradient, Adam's two moments and the best values so far."""
STATE_BYTES_PER_PARAMETER = 4 * 4


def num_parameters(size: Size, roles: Iterable[str], rank: int) -> int:
    """Returns rank * (inputs + outputs), summed over the matrices of `roles` in all layers."""
    return size.spec.num_hidden_layers * rank * sum(sum(size.shapes[f"layers.0.{role}.weight"]) for role in roles)


def ram_bytes(size: Size, roles: Iterable[str], rank: int, kept_bytes: int = 0) -> int:
    """Returns the memory of weights, adapters with a gradient for each running block, the blocks, and `kept_bytes`."""
    adapters = (BYTES_PER_PARAMETER + 4 * size.threads) * num_parameters(size, roles, rank)
    running = max(size.threads * size.running_bytes(widened=True), size.writing_bytes)
    return size.weight_bytes + adapters + kept_bytes + running


def state_bytes(size: Size, roles: Iterable[str], rank: int) -> int:
    return STATE_BYTES_PER_PARAMETER * num_parameters(size, roles, rank)


@dataclass(frozen=True)
class Adapters:
    source: "Source"
    model: "nn.Module"
    """The whole model; only its adapters train."""
    adapted: "dict[str, Linear]"
    """Modules with adapters, by the name of the matrix without `.weight`."""
    parameters: "list[nn.Parameter]"
    """float32, whatever the dtype of the weights."""

    @staticmethod
    def of(source: "Source", device: str, roles: Iterable[str], rank: int, alpha: int, seed: int) -> "Adapters":
        """Builds the model on `device`, with adapters that add nothing yet on the matrices that hold `roles`, such as
        `up_proj`; a matrix that holds several has one adapter. What adapters add is multiplied by alpha / rank."""
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
        for part in self.adapted.values():
            part.enable_adapters(on)

    def weight(self, name: str) -> "Tensor":
        """Returns a tensor with its adapter fused, float32; without an adapter, as it is stored."""
        kept = self.source.tensor(self.source.names[name])
        part = self.adapted.get(name.removesuffix(".weight")) if name.endswith(".weight") else None
        return kept if part is None else kept.float() + part.get_delta_weight(ADAPTER).detach().cpu()

    def at_share(self, trained: "Sequence[Tensor]", share: float) -> None:
        """Scales what the adapters add with the values `trained` of `parameters` by `share`."""
        import torch

        # the product A B is linear in B, so scaling B alone scales what an adapter adds
        grown = {id(part.lora_B[ADAPTER].weight) for part in self.adapted.values()}
        with torch.no_grad():
            for parameter, values in zip(self.parameters, trained, strict=True):
                parameter.copy_(share * values if id(parameter) in grown else values)
