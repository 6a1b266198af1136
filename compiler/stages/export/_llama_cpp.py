"""Describes llama.cpp's view of a model: names of architecture and tensors, shapes, and the arithmetic they stand for.

Names come from the tables of the package `gguf`. What llama.cpp's architectures compute is in
`compiler/llama_cpp/architectures.py`, and a model that differs is refused: its file would load, and write other text.

An artifact has only the rotary frequencies, and a file their settings. A base gives a geometric sequence, a factor
divides all of it, and YaRN (Peng et al. 2023, section 3.2) divides the last frequencies by its factor, the first not at
all, and those between in part.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import gguf
import numpy as np

from coldpress.compiler.llama_cpp import names
from coldpress.compiler.llama_cpp.architectures import (
    ARCHITECTURES,
    LARGEST_GEMMA,
    LITE_LAYERS,
    LITE_MODEL,
    REFUSED,
    TENSOR,
    LlamaCppArchitecture,
)
from coldpress.compiler.stages.export._stored import StoredModel
from coldpress.runtime.decoder.attention import LATENT_EPS
from coldpress.runtime.routers import router_class
from coldpress.schemas.errors import ColdpressError
from coldpress.schemas.model import FREQUENCIES, ModelSpec, RotaryKind, features_of_model

MAX_EXPERTS = 1024
"""llama.cpp aborts if a file has more (LLAMA_MAX_EXPERTS of src/llama-hparams.h)."""
LONGROPE = (TENSOR.ROPE_FACTORS_LONG, TENSOR.ROPE_FACTORS_SHORT)
"""Both are the same in every file here: an artifact has the factors that it was built with, for texts of any length."""
PRECISION = 4e-7
"""Relative precision with which a float32 frequency determines the base that it was computed from."""
MIXED_PRECISION = 1e-6
"""The same for YaRN's sum of two products."""
FAST, SLOW = 32, 1
"""Turns of the frequencies over the original context between which YaRN mixes; some architectures read no others."""


def architecture_of(spec: ModelSpec) -> LlamaCppArchitecture:
    """Returns llama.cpp's architecture that computes the same as the model. Raises ColdpressError if there is none."""
    found = names.named(spec)
    if spec.model_type in REFUSED:
        raise ColdpressError(
            f"llama.cpp computes the architecture '{spec.model_type}' otherwise: {REFUSED[spec.model_type]}; it would "
            "write other text, so the model cannot be exported"
        )
    if found is None:
        known = ", ".join(sorted(ARCHITECTURES))
        raise ColdpressError(f"a GGUF file cannot hold the architecture '{spec.model_type}', expected one of {known}")
    if spec.hidden_act not in found.activations or spec.gated_mlp != found.gated:
        raise ColdpressError(
            f"the model's activation is {spec.hidden_act}, and llama.cpp computes {found.activations[-1]} in every "
            f"model of the architecture '{found.name}': it would write other text; leave export out"
        )
    if spec.tie_word_embeddings and found.own_head:
        raise ColdpressError(
            f"the model's head is its embedding, and llama.cpp's architecture '{found.name}' wants one of its own; it "
            "cannot be exported"
        )
    if (spec.rotary_scaling != 1.0 and not (found.yarn or found.longrope)) or (
        found.neighbours and spec.rotary_dim != spec.head_dim
    ):
        raise ColdpressError(
            f"llama.cpp's architecture '{found.name}' rotates whole heads without a factor, and this model rotates "
            f"{spec.rotary_dim} of {spec.head_dim} dimensions with the factor {spec.rotary_scaling}; it cannot be "
            "exported"
        )
    _check_extensions(found, spec)
    if spec.is_mixture:
        _check_experts(spec, found)
    if spec.is_latent:
        _check_latents(spec, found)
    if spec.num_experts > MAX_EXPERTS:
        raise ColdpressError(
            f"a layer of the model has {spec.num_experts} experts, and llama.cpp takes at most {MAX_EXPERTS}; it "
            "cannot be exported"
        )
    return found


