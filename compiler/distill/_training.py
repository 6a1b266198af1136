"""Self-distillation of a sparse model from its dense self (ActiveFlow 5): KL loss, straight-through masks, AdamW.

Whole models in float32, hence small ones. Blocks of tokens are what threads share: each one's gradient is computed on
one core, and gradients add up in the order of blocks, so the number of threads changes no bit of the result.
"""

import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from compiler.activity import taps
from compiler.architectures._common import Modules
from schemas.families import Signal

EVALUATIONS = 4
MAX_GRADIENT = 1.0


@dataclass(frozen=True)
class Mask:
    """Where a layer is sparse, and what a token keeps there."""

    layer: int
    signal: Signal
    kept: Callable[[np.ndarray], np.ndarray]
    """Which entries of float32 [num_tokens, n] are kept, bool alike: the build's selector."""


@dataclass(frozen=True)
class Schedule:
    """How long and how fast to train."""

    steps: int
    blocks_per_step: int
    learning_rate: float
    seed: int
    threads: int


def masked(values: Tensor, kept: Callable[[np.ndarray], np.ndarray]) -> Tensor:
    """`values` [..., n] with what is not kept set to 0 (Eq. 11); gradients pass unmasked.

    The backward pass is that of the identity (Eq. 12), so that what is masked now can still learn to matter.
    """
    with torch.no_grad():
        mask = torch.from_numpy(kept(values.reshape(-1, values.shape[-1]).numpy())).reshape(values.shape)
        removed = torch.where(mask, 0.0, -values)
    return values + removed


def attach(model: nn.Module, modules: Modules, masks: tuple[Mask, ...]) -> None:
    """Masks signals of the layers from now on."""

    def change(kept: Callable[[np.ndarray], np.ndarray]) -> taps.Change:
        return lambda values: masked(values, kept)

    for mask in masks:
        layer = model.get_submodule(f"{modules.base}.layers.{mask.layer}")
        taps.attach(layer, modules, [(mask.signal, change(mask.kept))])


def divergence(teacher: nn.Module, student: nn.Module, block: Tensor) -> Tensor:
    """Mean KL(P_T || P_S) over the tokens of one block, in nats (Eq. 10); `block` is int64 [num_tokens]."""
    with torch.no_grad():
        wanted = torch.log_softmax(_logits(teacher, block), dim=-1)
    found = torch.log_softmax(_logits(student, block), dim=-1)
    return (wanted.exp() * (wanted - found)).sum(dim=-1).mean()


def _logits(model: nn.Module, block: Tensor) -> Tensor:
    return model(input_ids=block[None], use_cache=False).logits[0]


def distill(
    teacher: nn.Module, student: nn.Module, training: np.ndarray, validation: np.ndarray, schedule: Schedule
) -> tuple[float, float]:
    """Trains `student` in place; it ends with the weights of the evaluation that was best, the start included.

    Args:
        teacher: The dense model.
        student: The same model with masks attached.
        training: int token ids [num_blocks, block_tokens].
        validation: Other blocks, which decide what is kept.
        schedule: Steps, rate and threads.

    Returns:
        KL on `validation` in nats per token, before and after.
    """
    parameters = [parameter for parameter in student.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=schedule.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    order = np.random.default_rng(schedule.seed)
    with _workers(schedule.threads) as run_all:

        def evaluate() -> float:
            def one(block: Tensor) -> float:
                with torch.no_grad():
                    return divergence(teacher, student, block).item()

            return math.fsum(run_all(one, _blocks(validation))) / len(validation)

        before = lowest = evaluate()
        best = [parameter.detach().clone() for parameter in parameters]
        for step in range(schedule.steps):
            chosen = order.choice(len(training), min(schedule.blocks_per_step, len(training)), replace=False)
            _set_gradients(teacher, student, parameters, run_all, _blocks(training[chosen]))
            nn.utils.clip_grad_norm_(parameters, MAX_GRADIENT, foreach=False)
            progress = step / schedule.steps
            optimizer.param_groups[0]["lr"] = schedule.learning_rate * 0.5 * (1 + math.cos(math.pi * progress))
            optimizer.step()
            if (step + 1) % math.ceil(schedule.steps / EVALUATIONS) == 0 or step + 1 == schedule.steps:
                found = evaluate()
                if found < lowest:
                    lowest, best = found, [parameter.detach().clone() for parameter in parameters]
    with torch.no_grad():
        for parameter, values in zip(parameters, best, strict=True):
            parameter.copy_(values)
    return before, lowest


def _blocks(tokens: np.ndarray) -> list[Tensor]:
    return [torch.tensor(block, dtype=torch.int64) for block in tokens]


def _set_gradients(
    teacher: nn.Module,
    student: nn.Module,
    parameters: list[nn.Parameter],
    run_all: Callable[..., Iterator[Any]],
    blocks: list[Tensor],
) -> None:
    """Mean gradient over `blocks`, added up in their order."""

    def one(block: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(divergence(teacher, student, block), parameters)

    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    for gradients in run_all(one, blocks):
        for parameter, gradient in zip(parameters, gradients, strict=True):
            assert parameter.grad is not None
            parameter.grad.add_(gradient, alpha=1 / len(blocks))


@contextmanager
def _workers(threads: int) -> Iterator[Callable[..., Iterator[Any]]]:
    """An ordered parallel map whose workers, and the caller, use one core each."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            yield pool.map
    finally:
        torch.set_num_threads(before)
