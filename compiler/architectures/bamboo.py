"""Bamboo and TurboSparse-Mistral: Mistral with dReLU, relu(gate) * relu(up) (Song et al. 2024).

transformers has no such class. Checkpoints ship their own code, which is never loaded: a layer is Mistral's, except for
one line of the MLP. Checkpoints in which TurboSparse stores predictors beside its weights are refused, as these are
foreign tensors.
"""

import functools
from typing import TYPE_CHECKING, Any

from coldpress.compiler.architectures import _common
from coldpress.schemas.errors import CheckpointError
from coldpress.schemas.model import ModelSpec

if TYPE_CHECKING:
    from torch import Tensor, nn


def adapt(layer: Any, _: ModelSpec) -> None:
    layer.mlp = _mlp_class()(layer.mlp.config)


@functools.cache
def _mlp_class() -> "type[nn.Module]":
    """Mistral's MLP with a separate activation for the up projection, so that hooks can tell it from the gate's."""
    from transformers.activations import ACT2FN
    from transformers.models.mistral.modeling_mistral import MistralMLP

    class BambooMLP(MistralMLP):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.up_act_fn = ACT2FN[config.hidden_act]

        def forward(self, x: "Tensor") -> "Tensor":
            return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_act_fn(self.up_proj(x)))

    return BambooMLP


class Plugin(_common.Llama):
    KEYS = _common.LLAMA_KEYS | {"head_dim", "sliding_window"}
    MODULES = _common.llama_modules(
        "Mistral", up=_common.Tap("mlp.up_act_fn", "output"), built_of="mistral", adapt=adapt, own_code="Bamboo"
    )

    def own(self, config: Any) -> dict[str, Any]:
        if config.hidden_act != "relu":
            raise CheckpointError(
                f"config.json: hidden_act is {config.hidden_act!r} in a model of type bamboo, expected 'relu' "
                "for both gate and up"
            )
        return {"sliding_window": config.sliding_window, "model_type": "bamboo", "hidden_act": "drelu"}
