"""Falcon: LayerNorm, an MLP of two matrices, q, k and v in one tensor, attention and MLP side by side (Almazrouei et
al. 2023, section 4).

Falcon 7B has one key head and one norm for both blocks; 40B and 180B ("new decoder architecture") have groups of heads,
each with its key and value behind it, and two norms; the small RW models run the blocks one after the other. Models
with ALiBi in place of rotary positions (RW 1B and 7B) are refused.
"""

from typing import Any, Literal

from coldpress.compiler.architectures import _common
from coldpress.schemas.errors import CheckpointError
from coldpress.schemas.model import ModelSpec, norm_parts

NEW_NORMS = {"ln_attn": ("input_layernorm",), "ln_mlp": ("post_attention_layernorm",)}
MLP = {"mlp.dense_h_to_4h": ("up_proj",), "mlp.dense_4h_to_h": ("down_proj",)}
NORMS_OF_NEW = (None, 1, 2)
"""Values of `num_ln_in_parallel_attn` in the new architecture; None stands for 2."""


class Plugin(_common.Architecture):
    KEYS = frozenset(
        {
            "num_ln_in_parallel_attn",
            "layer_norm_epsilon",
            "num_kv_heads",
            "alibi",
            "new_decoder_architecture",
            "multi_query",
            "parallel_attn",
            "bias",
            "ffn_hidden_size",
            "activation",
            "rope_parameters",
        }
    )
    MODULES = _common.Modules(
        prefix="Falcon",
        base="transformer",
        layers="h",
        norm="ln_f",
        taps=_common.layer_taps("self_attention", "self_attention.dense", "mlp", "mlp.act", "mlp.dense_4h_to_h"),
        activation="gelu",
        activation_key="activation",
        cache_argument="layer_past",
        layer_arguments={"alibi": None},
    )

    def spec(self, config: Any) -> ModelSpec:
        _check(config)
        own: dict[str, Any] = {
            "intermediate_size": config.ffn_hidden_size or 4 * config.hidden_size,
            "num_key_value_heads": _key_heads(config),
            "gated_mlp": False,
            "norm": "layer_norm",
            "norm_eps": config.layer_norm_epsilon,
            "residual": _residual(config),
        }
        return _common.llama_spec(self.MODULES, config, **own)

    def parameters(self, config: Any, spec: ModelSpec) -> dict[str, tuple[str, ...]]:
        by_name = {"parallel": NEW_NORMS, "parallel_shared": {"input_layernorm": ("input_layernorm",)}}
        both = {name: (name,) for name in ("input_layernorm", "post_attention_layernorm")}
        fused = {"self_attention.query_key_value": _common.qkv(spec.num_key_value_heads)}
        linears = fused | {"self_attention.dense": ("o_proj",)} | MLP
        layer = _common.in_parts(linears, ("weight", "bias") if config.bias else ("weight",))
        layer |= _common.in_parts(by_name.get(spec.residual, both), norm_parts(spec))
        outer = _common.outer(spec, "transformer.word_embeddings", "transformer.ln_f")
        return outer | _common.all_layers(spec, "transformer", layer, self.MODULES.layers)


def _residual(config: Any) -> Literal["sequential", "parallel", "parallel_shared"]:
    if not config.new_decoder_architecture:
        return "parallel_shared" if config.parallel_attn else "sequential"
    return "parallel_shared" if config.num_ln_in_parallel_attn == 1 else "parallel"


def _key_heads(config: Any) -> int:
    if config.multi_query and not config.new_decoder_architecture:
        return 1
    return config.num_kv_heads or config.num_attention_heads


def _check(config: Any) -> None:
    if config.alibi:
        raise CheckpointError("config.json: alibi is true, and positions other than rotary ones are not supported")
    norms, is_new = config.num_ln_in_parallel_attn, config.new_decoder_architecture
    if is_new and not config.parallel_attn:
        raise CheckpointError(
            "config.json: parallel_attn is false, expected true with new_decoder_architecture: transformers cannot run "
            "such a model"
        )
    if norms not in NORMS_OF_NEW or (norms == 2 and not is_new):
        raise CheckpointError(
            f"config.json: num_ln_in_parallel_attn is {norms}, expected 1, or 2 with new_decoder_architecture: "
            "transformers cannot run such a model"
        )
    heads = config.num_attention_heads
    if not is_new and not config.multi_query and _key_heads(config) != heads:
        raise CheckpointError(
            f"config.json: num_kv_heads is {config.num_kv_heads}, expected {heads}, the number of heads, without "
            "multi_query and new_decoder_architecture"
        )
