"""The architectures of llama.cpp that a GGUF file may have, and what their arithmetic covers.

The arithmetic is not in a GGUF file but in llama.cpp's own code (src/models/*.cpp, src/llama-model.cpp), so what it
computes beyond a plain model stands here, architecture by architecture.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import gguf

from coldpress.schemas.model import Activation, ModelSpec

TENSOR = gguf.MODEL_TENSOR


@dataclass(frozen=True)
class LlamaCppArchitecture:
    name: str
    activations: tuple[Activation, ...] = ("silu",)
    """Those that it computes; its gelu is a table of fp16 values, as near to either form of gelu."""
    gated: bool = True
    neighbours: bool = False
    """True if dimensions 2i and 2i + 1 of a head are rotated together, instead of i and i + head_dim / 2."""
    biases: frozenset[str] = frozenset()
    """Modules that may have a bias."""
    scaled: bool = False
    """True if it reads a factor for each frequency."""
    longrope: bool = False
    """True if it reads two factors for each frequency, of short and of long contexts, and one on cos and sin."""
    own_head: bool = False
    """True if it needs a separate head and cannot reuse the embedding."""
    layer_norm: bool = False
    """True if norms have a bias."""
    extensions: frozenset[str] = frozenset()
    """Features of a ModelSpec, without `model.`, that it computes beyond a plain model."""
    residuals: tuple[str, ...] = ("sequential",)
    """The kinds of `ModelSpec.residual` that it computes."""
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    """Modules whose rows stand in one tensor, one after the other, by a name of MODULES."""
    required: frozenset[str] = frozenset()
    """Modules that must have a bias."""
    modules: Mapping[str, TENSOR] = field(default_factory=dict[str, TENSOR])
    """Modules that have another tensor than in MODULES."""
    windows: bool = False
    """True if it computes windows in some layers; others see all positions, so that the context ends at a window."""
    normed: bool | None = True
    """True if it divides the weights of a token's experts by their sum; None if the file says so."""
    dense_first: bool = False
    """True if the first layers may have no experts."""
    yarn: bool = False
    """True if YaRN gives its frequencies, with factors on scores."""

    def rotated_heads(self, spec: ModelSpec, role: str) -> int:
        """Returns the number of heads of a tensor whose rows are to be reordered; 0 for none."""
        heads = {"q_proj": spec.num_attention_heads, "k_proj": spec.num_key_value_heads}
        return heads.get(role.split(".")[-2], 0) if self.neighbours else 0