def check_biases(model: StoredModel, architecture: LlamaCppArchitecture) -> None:
    """Refuses a model without a bias that llama.cpp wants, by a ColdpressError that names it."""
    for module in sorted(architecture.required):
        if f"layers.0.{module}.bias" not in model.tensors:
            raise ColdpressError(
                f"the model has no biases of {module}, and llama.cpp's architecture '{architecture.name}' wants them; "
                "it cannot be exported"
            )


def _check_extensions(found: LlamaCppArchitecture, spec: ModelSpec) -> None:
    """Refuses arithmetic that the architecture lacks, or has for other values; the error names the model's field."""
    lacking = sorted({name.removeprefix("model.") for name in features_of_model(spec)} - found.extensions)
    lacking += [f"residual {spec.residual}"] * (spec.residual not in found.residuals)
    lacking += ["layer_rotary"] * (bool(spec.layer_rotary) and spec.layer_rotary != _rotations(found, spec))
    lacking += ["windows in other layers"] * (found.windows and _window_pattern(found, spec) is None)
    if found.windows:
        is_largest = spec.num_hidden_layers == LARGEST_GEMMA[found.name]
        width = spec.hidden_size // spec.num_attention_heads if is_largest else spec.head_dim
        lacking += ["attention_scale"] * (not np.isclose(spec.attention_scale or spec.head_dim**-0.5, width**-0.5))
    if found.name == "gemma2":
        caps = {"attention_softcap": spec.attention_softcap, "logits_softcap": spec.logits_softcap}
        lacking += [f"lack of {name}" for name, value in caps.items() if value is None]
    if lacking:
        raise ColdpressError(
            f"llama.cpp's architecture '{found.name}' does not compute this model's {lacking[0]}; it would write other "
            "text, so the model cannot be exported"
        )


def _rotations(found: LlamaCppArchitecture, spec: ModelSpec) -> tuple[str, ...]:
    """Returns how the layers rotate in llama.cpp: SmolLM3's every fourth not at all, Gemma's by their windows."""
    layers = range(spec.num_hidden_layers)
    if found.windows:
        return tuple("local" if spec.window_of(layer) else "main" for layer in layers)
    return tuple("main" if (layer + 1) % 4 else "none" for layer in layers)


def _window_pattern(found: LlamaCppArchitecture, spec: ModelSpec) -> int | None:
    """Returns every how many layers the window is left out; 1 for a model without windows, None if no number fits."""
    has_window = [spec.window_of(layer) is not None for layer in range(spec.num_hidden_layers)]
    if not any(has_window):
        return 1
    patterns = (2,) if found.name == "gemma2" else range(2, spec.num_hidden_layers + 1)
    fits = (n for n in patterns if all(has == ((at + 1) % n > 0) for at, has in enumerate(has_window)))
    return next(fits, None)


def _check_experts(spec: ModelSpec, found: LlamaCppArchitecture) -> None:
    if router_class(spec).GGUF is None:
        raise ColdpressError(f"llama.cpp has no router '{spec.router_scores}'; the model cannot be exported")
    if found.normed is not None and spec.router_normed != found.normed:
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
    if spec.dense_layers != tuple(range(len(spec.dense_layers))) or (spec.dense_layers and not found.dense_first):
        where = "every layer but leading ones" if found.dense_first else "every layer"
        raise ColdpressError(
            f"llama.cpp's architecture '{found.name}' has experts in {where}, "
            f"and this model has none in layers {', '.join(map(str, spec.dense_layers))}; it cannot be exported"
        )


def _check_latents(spec: ModelSpec, found: LlamaCppArchitecture) -> None:
    if not math.isclose(spec.norm_eps, LATENT_EPS):
        raise ColdpressError(
            f"llama.cpp's architecture '{found.name}' has one epsilon for all norms, and this model has {LATENT_EPS:g} "
            f"in those of latents and {spec.norm_eps:g} in others; it cannot be exported"
        )
    lite = spec.num_hidden_layers in LITE_LAYERS or (spec.num_hidden_layers, spec.vocab_size) == LITE_MODEL
    if spec.q_lora_rank and lite:
        raise ColdpressError(
            f"llama.cpp's architecture '{found.name}' has no latents of queries in models of {spec.num_hidden_layers} "
            f"layers, and this model has them, {spec.q_lora_rank} wide; it cannot be exported"
        )


