"""GPT-NeoX and Pythia: LayerNorm, attention and MLP side by side or one after the other, q, k and v of each head in
turn in one tensor (Black et al. 2022, section 2.1)."""

from types import MappingProxyType
from typing import Any

from coldpress.compiler.architectures import _common
from coldpress.schemas.model import ModelSpec, block_norms

MLP = {"mlp.dense_h_to_4h": ("up_proj",), "mlp.dense_4h_to_h": ("down_proj",)}


class Plugin(_common.Architecture):
    KEYS = frozenset(
        {
            "intermediate_size",
            "hidden_act",
            "layer_norm_eps",
            "use_parallel_residual",
            "attention_bias",
            "rope_parameters",
        }
    )
    DEFAULTS = MappingProxyType({"partial_rotary_factor": 0.25})
    MODULES = _common.Modules(
        prefix="GPTNeoX",
        base="gpt_neox",
        norm="final_layer_norm",
        taps=_common.layer_taps("attention", "attention.dense", "mlp", "mlp.act", "mlp.dense_4h_to_h"),
        activation="gelu",
        partial_rotary=True,
        cache_argument="layer_past",
    )

    def spec(self, config: Any) -> ModelSpec:
        own = {"gated_mlp": False, "norm": "layer_norm", "norm_eps": config.layer_norm_eps}
        residual = "parallel" if config.use_parallel_residual else "sequential"
        return _common.llama_spec(self.MODULES, config, residual=residual, **own)

    def parameters(self, config: Any, spec: ModelSpec) -> dict[str, tuple[str, ...]]:
        both = ("weight", "bias")
        attention = {"attention.query_key_value": _common.qkv(spec.num_attention_heads), "attention.dense": ("o_proj",)}
        layer = _common.in_parts(attention, both if config.attention_bias else ("weight",))
        layer |= _common.in_parts(MLP | {name: (name,) for name in block_norms(spec)}, both)
        outer = _common.outer(spec, "gpt_neox.embed_in", "gpt_neox.final_layer_norm")
        return outer | _common.all_layers(spec, "gpt_neox", layer)
