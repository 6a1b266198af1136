"""Mixtral: Mistral with several MLPs, among which a router picks for every token (Jiang et al. 2024). Tensors have the
names of the published checkpoints; newer versions of transformers write them, too."""

from typing import Any

from coldpress.compiler.architectures import _common, _experts


class Plugin(_experts.Mixture):
    KEYS = _common.LLAMA_KEYS | {"head_dim", "sliding_window", "num_local_experts", "num_experts_per_tok"}
    NAMES = _experts.Names("block_sparse_moe", matrices={"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"})
    NUM_EXPERTS = "num_local_experts"
    MODULES = _experts.modules("Mixtral", NAMES)

    def own(self, config: Any) -> dict[str, Any]:
        return {"sliding_window": config.sliding_window}
