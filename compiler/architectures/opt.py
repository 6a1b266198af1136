"""OPT: LayerNorm before each block, biases, learned positions with an offset of 2, a ReLU MLP of two matrices.

The 350m model (norm after each block, projected embeddings) and checkpoints without a final norm are other
architectures under the same name; they are refused.
"""

from typing import Any

from coldpress.compiler.architectures import _common
from coldpress.schemas.errors import CheckpointError
from coldpress.schemas.model import ModelSpec

LAYER_NORM_EPS = 1e-5  # torch's default; transformers does not change it
POSITION_OFFSET = 2  # OPTLearnedPositionalEmbedding


class Plugin(_common.Architecture):
    KEYS = frozenset(
        {
            "ffn_dim",
            "activation_function",
            "do_layer_norm_before",
            "word_embed_proj_dim",
            "_remove_final_layer_norm",
            "enable_bias",
            "layer_norm_elementwise_affine",
        }
    )
    MODULES = _common.Modules(
        prefix="OPT",
        base="model.decoder",
        norm="final_layer_norm",
        taps=_common.layer_taps("self_attn", "self_attn.out_proj", "fc1", "activation_fn", "fc2"),
        activation="relu",
        activation_key="activation_function",
    )

    def spec(self, config: Any) -> ModelSpec:
        wanted = {
            "do_layer_norm_before": (config.do_layer_norm_before, True),
            "word_embed_proj_dim": (config.word_embed_proj_dim or config.hidden_size, config.hidden_size),
            "_remove_final_layer_norm": (config._remove_final_layer_norm, False),
            "layer_norm_elementwise_affine": (config.layer_norm_elementwise_affine, True),
        }
        for key, (found, expected) in wanted.items():
            if found != expected:
                raise CheckpointError(f"config.json: OPT with {key} = {found} is not supported, expected {expected}")
        if config.hidden_size % config.num_attention_heads:
            raise CheckpointError(
                f"config.json: hidden_size {config.hidden_size} is no multiple of {config.num_attention_heads} heads"
            )
        return ModelSpec(
            model_type="opt",
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.ffn_dim,
            num_hidden_layers=config.num_hidden_layers,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_attention_heads,
            head_dim=config.hidden_size // config.num_attention_heads,
            max_position_embeddings=config.max_position_embeddings,
            **_common.activation_fields(self.MODULES, config),
            gated_mlp=False,
            norm="layer_norm",
            norm_eps=LAYER_NORM_EPS,
            position="learned",
            rotary_dim=0,
            position_offset=POSITION_OFFSET,
            tie_word_embeddings=config.tie_word_embeddings,
            bos_token_id=config.bos_token_id,
            eos_token_ids=_common.eos_ids(config.eos_token_id),
        )

    def parameters(self, config: Any, spec: ModelSpec) -> dict[str, tuple[str, ...]]:
        linears = {
            "self_attn.q_proj": ("q_proj",),
            "self_attn.k_proj": ("k_proj",),
            "self_attn.v_proj": ("v_proj",),
            "self_attn.out_proj": ("o_proj",),
            "fc1": ("up_proj",),
            "fc2": ("down_proj",),
        }
        norms = {"self_attn_layer_norm": ("input_layernorm",), "final_layer_norm": ("post_attention_layernorm",)}
        layer = _common.in_parts(linears, ("weight", "bias") if config.enable_bias else ("weight",))
        layer |= _common.in_parts(norms, ("weight", "bias"))
        outer = _common.outer(spec, "model.decoder.embed_tokens", "model.decoder.final_layer_norm")
        outer["model.decoder.embed_positions.weight"] = ("embed_positions.weight",)
        return outer | _common.all_layers(spec, "model.decoder", layer)
