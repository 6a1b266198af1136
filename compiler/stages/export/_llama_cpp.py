"""Describes llama.cpp's view of a model: names of architecture and tensors, shapes, and the arithmetic they stand for.

Names come from the tables of the package `gguf`. The arithmetic is not in a GGUF file but in llama.cpp's own code
(src/models/*.cpp, src/llama-model.cpp), so it is repeated here, and a model that differs is refused: its file would
load, and write other text.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import gguf
import numpy as np

from coldpress.compiler.stages.export._stored import StoredModel
from coldpress.schemas.errors import ColdpressError
from coldpress.schemas.model import Activation, ModelSpec

TENSOR = gguf.MODEL_TENSOR
MODULES = {
    "embed_tokens": TENSOR.TOKEN_EMBD,
    "norm": TENSOR.OUTPUT_NORM,
    "lm_head": TENSOR.OUTPUT,
    "input_layernorm": TENSOR.ATTN_NORM,
    "q_proj": TENSOR.ATTN_Q,
    "k_proj": TENSOR.ATTN_K,
    "v_proj": TENSOR.ATTN_V,
    "o_proj": TENSOR.ATTN_OUT,
    "q_norm": TENSOR.ATTN_Q_NORM,
    "k_norm": TENSOR.ATTN_K_NORM,
    "post_attention_layernorm": TENSOR.FFN_NORM,
    "gate_proj": TENSOR.FFN_GATE,
    "up_proj": TENSOR.FFN_UP,
    "down_proj": TENSOR.FFN_DOWN,
    "router": TENSOR.FFN_GATE_INP,
    "shared_expert_gate": TENSOR.FFN_GATE_INP_SHEXP,
}
"""Our names of modules, without the layer."""
STACKED = {
    "gate_proj": TENSOR.FFN_GATE_EXP,
    "up_proj": TENSOR.FFN_UP_EXP,
    "down_proj": TENSOR.FFN_DOWN_EXP,
}
"""Modules of experts: their matrices are stacked in one tensor."""
OF_SHARED = {
    "gate_proj": TENSOR.FFN_GATE_SHEXP,
    "up_proj": TENSOR.FFN_UP_SHEXP,
    "down_proj": TENSOR.FFN_DOWN_SHEXP,
}
"""Modules of the expert that every token uses."""
MAX_EXPERTS = 1024
"""llama.cpp aborts if a file has more (LLAMA_MAX_EXPERTS of src/llama-hparams.h)."""
FREQUENCIES = "rotary.inv_freq"
NORMS = ("norm", "input_layernorm", "post_attention_layernorm")
PRECISION = 4e-7
"""Relative precision with which a float32 frequency determines the base that it was computed from."""


@dataclass(frozen=True)
class Architecture:
    """An architecture of llama.cpp."""

    name: str
    activation: Activation
    gated: bool
    neighbours: bool
    """Whether dimensions 2i and 2i + 1 of a head are rotated together, instead of i and i + head_dim / 2."""
    biases: frozenset[str] = frozenset()
    """Modules that may have a bias."""
    scaled: bool = False
    """Whether it reads a factor for each frequency."""
    own_head: bool = False
    """Whether it needs a separate head and cannot reuse the embedding."""
    normed: bool = True
    """Whether it divides the weights of a token's experts by their sum."""

    def rotated_heads(self, spec: ModelSpec, role: str) -> int:
        """Returns the number of heads of a tensor whose rows are to be reordered; 0 for none."""
        heads = {"q_proj": spec.num_attention_heads, "k_proj": spec.num_key_value_heads}
        return heads.get(role.split(".")[-2], 0) if self.neighbours else 0


QKV = frozenset(("q_proj", "k_proj", "v_proj"))
ATTENTION = QKV | {"o_proj"}
MLP = frozenset(("gate_proj", "up_proj", "down_proj"))
ARCHITECTURES = {
    "llama": Architecture("llama", "silu", gated=True, neighbours=True, biases=ATTENTION | MLP, scaled=True),
    "mistral": Architecture("llama", "silu", gated=True, neighbours=True, scaled=True),
    "mixtral": Architecture("llama", "silu", gated=True, neighbours=True, scaled=True),
    "olmoe": Architecture("olmoe", "silu", gated=True, neighbours=False, own_head=True, normed=False),
    "qwen2": Architecture("qwen2", "silu", gated=True, neighbours=False, biases=QKV),
    "qwen2_moe": Architecture(
        "qwen2moe", "silu", gated=True, neighbours=False, biases=QKV, own_head=True, normed=False
    ),
    "qwen3": Architecture("qwen3", "silu", gated=True, neighbours=False),
    "qwen3_moe": Architecture("qwen3moe", "silu", gated=True, neighbours=False),
    "arcee": Architecture("arcee", "relu2", gated=False, neighbours=True),
    "nemotron": Architecture("nemotron", "relu2", gated=False, neighbours=False, own_head=True),
}
"""By Hugging Face's model_type."""


