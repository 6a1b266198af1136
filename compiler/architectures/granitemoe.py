"""Granite 3 with experts: Granite's factors; all experts of a layer are stored in two tensors, gate above up in one."""

from types import MappingProxyType
from typing import Any

from coldpress.compiler.architectures import _common, _experts, granite
from coldpress.schemas.model import ModelSpec

NAMES = _experts.Names("block_sparse_moe", router="router")
BOTH = "block_sparse_moe.input_linear.weight"


class Plugin(_experts.Mixture):
    KEYS = granite.MULTIPLIERS | _common.LLAMA_KEYS | {"attention_bias", "num_local_experts", "num_experts_per_tok"}
    NAMES = NAMES
    NUM_EXPERTS = "num_local_experts"
    STACKED = MappingProxyType(
        {
            "gate_proj.weight": _common.Place(BOTH, num_parts=2),
            "up_proj.weight": _common.Place(BOTH, part=1, num_parts=2),
            "down_proj.weight": _common.Place("block_sparse_moe.output_linear.weight"),
        }
    )
    MODULES = _experts.modules("GraniteMoe", NAMES)

    def own(self, config: Any) -> dict[str, Any]:
        return granite.granite_fields(config)

    def places(self, spec: ModelSpec) -> dict[str, _common.Place]:
        routers = {
            f"model.layers.{layer}.{NAMES.block}.{NAMES.router}": f"model.layers.{layer}.{NAMES.block}.router.layer"
            for layer in range(spec.num_hidden_layers)
        }
        return super().places(spec) | {
            f"{ours}.weight": _common.Place(f"{its}.weight") for ours, its in routers.items()
        }
