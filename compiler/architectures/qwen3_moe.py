"""Qwen3 with experts: norms on each head of q and k; the router's weights may be the softmax over all experts."""

from typing import Any

from coldpress.compiler.architectures import _common, _experts
from coldpress.schemas.errors import CheckpointError
from coldpress.schemas.model import ModelSpec

NAMES = _experts.Names()


class Plugin(_experts.Mixture):
    """Qwen3 with experts."""

    KEYS = _common.LLAMA_KEYS | {
        "head_dim",
        "attention_bias",
        "sliding_window",
        "use_sliding_window",
        "decoder_sparse_step",
        "mlp_only_layers",
        "moe_intermediate_size",
        "num_experts",
        "num_experts_per_tok",
        "norm_topk_prob",
    }
    DEFAULTS = _common.llama_defaults(
        intermediate_size=6144,
        num_key_value_heads=4,
        bos_token_id=None,
        eos_token_id=None,
        use_sliding_window=False,
        sliding_window=4096,
        decoder_sparse_step=1,
        mlp_only_layers=None,
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=False,
    )
    NAMES = NAMES
    QK_NORM = True
    MODULES = _experts.modules("Qwen3Moe", NAMES)

    def spec(self, config: Any) -> ModelSpec:
        """Returns a spec with one window for all layers, if the configuration asks for it.

        Raises:
            CheckpointError: if some layers have no experts.
        """
        if config.mlp_only_layers or config.decoder_sparse_step != 1:
            raise CheckpointError("config.json: layers without experts are not supported, expected experts in all")
        return _common.llama_spec(
            self.MODULES,
            config,
            config.sliding_window,
            intermediate_size=config.moe_intermediate_size,
            router_normed=config.norm_topk_prob,
            **_experts.counts(config),
        )

    def biases(self, config: Any, spec: ModelSpec) -> tuple[str, ...]:
        """Returns all projections of attention, or none."""
        return ("q_proj", "k_proj", "v_proj", "o_proj") if config.attention_bias else ()
