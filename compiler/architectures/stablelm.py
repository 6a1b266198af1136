"""StableLM: Llama with LayerNorm and partial rotary; StableLM 2 12B has a norm for each head of q and k, and attention
and MLP side by side behind one norm."""

from types import MappingProxyType
from typing import Any

from coldpress.compiler.architectures import _common
from coldpress.schemas.model import ModelSpec, qk_norms


class Plugin(_common.Llama):
    KEYS = (_common.LLAMA_KEYS - {"rms_norm_eps"}) | {
        "layer_norm_eps",
        "use_qkv_bias",
        "qk_layernorm",
        "use_parallel_residual",
    }
    DEFAULTS = MappingProxyType({"partial_rotary_factor": 0.25})
    MODULES = _common.llama_modules("StableLm", partial_rotary=True)

    def own(self, config: Any) -> dict[str, Any]:
        return {
            "norm": "layer_norm",
            "norm_eps": config.layer_norm_eps,
            "residual": "parallel_shared" if config.use_parallel_residual else "sequential",
            "qk_norm": "heads" if config.qk_layernorm else "head",
        }

    def parameters(self, config: Any, spec: ModelSpec) -> dict[str, tuple[str, ...]]:
        biased = ("q_proj", "k_proj", "v_proj") if config.use_qkv_bias else ()
        names = _common.llama_parameters(spec, biased)
        if not config.qk_layernorm:
            return names
        norms = {
            f"self_attn.{name[0]}_layernorm.norms.{head}.weight": (f"{role}.weight",)
            for name, roles in qk_norms(spec).items()
            for head, role in enumerate(roles)
        }
        return names | _common.all_layers(spec, "model", norms)
