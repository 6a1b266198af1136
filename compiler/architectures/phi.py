"""Phi 1, 1.5 and 2: attention and an MLP of two matrices side by side behind one LayerNorm, biases, partial rotary."""

from types import MappingProxyType
from typing import Any

from coldpress.compiler.architectures import _common
from coldpress.schemas.model import ModelSpec, block_norms

LINEARS = {
    "self_attn.q_proj": ("q_proj",),
    "self_attn.k_proj": ("k_proj",),
    "self_attn.v_proj": ("v_proj",),
    "self_attn.dense": ("o_proj",),
    "mlp.fc1": ("up_proj",),
    "mlp.fc2": ("down_proj",),
}
QK_NORMS = {"self_attn.q_layernorm": ("q_norm",), "self_attn.k_layernorm": ("k_norm",)}


class Plugin(_common.Architecture):
    KEYS = (_common.LLAMA_KEYS - {"rms_norm_eps"}) | {"layer_norm_eps", "qk_layernorm"}
    DEFAULTS = MappingProxyType({"partial_rotary_factor": 0.5})
    MODULES = _common.Modules(
        prefix="Phi",
        base="model",
        norm="final_layernorm",
        taps=_common.layer_taps("self_attn", "self_attn.dense", "mlp", "mlp.activation_fn", "mlp.fc2"),
        activation="gelu_new",
        partial_rotary=True,
    )

    def spec(self, config: Any) -> ModelSpec:
        own = {"gated_mlp": False, "norm": "layer_norm", "norm_eps": config.layer_norm_eps}
        return _common.llama_spec(self.MODULES, config, residual="parallel_shared", **own)

    def parameters(self, config: Any, spec: ModelSpec) -> dict[str, tuple[str, ...]]:
        modules = LINEARS | {name: (name,) for name in block_norms(spec)} | (QK_NORMS if config.qk_layernorm else {})
        outer = _common.outer(spec, norm="model.final_layernorm") | {"lm_head.bias": ("lm_head.bias",)}
        return outer | _common.all_layers(spec, "model", _common.in_parts(modules, ("weight", "bias")))
