"""Runs a student with its adapters fused and rounded as the build will store them, while only the adapters train.

A student whose base keeps its stored dtype runs with decode(encode(W + A B)) in place of W + A B. Codes are made once
for all blocks of a step and decoded at each use, so the extra memory is the codes of all layers. Gradients
pass straight through: with own(x) = x A B,

    y = x decode(codes) + own(x') - own(x''),    x' = x without gradient, x'' and own without gradient

has the value of the first term, sends the first term's gradient to x, and the gradient of x A B to A and B.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from peft.tuners.lora import Linear
from torch import Tensor, nn

from coldpress.compiler.stages.distill._rounding import Stored

Codes = list[np.ndarray]


@dataclass
class RoundedAdapters:
    """The matrices of a student's layers as a format stores them, adapters included."""

    adapter: str
    matrices: dict[str, tuple[nn.Module, Stored]]
    """By name: a module, and the way the build stores its matrix."""
    codes: dict[str, Codes] = field(default_factory=dict)
    """Codes of matrices without adapters, always; of the others only inside `applied`."""
    on: bool = False

    @staticmethod
    def of(student: nn.Module, stored: dict[str, Stored], adapter: str) -> "RoundedAdapters":
        matrices = {name: (student.get_submodule(name.removesuffix(".weight")), how) for name, how in stored.items()}
        found = RoundedAdapters(adapter, matrices)
        for name, (module, how) in matrices.items():
            if not isinstance(module, Linear):
                found.codes[name] = how.encode(_base(module).weight.float())
            setattr(module, "forward", found._forward(name, module, module.forward))  # noqa: B010
        return found

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Runs the student with weights decoded from codes; those of adapted matrices are made once, at first."""
        adapted = {name: module for name, (module, _) in self.matrices.items() if isinstance(module, Linear)}
        try:
            with torch.no_grad():
                for name, module in adapted.items():
                    fused = _base(module).weight.float() + module.get_delta_weight(self.adapter)
                    self.codes[name] = self.matrices[name][1].encode(fused)
            self.on = True
            yield
        finally:
            self.on = False
            for name in adapted:
                self.codes.pop(name, None)

    def _forward(self, name: str, module: nn.Module, exact: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        how, base = self.matrices[name][1], _base(module)

        def forward(x: Tensor) -> Tensor:
            if not self.on:
                return exact(x)
            weight = how.decode(self.codes[name], x.shape[-1], x.device).to(x.dtype)
            out = nn.functional.linear(x, weight, base.bias)
            if not isinstance(module, Linear):
                return out
            down, up = module.lora_A[self.adapter], module.lora_B[self.adapter]
            own = up(down(x.detach())) * module.scaling[self.adapter]
            return out + (own - own.detach())

        return forward


def _base(module: nn.Module) -> Any:
    """Returns a module with a matrix in its stored dtype: that under adapters, if it has some."""
    return module.get_base_layer() if isinstance(module, Linear) else module
