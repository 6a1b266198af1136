"""Nemotron: LayerNorm with 1 added to its weights, partial rotary, relu(x)**2 between the MLP's two matrices."""

from types import MappingProxyType
from typing import Any

from coldpress.compiler.architectures import _common


class Plugin(_common.Llama):
    KEYS = (_common.LLAMA_KEYS - {"rms_norm_eps"}) | {"norm_eps", "head_dim", "attention_bias", "mlp_bias"}
    DEFAULTS = MappingProxyType({"partial_rotary_factor": 0.5})
    MODULES = _common.llama_modules("Nemotron", gated=False, activation="relu2", partial_rotary=True)

    def own(self, config: Any) -> dict[str, Any]:
        return {"gated_mlp": False, "norm": "layer_norm_1p", "norm_eps": config.norm_eps}
