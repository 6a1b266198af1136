"""gpt-oss: experts with biases and a clamped activation, a logit of each head that only the softmax sees, a window in
every other layer (OpenAI 2025).

A checkpoint has one tensor for all experts of a layer: gate and up are its columns in turn, and down is transposed,
too. Published checkpoints pack these matrices in MXFP4. transformers ignores `hidden_act`.
"""

from types import MappingProxyType
from typing import Any

from coldpress.compiler.architectures import _common, _experts
from coldpress.runtime.arithmetic import SWIGLU_ALPHA
from coldpress.schemas.errors import CheckpointError
from coldpress.schemas.model import ModelSpec

NAMES = _experts.Names(router="router", biases=True)
YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""The rotation of a configuration that names none."""
BOTH, DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"


def adapt(layer: Any, spec: ModelSpec) -> None:
    """Replaces the experts by ours; transformers' layer expects two results and uses the first."""
    _experts.adapt(NAMES, layer, spec)
    layer.mlp.register_forward_hook(lambda _module, _inputs, output: (output, None))


class Plugin(_experts.Mixture):
    KEYS = _common.LLAMA_KEYS | {
        "head_dim",
        "attention_bias",
        "sliding_window",
        "layer_types",
        "num_local_experts",
        "num_experts_per_tok",
        "swiglu_alpha",
        "swiglu_limit",
    }
    DEFAULTS = MappingProxyType({"rope_parameters": YARN})
    PACKED = "mxfp4"
    NAMES = NAMES
    NUM_EXPERTS = "num_local_experts"
    STACKED = MappingProxyType(
        {
            "gate_proj.weight": _common.Place(BOTH, num_parts=2, interleaved=True, transposed=True, packed=True),
            "up_proj.weight": _common.Place(BOTH, part=1, num_parts=2, interleaved=True, transposed=True, packed=True),
            "down_proj.weight": _common.Place(DOWN, transposed=True, packed=True),
            "gate_proj.bias": _common.Place(f"{BOTH}_bias", num_parts=2, interleaved=True),
            "up_proj.bias": _common.Place(f"{BOTH}_bias", part=1, num_parts=2, interleaved=True),
            f"down_proj.{_experts.DOWN_BIAS}": _common.Place(f"{DOWN}_bias"),
        }
    )
    MODULES = _experts.modules("GptOss", NAMES, adapt=adapt, attention="eager")

    def complete(self, config: Any) -> None:
        """Adds the kinds of attention: every other layer has a window, the first one included."""
        if config.layer_types is None:
            kinds = ("sliding_attention", "full_attention")
            config.layer_types = [kinds[layer % 2] for layer in range(config.num_hidden_layers)]

    def own(self, config: Any) -> dict[str, Any]:
        wanted = {"hidden_act": (config.hidden_act, "silu"), "swiglu_alpha": (config.swiglu_alpha, SWIGLU_ALPHA)}
        for key, (found, expected) in wanted.items():
            if found != expected:
                raise CheckpointError(
                    f"config.json: {key} is {found!r} in a model of type gpt_oss, expected {expected!r}"
                )
        return {
            "hidden_act": "swiglu_oai",
            "activation_threshold": float(config.swiglu_limit),
            "attention_sinks": True,
            **_common.windows(config),
        }