def roles(model: StoredModel, architecture: LlamaCppArchitecture) -> list[tuple[str, ...]]:
    """Lists the roles of each tensor (one, those of all experts, or those whose rows it joins) in the file's order:
    outside the layers, then by layer."""
    joined = {member: (name, at) for name, members in architecture.fused.items() for at, member in enumerate(members)}
    tensors: dict[tuple[int, str], list[tuple[int, str]]] = {}
    for number, role in enumerate(model.tensors):
        if role not in FREQUENCIES.values():
            parts = role.split(".")
            layer, module = (int(parts[1]), parts[2:]) if parts[0] == "layers" else (-1, parts)
            *before, name, kind = module[2:] if module[0] == "experts" else module
            name, place = joined.get(name, (name, number))
            tensors.setdefault((layer, ".".join((*before, name, kind))), []).append((place, role))
    return [tuple(role for _, role in sorted(tensors[key])) for key in sorted(tensors)]


def tensor_name(architecture: LlamaCppArchitecture, role: str) -> str:
    """Returns llama.cpp's name of a role's tensor; all experts share one. Raises ColdpressError if there is none."""
    found = names.tensor_name(architecture, role)
    if found is None:
        raise ColdpressError(
            f"llama.cpp's architecture '{architecture.name}' has no tensor for {role}; this model cannot be exported"
        )
    return found


def neighbours(rows: np.ndarray, heads: int) -> np.ndarray:
    """Moves rows [heads * head_dim, …] that are rotated together side by side; changes nothing where `heads` is 0."""
    if not heads:
        return rows
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def add_shape(writer: gguf.GGUFWriter, model: StoredModel) -> None:
    """Adds the sizes and constants that llama.cpp reads; the context ends at a sliding window where it ignores it."""
    spec, architecture = model.spec, architecture_of(model.spec)
    ignored = None if architecture.windows else spec.sliding_window
    writer.add_vocab_size(spec.vocab_size)
    writer.add_context_length(min(spec.max_position_embeddings, ignored or spec.max_position_embeddings))
    writer.add_embedding_length(spec.hidden_size)
    writer.add_block_count(spec.num_hidden_layers)
    writer.add_feed_forward_length(spec.dense_intermediate_size or spec.intermediate_size)
    if spec.is_mixture:
        _add_experts(writer, spec, architecture)
    writer.add_head_count(spec.num_attention_heads)
    if spec.is_latent:  # a key and a value for each head, as the matrix that makes them has
        writer.add_head_count_kv(spec.num_attention_heads)
        writer.add_key_length(spec.qk_nope_head_dim + spec.rotary_dim)
        writer.add_value_length(spec.v_head_dim)
        writer.add_kv_lora_rank(spec.kv_lora_rank)
        writer.add_q_lora_rank(spec.q_lora_rank)
    else:
        writer.add_head_count_kv(spec.num_key_value_heads)
        writer.add_key_length(spec.head_dim)
        writer.add_value_length(spec.head_dim)
    if not architecture.layer_norm:
        writer.add_layer_norm_rms_eps(spec.norm_eps)
    else:
        writer.add_layer_norm_eps(spec.norm_eps)
    _add_rotation(writer, model, architecture)
    _add_extensions(writer, model, architecture)


def _add_rotation(writer: gguf.GGUFWriter, model: StoredModel, architecture: LlamaCppArchitecture) -> None:
    spec, found = model.spec, frequencies(model)
    writer.add_rope_dimension_count(spec.rotary_dim)
    base, scale = base_and_scale(found)
    yarn = None if is_geometric(found) or not architecture.yarn else yarn_of(found)
    writer.add_rope_freq_base(yarn.base if yarn else base)
    if yarn:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(yarn.factor)
        writer.add_rope_scaling_orig_ctx_len(yarn.context_length)
    elif scale != 1:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(1 / scale)
    if architecture.longrope:
        writer.add_rope_scaling_attn_factors(spec.rotary_scaling)
    if architecture.yarn:
        _add_score_factors(writer, spec, yarn.factor if yarn else 1 / scale, mixed=yarn is not None)