QKV = frozenset(("q_proj", "k_proj", "v_proj"))
ATTENTION = QKV | {"o_proj"}
MLP = frozenset(("gate_proj", "up_proj", "down_proj"))
TWO = frozenset(("up_proj", "down_proj"))
GELU: tuple[Activation, ...] = ("gelu", "gelu_tanh")
RELU2: tuple[Activation, ...] = ("relu2",)
FUSED_QKV = {"qkv_proj": ("q_proj", "k_proj", "v_proj")}
FACTORS = frozenset(("embedding_multiplier", "residual_multiplier", "attention_scale", "logits_scaling"))
EXPERTS = frozenset(("router_normed", "dense_layers", "dense_intermediate_size"))
"""Fields of experts that are checked one by one (_llama_cpp.py)."""
SIGMOIDS = EXPERTS | {
    "router_scores",
    "router_scaling",
    "num_expert_groups",
    "num_expert_groups_per_tok",
    "shared_intermediate_size",
}
"""Fields of routers with sigmoids, which the file says."""
LATENT = frozenset(("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "v_head_dim"))
LATENT_QUERIES = {"q_proj": TENSOR.ATTN_Q_A}
"""Modules of queries that are made of latents."""
LITE_LAYERS, LITE_MODEL = (26, 27), (48, 128256)
"""Layers, and (layers, size of the vocabulary), of DeepSeek's models that llama.cpp takes for ones without latents of
queries."""
GATE_UP = {"up_proj": ("gate_proj", "up_proj")}
GEMMA = frozenset(("norm.rms_norm_1p", "norm_placement.around", "embedding_multiplier", "attention_scale"))
LARGEST_GEMMA = {"gemma2": 46, "gemma3": 62}
"""Layers of the models of 27 billion weights, whose scores llama.cpp divides by the root of hidden_size / heads."""
FALCON_TWO_NORMS = {"input_layernorm": TENSOR.ATTN_NORM_2, "post_attention_layernorm": TENSOR.ATTN_NORM}
ARCHITECTURES = {
    "llama": LlamaCppArchitecture("llama", neighbours=True, biases=ATTENTION | MLP, scaled=True),
    "mistral": LlamaCppArchitecture("llama", neighbours=True, scaled=True),
    "mixtral": LlamaCppArchitecture("llama", neighbours=True, scaled=True),
    "olmoe": LlamaCppArchitecture("olmoe", own_head=True, normed=False, extensions=EXPERTS),
    "qwen2": LlamaCppArchitecture("qwen2", biases=QKV),
    "qwen3": LlamaCppArchitecture("qwen3"),
    "qwen2_moe": LlamaCppArchitecture(
        "qwen2moe", biases=QKV, own_head=True, normed=False, extensions=EXPERTS | {"shared_intermediate_size"}
    ),
    "qwen3_moe": LlamaCppArchitecture("qwen3moe", extensions=EXPERTS),
    "glm4_moe": LlamaCppArchitecture(
        "glm4moe",
        biases=QKV,
        own_head=True,
        normed=None,
        dense_first=True,
        extensions=SIGMOIDS,
        modules={"post_attention_layernorm": TENSOR.ATTN_POST_NORM},
    ),
    "olmo2": LlamaCppArchitecture(
        "olmo2",
        own_head=True,
        modules={"post_attention_layernorm": TENSOR.ATTN_POST_NORM, "post_feedforward_layernorm": TENSOR.FFN_POST_NORM},
    ),
    "phi3": LlamaCppArchitecture("phi3", longrope=True, fused=FUSED_QKV | GATE_UP),
    "arcee": LlamaCppArchitecture("arcee", RELU2, gated=False, neighbours=True),
    "nemotron": LlamaCppArchitecture("nemotron", RELU2, gated=False, own_head=True, layer_norm=True),
    "granite": LlamaCppArchitecture(
        "granite", neighbours=True, biases=ATTENTION | MLP, scaled=True, extensions=FACTORS
    ),
    "granitemoe": LlamaCppArchitecture(
        "granitemoe", neighbours=True, biases=ATTENTION, scaled=True, extensions=FACTORS | EXPERTS
    ),
    "smollm3": LlamaCppArchitecture("smollm3", neighbours=True, scaled=True, extensions=frozenset({"layer_rotary"})),
    "gemma2": LlamaCppArchitecture(
        "gemma2", GELU, extensions=GEMMA | {"attention_softcap", "logits_softcap"}, windows=True
    ),
    "gemma3_text": LlamaCppArchitecture("gemma3", GELU, extensions=GEMMA | {"layer_rotary"}, windows=True),
    "phi": LlamaCppArchitecture(
        "phi2",
        GELU,
        gated=False,
        biases=ATTENTION | TWO | {"lm_head"},
        own_head=True,
        layer_norm=True,
        extensions=frozenset({"residual"}),
        residuals=("parallel_shared",),
    ),
    "gpt_neox": LlamaCppArchitecture(
        "gptneox",
        GELU,
        gated=False,
        biases=TWO | {"qkv_proj", "o_proj"},
        required=frozenset(("q_proj", "o_proj")),
        own_head=True,
        layer_norm=True,
        extensions=frozenset({"residual"}),
        residuals=("parallel", "sequential"),
        fused=FUSED_QKV,
    ),
    "falcon": LlamaCppArchitecture(
        "falcon",
        GELU,
        gated=False,
        layer_norm=True,
        extensions=frozenset({"residual"}),
        residuals=("parallel", "parallel_shared"),
        fused=FUSED_QKV,
    ),
    "stablelm": LlamaCppArchitecture(
        "stablelm",
        biases=QKV,
        own_head=True,
        layer_norm=True,
        extensions=frozenset({"residual"}),
        residuals=("sequential", "parallel_shared"),
    ),
    "deepseek_v2": LlamaCppArchitecture(
        "deepseek2",
        extensions=EXPERTS | LATENT | {"router_scaling", "shared_intermediate_size", "rotary_pairs", "attention_scale"},
        modules={"k_proj": TENSOR.ATTN_KV_A_MQA, "q_norm": TENSOR.ATTN_Q_A_NORM, "k_norm": TENSOR.ATTN_KV_A_NORM},
        normed=None,
        dense_first=True,
        yarn=True,
    ),
    "glm4": LlamaCppArchitecture(
        "glm4", biases=QKV, extensions=frozenset(("norm_placement.around", "rotary_pairs")), fused=GATE_UP
    ),
    "gpt_oss": LlamaCppArchitecture(
        "gpt-oss",
        ("swiglu_oai",),
        biases=ATTENTION | MLP | {"router"},
        own_head=True,
        yarn=True,
        extensions=frozenset({"attention_sinks"}),
        modules={"post_attention_layernorm": TENSOR.ATTN_POST_NORM, "attention": TENSOR.ATTN_SINKS},
        windows=True,
    ),
}
"""By Hugging Face's model_type."""
REFUSED = {
    "gpt_oss": "it rounds the bounds of the dimensions whose frequencies YaRN mixes, and gpt-oss does not round them"
}
"""Architectures whose graph in llama.cpp differs from transformers' in every model, so that none is exported."""