def architecture_of(spec: ModelSpec) -> Architecture:
    """Returns llama.cpp's architecture that computes the same as the model.

    Raises:
        ColdpressError: if there is none.
    """
    found = ARCHITECTURES.get(spec.model_type)
    if found is None:
        known = ", ".join(sorted(ARCHITECTURES))
        raise ColdpressError(f"a GGUF file cannot hold the architecture '{spec.model_type}', expected one of {known}")
    if spec.hidden_act != found.activation or spec.gated_mlp != found.gated:
        raise ColdpressError(
            f"the model's activation is {spec.hidden_act}, and llama.cpp computes {found.activation} in every model of "
            f"the architecture '{found.name}': it would write other text; leave export out"
        )
    if spec.tie_word_embeddings and found.own_head:
        raise ColdpressError(
            f"the model's head is its embedding, and llama.cpp's architecture '{found.name}' wants one of its own; it "
            "cannot be exported"
        )
    if spec.rotary_scaling != 1.0 or (found.neighbours and spec.rotary_dim != spec.head_dim):
        raise ColdpressError(
            f"llama.cpp's architecture '{found.name}' rotates whole heads without a factor, and this model rotates "
            f"{spec.rotary_dim} of {spec.head_dim} dimensions with the factor {spec.rotary_scaling}; it cannot be "
            "exported"
        )
    if spec.is_mixture:
        _check_experts(spec, found)
    if spec.num_experts > MAX_EXPERTS:
        raise ColdpressError(
            f"a layer of the model has {spec.num_experts} experts, and llama.cpp takes at most {MAX_EXPERTS}; it "
            "cannot be exported"
        )
    return found


def _check_experts(spec: ModelSpec, found: Architecture) -> None:
    """Refuses routers and layers that llama.cpp computes otherwise."""
    if spec.router_normed != found.normed:
        says = {True: "divides the weights of a token's experts by their sum", False: "leaves them as they are"}
        raise ColdpressError(
            f"llama.cpp's architecture '{found.name}' {says[found.normed]}, and this model {says[spec.router_normed]}; "
            "it cannot be exported"
        )
    if spec.qk_norm == "width" and spec.num_key_value_heads != spec.num_attention_heads:
        raise ColdpressError(
            f"llama.cpp's architecture '{found.name}' has as many key heads as attention heads, and this model has "
            f"{spec.num_key_value_heads} of {spec.num_attention_heads}; it cannot be exported"
        )
    if spec.dense_layers:
        raise ColdpressError(
            f"llama.cpp's architecture '{found.name}' has experts in every layer, and {len(spec.dense_layers)} layers "
            "of this model have none; it cannot be exported"
        )


def roles(model: StoredModel) -> list[tuple[str, ...]]:
    """Lists the roles of each tensor (one, or those of all experts) in the file's order: outside the layers, then by
    layer."""
    tensors: dict[tuple[int, str], list[str]] = {}
    for role in model.tensors:
        if role != FREQUENCIES:
            layer, *module = role.split(".")[1:] if role.startswith("layers.") else ("-1", role)
            tensors.setdefault((int(layer), ".".join(_without_expert(module))), []).append(role)
    return [tuple(tensors[key]) for key in sorted(tensors)]


def _without_expert(module: list[str]) -> list[str]:
    return module[2:] if module[0] == "experts" else module


def tensor_name(architecture: Architecture, role: str) -> str:
    """Returns llama.cpp's name of a role's tensor; all experts share one tensor.

    Raises:
        ColdpressError: if the architecture has no such tensor.
    """
    *before, module, kind = role.split(".")
    of_part = {"experts": STACKED, "shared_expert": OF_SHARED}
    tensor = next((names for part, names in of_part.items() if part in before), MODULES).get(module)
    known = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture.name)
    has_bias = module in architecture.biases or (module in NORMS and architecture.name == "nemotron")
    if tensor is None or tensor not in gguf.MODEL_TENSORS[known] or (kind == "bias" and not has_bias):
        raise ColdpressError(
            f"llama.cpp's architecture '{architecture.name}' has no tensor for {role}; this model cannot be exported"
        )
    return f"{gguf.TENSOR_NAMES[tensor].format(bid=before[1] if before else 0)}.{kind}"