def _add_score_factors(writer: gguf.GGUFWriter, spec: ModelSpec, factor: float, *, mixed: bool) -> None:
    """Adds constants a and m that give the model's factors on attention scores, and on cos and sin.

    With a scaling of the frequencies by f, llama.cpp has a unit u = 1 + 0.1 ln f. YaRN (`mixed`) multiplies cos and sin
    by a, or by a u if m is 0, and scores by the square of that times 1 + m ln f. Other scalings multiply cos and sin by
    a, and scores by the square of a u (1 + m ln f). All scores are divided by the root of a head's width.

    Raises:
        ColdpressError: if frequencies are not scaled, and scores are.
    """
    unit, width = 1 + 0.1 * math.log(factor), spec.qk_nope_head_dim + spec.rotary_dim
    wanted = math.sqrt((spec.attention_scale or width**-0.5) * math.sqrt(width))
    rest = wanted / (spec.rotary_scaling * (1 if mixed else unit))
    is_one = math.isclose(rest, 1)
    if factor == 1 and not is_one:
        raise ColdpressError(
            f"llama.cpp divides attention scores by the root of {width}, and this model multiplies them by "
            f"{spec.attention_scale}, and cos and sin by {spec.rotary_scaling}; it cannot be exported"
        )
    writer.add_rope_scaling_yarn_log_mul(0.0 if is_one else (rest - 1) / math.log(factor))
    writer.add_rope_scaling_attn_factors(spec.rotary_scaling / (unit if mixed and is_one else 1))


