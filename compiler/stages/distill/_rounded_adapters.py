"""Runs a student with its adapters fused and rounded as the build will store them, while only the adapters train.

A student whose base keeps its stored dtype runs with decode(encode(W + A B)) in place of W + A B. Codes are made once
for all blocks of a step and decoded at each use, so the extra memory is the codes of all layers. Gradients
pass straight through: with own(x) = x A B,

    y = x decode(codes) + own(x') - own(x''),    x' = x without gradient, x'' and own without gradient

has the value of the first term, sends the first term's gradient to x, and the gradient of x A B to A and B.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch
from peft.tuners.lora import Linear
from torch import Tensor, nn

from coldpress.compiler.stages.distill._rounding import Stored


def rounded_adapters(
    student: nn.Module, stored: Mapping[str, Stored], adapter: str
) -> Callable[[], AbstractContextManager[None]]:
    """Returns a context in which the student runs with weights decoded from codes: those of matrices without adapters
    are made here, those of the others as the context begins."""
    modules: dict[str, Any] = {name: student.get_submodule(name.removesuffix(".weight")) for name in stored}
    adapted = {name: module for name, module in modules.items() if isinstance(module, Linear)}
    fixed = {name: stored[name].encode(modules[name].weight.float()) for name in modules.keys() - adapted}
    codes: dict[str, list[np.ndarray]] = {}  # empty outside of the context

    def forward_of(name: str, module: Any, exact: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        base: Any = module.get_base_layer() if isinstance(module, Linear) else module

        def forward(x: Tensor) -> Tensor:
            if name not in codes:
                return exact(x)
            weight = stored[name].decode(codes[name], x.shape[-1], x.device).to(x.dtype)
            out = nn.functional.linear(x, weight, base.bias)
            if not isinstance(module, Linear):
                return out
            down, up = module.lora_A[adapter], module.lora_B[adapter]
            own = up(down(x.detach())) * module.scaling[adapter]
            return out + (own - own.detach())

        return forward

    for name, module in modules.items():
        module.forward = forward_of(name, module, module.forward)

    @contextmanager
    def applied() -> Iterator[None]:
        try:
            with torch.no_grad():
                for name, module in adapted.items():
                    base: Any = module.get_base_layer()
                    codes[name] = stored[name].encode(base.weight.float() + module.get_delta_weight(adapter))
            codes.update(fixed)
            yield
        finally:
            codes.clear()

    return applied
