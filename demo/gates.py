"""Decides how hard training pushes the gates of the demo model to exact zero.

Reads relu(gate) of every layer through forward hooks on the model's own activation
modules. Returns a penalty to add to the loss, and the share of exact zeros per layer.
The penalty's strength is steered per layer towards a wanted share of zeros, so the
recipe need not guess one constant that suits all layers.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

import torch
from torch import Tensor, nn

STRENGTH_RANGE = (-0.2, 0.5)
# Strength per unit of missing zeros: at once, and added up at every measurement.
GAIN_AT_ONCE = 0.3
GAIN_ADDED_UP = 0.02


class GatePenalty:
    """An L1 penalty on relu(gate), divided by the gates' own scale.

    Without the division the cheapest way to please an L1 penalty is to shrink the gate
    weights and grow the others, which yields small values and no zeros. Where a layer has
    more zeros than wanted the sign turns, and the gates are pushed up before the ReLU, so
    that neurons which never fire feel it too.
    """

    def __init__(self, model: nn.Module, wanted_zeros: float, measure_every: int = 10) -> None:
        self.wanted_zeros = wanted_zeros
        self.measure_every = measure_every
        layers = list(model.model.layers)
        self.strengths = [0.0] * len(layers)
        self.added_up = [0.0] * len(layers)
        self.scales = [1.0] * len(layers)
        self.terms: list[Tensor] = []
        self.steps = 0
        for index, layer in enumerate(layers):
            layer.mlp.act_fn.register_forward_hook(self._hook(index))

    def _hook(self, index: int) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            if not module.training:
                return
            if self.steps % self.measure_every == 0:
                self._measure(index, inputs[0].detach())
            pushed = output if self.strengths[index] >= 0 else inputs[0]
            mean = pushed.mean(dtype=torch.float32)
            self.terms.append(mean * (self.strengths[index] / self.scales[index]))

        return hook

    def _measure(self, index: int, gate: Tensor) -> None:
        self.scales[index] = max(float(gate.float().square().mean().sqrt()), 1e-6)
        missing = self.wanted_zeros - float((gate <= 0).float().mean())
        low, high = STRENGTH_RANGE
        self.added_up[index] = min(max(self.added_up[index] + GAIN_ADDED_UP * missing, low), high)
        strength = self.added_up[index] + GAIN_AT_ONCE * missing
        self.strengths[index] = min(max(strength, low), high)

    def collect(self) -> Tensor:
        """The penalty of the forward pass just made; call it once per step."""
        self.steps += 1
        total = torch.stack(self.terms).sum()
        self.terms.clear()
        return total


class ZeroCounter:
    """Counts exact zeros of relu(gate) per layer while it is entered."""

    def __init__(self, model: nn.Module) -> None:
        self.layers = list(model.model.layers)
        self.zeros = [0] * len(self.layers)
        self.values = [0] * len(self.layers)

    def __enter__(self) -> ZeroCounter:
        self.handles = [
            layer.mlp.act_fn.register_forward_hook(self._hook(index)) for index, layer in enumerate(self.layers)
        ]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for handle in self.handles:
            handle.remove()

    def _hook(self, index: int) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            self.zeros[index] += int((output == 0).sum())
            self.values[index] += output.numel()

        return hook

    def shares(self) -> list[float]:
        """Share of exact zeros, by layer."""
        return [zeros / max(values, 1) for zeros, values in zip(self.zeros, self.values, strict=True)]