def neighbours(rows: np.ndarray, heads: int) -> np.ndarray:
    """Moves rows [heads * head_dim, …] that are rotated together side by side; changes nothing where `heads` is 0."""
    if not heads:
        return rows
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def norm_weights(spec: ModelSpec, role: str, values: np.ndarray) -> np.ndarray:
    """Returns a norm's weights for llama.cpp: plus 1 for `layer_norm_1p`, which stores the difference from 1."""
    counts_from_one = spec.norm == "layer_norm_1p" and role.split(".")[-2] in NORMS and role.endswith("weight")
    return values + np.float32(1) if counts_from_one else values


def add_shape(writer: gguf.GGUFWriter, model: StoredModel) -> None:
    """Adds the sizes and constants that llama.cpp reads; the context ends at a sliding window, which it ignores."""
    spec = model.spec
    writer.add_vocab_size(spec.vocab_size)
    writer.add_context_length(min(spec.max_position_embeddings, spec.sliding_window or spec.max_position_embeddings))
    writer.add_embedding_length(spec.hidden_size)
    writer.add_block_count(spec.num_hidden_layers)
    writer.add_feed_forward_length(spec.intermediate_size)
    if spec.is_mixture:
        writer.add_expert_count(spec.num_experts)
        writer.add_expert_used_count(spec.num_experts_per_tok)
        if architecture_of(spec).name != "llama":
            writer.add_expert_feed_forward_length(spec.intermediate_size)
        if spec.shared_intermediate_size:
            writer.add_expert_shared_feed_forward_length(spec.shared_intermediate_size)
    writer.add_head_count(spec.num_attention_heads)
    writer.add_head_count_kv(spec.num_key_value_heads)
    writer.add_key_length(spec.head_dim)
    writer.add_value_length(spec.head_dim)
    if spec.norm == "rms_norm":
        writer.add_layer_norm_rms_eps(spec.norm_eps)
    else:
        writer.add_layer_norm_eps(spec.norm_eps)
    writer.add_rope_dimension_count(spec.rotary_dim)
    base, scale = _rope(model)
    writer.add_rope_freq_base(base)
    if scale != 1:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(1 / scale)


def rope_factors(model: StoredModel) -> dict[str, np.ndarray]:
    """Returns a factor float32 [rotary_dim / 2] that divides each frequency, where a base alone does not give them.

    Raises:
        ColdpressError: if the architecture reads no factors.
    """
    frequencies = _frequencies(model)
    base, scale = _rope(model)
    expected = _geometric(base, scale, frequencies.size)
    if np.allclose(expected, frequencies, rtol=PRECISION, atol=0):
        return {}
    architecture = architecture_of(model.spec)
    if not architecture.scaled:
        raise ColdpressError(
            f"the model scales its rotary frequencies one by one, and llama.cpp's architecture '{architecture.name}' "
            "reads no factors for them; this model cannot be exported"
        )
    return {f"{gguf.TENSOR_NAMES[TENSOR.ROPE_FREQS]}.weight": (expected / frequencies).astype(np.float32)}


def _frequencies(model: StoredModel) -> np.ndarray:
    return model.values(FREQUENCIES).astype(np.float64)


def _rope(model: StoredModel) -> tuple[float, float]:
    """Returns (base, factor on all frequencies) of a geometric sequence; of others, the base that its beginning has."""
    frequencies = _frequencies(model)
    count, scale = frequencies.size, float(frequencies[0])
    if count == 1:
        return 10000.0, scale
    base = float((frequencies[-1] / scale) ** (-count / (count - 1)))
    for rounded in _rounded(base):
        if np.allclose(_geometric(rounded, scale, count), frequencies, rtol=PRECISION, atol=0):
            return rounded, scale
    base = float(frequencies[1] ** -count)
    return next(rounded for rounded in _rounded(base) if np.isclose(rounded, base, rtol=count * PRECISION)), 1.0


def _rounded(base: float) -> Iterator[float]:
    """Yields the number, roundest form first: float32 frequencies do not determine it more precisely."""
    yield from (float(f"{base:.{digits}g}") for digits in range(1, 10))


def _geometric(base: float, scale: float, count: int) -> np.ndarray:
    return scale * base ** (-np.arange(count) / count)
