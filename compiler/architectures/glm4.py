"""GLM-4 (0414): Llama with norms before and after each block, partial rotary of neighbouring dimensions, gate and up in
one tensor, biases on q, k and v."""

from types import MappingProxyType
from typing import Any

from coldpress.compiler.architectures import _common
from coldpress.schemas.model import ModelSpec

NAMES = {
    "self_attn.q_proj": ("q_proj",),
    "self_attn.k_proj": ("k_proj",),
    "self_attn.v_proj": ("v_proj",),
    "self_attn.o_proj": ("o_proj",),
    "mlp.gate_up_proj": ("gate_proj", "up_proj"),
    "mlp.down_proj": ("down_proj",),
    "input_layernorm": ("input_layernorm",),
    "post_self_attn_layernorm": ("post_attention_layernorm",),
    "post_attention_layernorm": ("pre_feedforward_layernorm",),
    "post_mlp_layernorm": ("post_feedforward_layernorm",),
}
BIASED = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
DEFAULT_EOS = [151329, 151336, 151338]


class Plugin(_common.Architecture):
    KEYS = _common.LLAMA_KEYS | {"head_dim", "attention_bias"}
    DEFAULTS = MappingProxyType({"partial_rotary_factor": 0.5})
    MODULES = _common.llama_modules(
        "Glm4",
        "mlp.activation_fn",
        up=_common.Tap("mlp.gate_up_proj", "output", part=1, num_parts=2),
        partial_rotary=True,
    )

    def complete(self, config: Any) -> None:
        config.eos_token_id = DEFAULT_EOS if config.eos_token_id is None else config.eos_token_id

    def spec(self, config: Any) -> ModelSpec:
        return _common.llama_spec(self.MODULES, config, norm_placement="around", rotary_pairs="neighbours")

    def parameters(self, config: Any, spec: ModelSpec) -> dict[str, tuple[str, ...]]:
        layer = _common.in_parts(NAMES, ("weight",))
        if config.attention_bias:
            layer |= _common.in_parts({name: NAMES[name] for name in BIASED}, ("bias",))
        return _common.outer(spec) | _common.all_layers(spec, "model", layer)
