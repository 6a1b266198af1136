"""Reads and replaces the signals of a layer inside transformers' own modules.

The architecture says which module a signal passes (compiler/architectures: `MODULES.taps`); the caller says what to do
with it. A layer has only the signals that its architecture names; asking for another is an error.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from coldpress.compiler.architectures._common import Modules, Tap
from coldpress.schemas.errors import ColdpressError
from coldpress.schemas.families import Signal

if TYPE_CHECKING:
    from torch import Tensor, nn

Change = Callable[["Tensor"], "Tensor | None"]
"""Receives a signal [..., n] and may return its replacement."""


def attach(layer: "nn.Module", modules: Modules, signal: Signal, change: Change) -> None:
    """Calls `change` with a signal whenever `layer` runs; raises ColdpressError if the layer lacks it."""
    tap = modules.taps.get(signal)
    if tap is None:
        raise ColdpressError(
            f"layers of {modules.prefix} have no signal {signal}, expected one of {', '.join(modules.taps)}; "
            "choose a method for another family"
        )
    module = layer.get_submodule(tap.path)

    def after(_module: Any, _inputs: Any, output: "Tensor") -> "Tensor | None":
        return _changed(tap, change, output)

    def before(_module: Any, inputs: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Attention receives its input by name, other modules by position."""
        found = _changed(tap, change, inputs[0] if inputs else named["hidden_states"])
        if found is None:
            return inputs, named
        return ((found, *inputs[1:]), named) if inputs else (inputs, {**named, "hidden_states": found})

    if tap.side == "output":
        module.register_forward_hook(after)
    else:
        module.register_forward_pre_hook(before, with_kwargs=True)


def _changed(tap: Tap, change: Change, whole: "Tensor") -> "Tensor | None":
    if tap.num_parts == 1:
        return change(whole)
    import torch

    parts = list(whole.chunk(tap.num_parts, dim=-1))
    found = change(parts[tap.part])
    if found is None:
        return None
    parts[tap.part] = found
    return torch.cat(parts, dim=-1)
