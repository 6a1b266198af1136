"""lora: adapters of low rank on the matrices that are pruned learn what sparsity costs (DIP 4, Eq. 9; Hu et al. 2021).

W + A B takes W's place before inputs are selected, so a token reads as many columns as without, and the adapters are
fused into the weights at the end. The teacher is the same model with adapters and masks off: there is one copy of the
weights, in the dtype that they are stored in, and the backward pass runs each layer again. That is what fits a model of
7 billion parameters into 24 GB. With `rounded=true` the student runs with the fused matrices as the build's format will
hold them, and gradients pass straight through that.
"""

from typing import TYPE_CHECKING

from pydantic import Field

from compiler.training.memory import Size
from schemas.base import PositiveCount, Record
from schemas.families import slices

if TYPE_CHECKING:
    from collections.abc import Sequence

    from peft.tuners.lora import Linear
    from torch import Tensor, nn

    from compiler.distill._task import Task
    from compiler.training.lesson import Lesson

BYTES_PER_PARAMETER = 4 * (1 + 1 + 2 + 1)
"""Of an adapter: itself, its gradient, Adam's two moments and the best so far."""
STATE_BYTES_PER_PARAMETER = 4 * 4
ADAPTER = "distill"


class Options(Record):
    """The adapters."""

    lora_rank: PositiveCount = Field(default=32, description="rank of the adapters (DIP: 32)")
    lora_alpha: PositiveCount = Field(
        default=64, description="what adapters add is multiplied by lora_alpha / lora_rank"
    )
    rounded: bool = Field(
        default=False, description="true or false: whether the student runs with weights in the build's format"
    )


def ram_bytes(size: Size, options: Options) -> int:
    """Bytes of memory: the weights as stored, the adapters with a gradient for each block that runs, and the blocks."""
    adapters = _num_adapter_parameters(size, options)
    copies = size.weight_bytes + (BYTES_PER_PARAMETER + 4 * size.threads) * adapters + size.code_bytes * options.rounded
    return copies + max(size.threads * size.running_bytes(widened=True), size.writing_bytes)


def state_bytes(size: Size, options: Options) -> int:
    """Bytes of one state that training goes on from."""
    return STATE_BYTES_PER_PARAMETER * _num_adapter_parameters(size, options)


def _num_adapter_parameters(size: Size, options: Options) -> int:
    """rank * (inputs + outputs) of each matrix that is pruned."""
    shapes = [size.shape_of(piece.role) for family in size.families for piece in slices(family, size.spec)]
    return size.spec.num_hidden_layers * options.lora_rank * sum(rows + columns for rows, columns in shapes)


def prepare(task: "Task", options: Options) -> "Lesson":
    """One model with adapters and masks that can be turned off."""
    import torch

    from compiler.distill._masks import attach
    from compiler.distill._rounded_adapters import RoundedAdapters
    from compiler.distill._rounding import stored_matrices
    from compiler.training.lesson import Lesson, Switch, as_it_is
    from compiler.training.source import recompute_layers

    source = task.source
    model = source.build(task.device, stored=True)
    adapted = _adapt(model, task, options)
    parameters = _adapters(model)
    running = as_it_is
    if options.rounded:
        running = RoundedAdapters.of(model, stored_matrices(source, task.sparsity), ADAPTER).applied
    recompute_layers(model, source.modules)
    switch = Switch()
    attach(model, source.modules, task.masks, switch)

    def teach(begins: bool) -> None:
        switch.on = not begins
        for part in adapted.values():
            part.enable_adapters(not begins)

    def weight(name: str) -> "Tensor":
        kept = source.tensor(source.names[name])
        part = adapted.get(name.removesuffix(".weight")) if name.endswith(".weight") else None
        return kept if part is None else kept.float() + part.get_delta_weight(ADAPTER).detach().cpu()

    def at_share(trained: "Sequence[Tensor]", share: float) -> None:
        grown = {id(part.lora_B[ADAPTER].weight) for part in adapted.values()}
        with torch.no_grad():
            for parameter, values in zip(parameters, trained, strict=True):
                parameter.copy_(share * values if id(parameter) in grown else values)

    return Lesson(
        teacher=model,
        student=model,
        parameters=parameters,
        weight=weight,
        teach=teach,
        running=running,
        masks=switch,
        at_share=at_share,
    )


def _adapt(model: "nn.Module", task: "Task", options: Options) -> "dict[str, Linear]":
    """Puts adapters on the matrices that are pruned; gives them by name."""
    import torch
    from peft import LoraConfig, inject_adapter_in_model
    from peft.tuners.lora import Linear

    source = task.source
    roles = {piece.role for family in task.sparsity.families for piece in slices(family, source.model.spec)}
    targets = [name.removesuffix(".weight") for name in source.matrices(frozenset(roles))]
    config = LoraConfig(r=options.lora_rank, lora_alpha=options.lora_alpha, target_modules=targets, bias="none")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(task.seed)
        inject_adapter_in_model(config, model, adapter_name=ADAPTER)
    adapted = {name: part for name, part in model.named_modules() if isinstance(part, Linear)}
    if adapted.keys() != set(targets):
        raise AssertionError(f"{len(adapted)} of {len(targets)} matrices have adapters")
    return adapted


def _adapters(model: "nn.Module") -> "list[nn.Parameter]":
    """The adapters, in float32 whatever the weights are in."""
    found = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in found:
        parameter.data = parameter.data.float()
    return found
