"""Mixtral: Mistral with several MLPs, among which a router picks for every token (Jiang et al. 2024).

Tensors have the names of the published checkpoints; newer versions of transformers write them, too.
"""

from typing import Any

from coldpress.compiler.architectures import _common, _experts
from coldpress.schemas.errors import CheckpointError
from coldpress.schemas.model import MatrixRole, ModelSpec, matrices

MATRICES: dict[str, MatrixRole] = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


class Plugin(_common.Architecture):
    """Mistral with several MLPs."""

    KEYS = _common.LLAMA_KEYS | {"head_dim", "sliding_window", "num_local_experts", "num_experts_per_tok"}
    DEFAULTS = _common.llama_defaults(
        intermediate_size=14336,
        num_key_value_heads=8,
        rms_norm_eps=1e-5,
        sliding_window=None,
        num_local_experts=8,
        num_experts_per_tok=2,
    )
    MODULES = _common.Modules(
        prefix="Mixtral", base="model", norm="norm", taps=_experts.TAPS, adapt=_experts.adapt, is_mixture=True
    )

    def spec(self, config: Any) -> ModelSpec:
        """Returns the model's shape."""
        experts, chosen = config.num_local_experts, config.num_experts_per_tok
        if chosen > experts:
            raise CheckpointError(
                f"config.json: num_experts_per_tok is {chosen}, expected at most num_local_experts, {experts}"
            )
        return _common.llama_spec(
            self.MODULES, config, config.sliding_window, num_experts=experts, num_experts_per_tok=chosen
        )

    def parameters(self, config: Any, spec: ModelSpec) -> dict[str, tuple[str, ...]]:
        """Returns tensor names and the roles they hold."""
        layer = {f"self_attn.{name}.weight": (f"{name}.weight",) for name in ("q_proj", "k_proj", "v_proj", "o_proj")}
        layer |= {f"{name}.weight": (f"{name}.weight",) for name in ("input_layernorm", "post_attention_layernorm")}
        layer[f"{_experts.BLOCK}.gate.weight"] = ("router.weight",)
        for name, role in MATRICES.items():
            for expert, held in enumerate(matrices(role, spec)):
                layer[f"{_experts.BLOCK}.experts.{expert}.{name}.weight"] = (f"{held}.weight",)
        return _common.llama_outer(spec) | _common.all_layers(spec, "model", layer)