def _add_experts(writer: gguf.GGUFWriter, spec: ModelSpec, architecture: LlamaCppArchitecture) -> None:
    writer.add_expert_count(spec.num_experts)
    writer.add_expert_used_count(spec.num_experts_per_tok)
    if architecture.name != "llama":
        writer.add_expert_feed_forward_length(spec.intermediate_size)
    if spec.shared_intermediate_size:
        writer.add_expert_shared_feed_forward_length(spec.shared_intermediate_size)
    if architecture.normed is not None:
        return
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType[router_class(spec).GGUF or ""])
    writer.add_expert_weights_norm(spec.router_normed)
    writer.add_expert_weights_scale(spec.router_scaling)
    writer.add_leading_dense_block_count(len(spec.dense_layers))
    writer.add_expert_shared_count(spec.shared_intermediate_size // spec.intermediate_size)
    if spec.num_expert_groups > 1:
        writer.add_expert_group_count(spec.num_expert_groups)
        writer.add_expert_group_used_count(spec.num_expert_groups_per_tok)


def _add_extensions(writer: gguf.GGUFWriter, model: StoredModel, architecture: LlamaCppArchitecture) -> None:
    spec = model.spec
    if architecture.name in ("granite", "granitemoe"):
        writer.add_embedding_scale(spec.embedding_multiplier)
        writer.add_residual_scale(spec.residual_multiplier)
        writer.add_attention_scale(spec.attention_scale or spec.head_dim**-0.5)
        writer.add_logit_scale(spec.logits_scaling)
    if architecture.name == "gptneox":
        writer.add_parallel_residual(spec.residual == "parallel")
    if spec.attention_softcap is not None:
        writer.add_attn_logit_softcapping(spec.attention_softcap)
    if spec.logits_softcap is not None:
        writer.add_final_logit_softcapping(spec.logits_softcap)
    if architecture.windows:
        writer.add_sliding_window(spec.sliding_window or spec.max_position_embeddings)
        writer.add_sliding_window_pattern(_window_pattern(architecture, spec) or 1)
    if "local" in spec.layer_rotary:
        base, scale = base_and_scale(frequencies(model, "local"))
        if scale != 1:
            raise ColdpressError(
                "llama.cpp does not scale the rotary frequencies of layers with a window, and this model does; it "
                "cannot be exported"
            )
        writer.add_rope_freq_base_swa(base)


def rope_factors(model: StoredModel) -> dict[str, np.ndarray]:
    """Returns a factor float32 [rotary_dim / 2] that divides each frequency, where the settings do not give them.
    Raises ColdpressError if the architecture reads no factors."""
    found, architecture = frequencies(model), architecture_of(model.spec)
    if is_geometric(found) or (architecture.yarn and yarn_of(found)):
        return {}
    if not (architecture.scaled or architecture.longrope):
        raise ColdpressError(
            f"the model scales its rotary frequencies one by one, and llama.cpp's architecture '{architecture.name}' "
            "reads no factors for them; this model cannot be exported"
        )
    factors = (geometric(*base_and_scale(found), found.size) / found).astype(np.float32)
    tensors = LONGROPE if architecture.longrope else (TENSOR.ROPE_FREQS,)
    return {f"{gguf.TENSOR_NAMES[tensor]}.weight": factors for tensor in tensors}


@dataclass(frozen=True)
class Yarn:
    base: float
    factor: float
    context_length: int
    """The original one."""


def frequencies(model: StoredModel, kind: RotaryKind = "main") -> np.ndarray:
    """Returns a kind's frequencies, float64 [rotary_dim / 2]."""
    return model.values(FREQUENCIES[kind]).astype(np.float64)


def geometric(base: float, scale: float, count: int) -> np.ndarray:
    return scale * base ** (-np.arange(count) / count)


def base_and_scale(found: np.ndarray) -> tuple[float, float]:
    """Returns (base, factor on all frequencies) of a geometric sequence; of others, the base that its beginning has."""
    count, scale = found.size, float(found[0])
    if count == 1:
        return 10000.0, scale
    base = float((found[-1] / scale) ** (-count / (count - 1)))
    for rounded in _rounded(base):
        if np.allclose(geometric(rounded, scale, count), found, rtol=PRECISION, atol=0):
            return rounded, scale
    return _base_of(float(found[1]), count), 1.0


def is_geometric(found: np.ndarray) -> bool:
    """Tells whether a base and a factor on all frequencies give them."""
    return np.allclose(geometric(*base_and_scale(found), found.size), found, rtol=PRECISION, atol=0)


def yarn_of(found: np.ndarray) -> Yarn | None:
    """Returns settings of YaRN that give the frequencies; None if there are none. The base is that of the first two or
    that of the last two frequencies: YaRN divides both by the same in one pair."""
    count = found.size
    steps = np.arange(count)
    for base in sorted({_base_of(float(found[1]), count), _base_of(float(found[-1] / found[-2]), count)}):
        shares = found / geometric(base, 1.0, count)
        for first, last in product(range(count - 1), range(2 * count)):
            ramp = np.clip((steps - first) / max(0.001, last - first), 0, 1)
            lost, context_length = (1 - shares[-1]) / ramp[-1], _context_length(base, count, first, last)
            fits = 0 < lost < 1 and np.allclose(shares, 1 - lost * ramp, rtol=MIXED_PRECISION, atol=0)
            if fits and context_length is not None:
                return Yarn(base, 1 / (1 - lost), context_length)
    return None


def _context_length(base: float, count: int, first: int, last: int) -> int | None:
    """Returns an original context with which YaRN keeps frequencies up to `first` and divides those from `last` on."""
    turn = 2 * math.pi
    lowest = max(SLOW * turn * base ** ((last - 1) / count), FAST * turn * base ** (first / count) if first else 1.0)
    highest = FAST * turn * base ** ((first + 1) / count)
    if last < 2 * count - 1:  # there the rule ends
        highest = min(highest, SLOW * turn * base ** (last / count))
    found = round(math.sqrt(lowest * highest)) if lowest < highest else 0
    return found if lowest < found < highest else None


def _base_of(ratio: float, count: int) -> float:
    """Returns the roundest base of a sequence with this ratio of neighbours."""
    base = ratio**-count
    return next(rounded for rounded in _rounded(base) if np.isclose(rounded, base, rtol=count * PRECISION))


def _rounded(base: float) -> Iterator[float]:
    """Yields the number, roundest form first: float32 frequencies do not determine it more precisely."""
    yield from (float(f"{base:.{digits}g}") for digits in range(1, 10))
