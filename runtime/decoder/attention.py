"""Attention of a decoder layer, for one token or a chunk of consecutive tokens of each sequence.

Covers the differences among the supported architectures: grouped queries, biases, norms of q and k before rotation
(over each head as in Qwen3, or over all heads together as in OLMo 2), rotary or no positions, frequencies that differ
between layers, a scale or a soft cap of scores, sinks (gpt-oss), sliding windows in all layers or only in some, and
keys and values that are made of latents. Like the MLP it knows roles and slices only: products with
matrices whose columns are units of a family are summed from blocks (ActiveFlow 2.1, TEAL); the other matrices are
resident. Shape letters: T tokens, N hidden_size, H heads, D head_dim.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from coldpress.runtime.arithmetic import rotate
from coldpress.runtime.decoder.blocks import Block, ColumnSums, widths_of
from coldpress.runtime.decoder.matrix import Matrix, Norm, Resident, qk_norm_of
from coldpress.runtime.decoder.tokens import Span, Tokens
from coldpress.runtime.kernels import FEW_TOKENS, attention
from coldpress.runtime.store.facts import Key
from coldpress.schemas.errors import ArtifactError, ColdpressError
from coldpress.schemas.families import FAMILIES, resident_roles, slices
from coldpress.schemas.model import ATTENTION_ROLES, MatrixRole, ModelSpec

INPUTS: tuple[MatrixRole, ...] = ("q_proj", "k_proj", "v_proj")
OUTPUT: tuple[MatrixRole, ...] = ("o_proj",)
LATENT_EPS = 1e-6
"""Epsilon of the latents' norms: transformers fixes it, whatever a model's other norms use."""
Rotary = tuple[np.ndarray, np.ndarray] | None


class Attention:
    def __init__(self, layer: int, spec: ModelSpec, families: tuple[str, ...], resident: Resident) -> None:
        """Takes the resident tensors of `layer`. Raises `ArtifactError` if two families hold one matrix, or a family
        holds it by rows instead of columns."""
        prefix = f"layers.{layer}."
        self._layer, self._spec = layer, spec
        self._scores: dict[str, Any] = {
            "window": spec.window_of(layer),
            "scale": spec.attention_scale,
            "softcap": spec.attention_softcap,
            "sinks": resident.vector(f"{prefix}attention.sinks") if spec.attention_sinks else None,
        }
        found = [FAMILIES[name] for name in families if set(FAMILIES[name].roles) & set(ATTENTION_ROLES)]
        # o_proj takes the mixed heads, so its family is requested after those of q, k and v
        found.sort(key=lambda family: family.roles == OUTPUT)
        on_flash = [piece for family in found for piece in slices(family.name, spec)]
        if len({piece.role for piece in on_flash}) != len(on_flash) or any(p.axis != "column" for p in on_flash):
            names = ", ".join(family.name for family in found)
            raise ArtifactError(
                f"the artifact keeps {names} on flash, expected each matrix of attention in one of them, as columns"
            )
        self._matrices = {
            role: resident.matrix(prefix + role)
            for role in resident_roles([family.name for family in found], spec)
            if role in ATTENTION_ROLES
        }
        self.widths = {family.name: widths_of(family.name, spec) for family in found}
        """By family on flash: the number of rows of each of its matrices."""
        self.requests = tuple((layer, family.name) for family in found)
        """The parts whose units each token requests, in order."""
        self._latents = Latents(layer, spec, resident) if spec.is_latent else None
        self.biases: dict[MatrixRole, np.ndarray | None] = {
            role: resident.optional_vector(f"{prefix}{role}.bias") for role in ATTENTION_ROLES
        }
        if self._latents is None:
            self._q_norm, self._k_norm = (qk_norm_of(layer, f"{name}_norm", spec, resident) for name in "qk")

    def begin(self, x_TN: np.ndarray, tokens: Tokens) -> "AttentionWork":
        """Begins work on the normed input, float32 [T, hidden_size]; the work appends to the tokens' KV caches."""
        return AttentionWork(self, x_TN, tokens)

    def mix(self, projected: dict[MatrixRole, np.ndarray], tokens: Tokens) -> np.ndarray:
        """Computes the mixed heads, float32 [T, H * D], from the outputs of q, k and v, and fills the KV caches."""
        rotary = tokens.rotary.get(self._spec.rotary_of(self._layer))
        if self._latents is not None:
            queries = self._latents.queries(projected["q_proj"], rotary, tokens.parts)
            keys = values = self._latents.keys(projected["k_proj"], rotary)
        else:
            queries = self._heads(projected["q_proj"], self._q_norm, rotary)
            keys = self._heads(projected["k_proj"], self._k_norm, rotary)
            values = self._heads(projected["v_proj"], None, None)
        mixed, first = np.empty_like(queries), 0
        for span in tokens.spans:
            of_span = slice(first, first + span.num_tokens)
            self._append(span, keys[of_span], values[of_span])
            mixed[of_span] = self._attend(span, queries[of_span])
            first = of_span.stop
        if self._latents is not None:
            return self._latents.mixed(mixed, tokens.parts)
        return mixed.reshape(len(mixed), -1)

    def projected(
        self, roles: Sequence[MatrixRole], x_TN: np.ndarray, parts: Sequence[slice]
    ) -> dict[MatrixRole, np.ndarray]:
        return {role: self._matrices[role].apply(x_TN, parts) for role in roles if role in self._matrices}

    def _append(self, span: Span, keys: np.ndarray, values: np.ndarray) -> None:
        """Appends keys and values, float32 [tokens, kv_heads, head_dim], to the span's cache. The cache's length stays
        as it is until the pass has gone through all layers (`Decoder._forward`)."""
        place = slice(span.cache.length, span.cache.length + span.num_tokens)
        once = ((span.cache.keys, keys),)  # latents are keys and values at once
        for cached, new in once if self._latents else (*once, (span.cache.values, values)):
            if cached.dtype == np.uint8:
                attention.encode_heads(new, cached[self._layer, place])
            else:
                self._append_halves(new, cached[self._layer, place])

    def _append_halves(self, values: np.ndarray, place: np.ndarray) -> None:
        with np.errstate(over="raise"):
            try:
                place[:] = values
            except FloatingPointError as error:
                raise ColdpressError(
                    f"layer {self._layer}: a key or value is beyond 65504, the largest number of the fp16 KV cache; "
                    "this model cannot be run"
                ) from error

    def _attend(self, span: Span, queries: np.ndarray) -> np.ndarray:
        """Attends causally within the span's sequence; float32 [tokens, heads, head_dim]. Few tokens are computed one
        by one, so that each has the bits that it has alone."""
        keys, values = span.cache.keys[self._layer], span.cache.values[self._layer]
        length = span.cache.length
        if span.num_tokens > FEW_TOKENS:
            return attention.attend_prefill(queries, keys, values, length + span.num_tokens, **self._scores)
        each = (attention.attend(q, keys, values, length + 1 + at, **self._scores) for at, q in enumerate(queries))
        return np.stack(list(each))

    def _heads(self, x: np.ndarray, norm: Norm | None, rotary: Rotary) -> np.ndarray:
        """Splits [T, H * D] into heads [T, H, D], normed and rotated, contiguous."""
        by_head = self._spec.qk_norm != "width"
        if norm is not None and not by_head:
            x = norm.apply(x)
        x_THD = x.reshape(len(x), -1, self._spec.head_dim)
        if norm is not None and by_head:
            x_THD = norm.apply(x_THD)
        return _rotated(x_THD, rotary, self._spec)


class AttentionWork:
    experts = None

    def __init__(self, attention: Attention, x_TN: np.ndarray, tokens: Tokens) -> None:
        self._attention, self._x_TN, self._tokens = attention, x_TN, tokens
        self._projected = attention.projected(INPUTS, x_TN, tokens.parts)
        self._columns: dict[str, ColumnSums] = {}
        self._mixed: np.ndarray | None = None

    def signal(self, key: Key) -> np.ndarray:
        widths = self._attention.widths[key[1]]
        signal = self._mix() if "o_proj" in widths else self._x_TN
        self._columns[key[1]] = ColumnSums(widths, signal, self._attention.biases)
        return signal

    def add(self, key: Key, block: Block) -> None:
        self._columns[key[1]].add(block)

    def result(self) -> np.ndarray:
        mixed = self._mix()
        self._projected |= self._attention.projected(OUTPUT, mixed, self._tokens.parts)
        self._finish_columns()
        return self._projected["o_proj"]

    def _mix(self) -> np.ndarray:
        """Returns the mixed heads; the first call also appends keys and values to the caches."""
        if self._mixed is None:
            self._finish_columns()
            self._mixed = self._attention.mix(self._projected, self._tokens)
        return self._mixed

    def _finish_columns(self) -> None:
        for columns in self._columns.values():
            self._projected |= columns.outputs()


class Latents:
    """Keys and values of all heads, made of one latent of each token (DeepSeek-AI 2024, DeepSeek-V2, section 2.1).

    The cache holds a token's latent, normed, and the rotated part of its key, which all heads share. For a latent c, a
    head's key is K c and its value V c, with two matrices of the head. Attention needs neither: a query q has the score
    q (K c) = (K' q) c, and the sum of weighted values is V (sum of weighted latents). So each head has a query of the
    latent's width, all heads share one key, and the value is the latent (section 2.1.2: both matrices are absorbed).
    Shape letters: L width of the latent, R rotary_dim, V v_head_dim.
    """

    def __init__(self, layer: int, spec: ModelSpec, resident: Resident) -> None:
        prefix = f"layers.{layer}."
        self._spec = spec
        self._k_norm = _norm(resident.vector(f"{prefix}k_norm.weight"))
        has_latent = spec.q_lora_rank > 0
        self._q_norm = _norm(resident.vector(f"{prefix}q_norm.weight")) if has_latent else None
        self._q_b = resident.matrix(f"{prefix}q_b_proj") if has_latent else None
        self._of_keys, self._of_values = list[Matrix](), list[Matrix]()
        both, height = resident.matrix(f"{prefix}kv_b_proj"), spec.qk_nope_head_dim + spec.v_head_dim
        for start in range(0, len(both.codes), height):
            of_head = both.codes[start : start + height]
            self._of_keys.append(replace(both, codes=of_head[: spec.qk_nope_head_dim]))
            self._of_values.append(replace(both, codes=of_head[spec.qk_nope_head_dim :]))

    def queries(self, x: np.ndarray, rotary: Rotary, parts: Sequence[slice]) -> np.ndarray:
        """Returns each head's query of latents and rotated keys, float32 [T, H, L + R].

        Args:
            x: Output of q_proj, float32 [T, n]: all heads, or the latent of the queries.
            parts: As in `Matrix.apply`.
        """
        if self._q_b is not None and self._q_norm is not None:
            x = self._q_b.apply(self._q_norm.apply(x), parts)
        spec = self._spec
        x_THD = x.reshape(len(x), spec.num_attention_heads, -1)
        found = np.empty((len(x), spec.num_attention_heads, spec.head_dim), np.float32)
        for head, matrix in enumerate(self._of_keys):
            own = np.ascontiguousarray(x_THD[:, head, : spec.qk_nope_head_dim])
            found[:, head, : spec.kv_lora_rank] = matrix.apply_transposed(own, parts)
        found[..., spec.kv_lora_rank :] = _rotated(x_THD[..., spec.qk_nope_head_dim :], rotary, spec)
        return found

    def keys(self, x: np.ndarray, rotary: Rotary) -> np.ndarray:
        """Returns the entries of the cache, float32 [T, 1, L + R], from the output of k_proj, float32 [T, L + R]."""
        latents, rest = np.split(x, [self._spec.kv_lora_rank], axis=-1)
        return np.concatenate(
            (self._k_norm.apply(latents)[:, None], _rotated(rest[:, None], rotary, self._spec)), axis=-1
        )

    def mixed(self, x_THL: np.ndarray, parts: Sequence[slice]) -> np.ndarray:
        """Returns the mixed heads, float32 [T, H * V], from weighted sums of the cache, float32 [T, H, L + R]."""
        width = self._spec.kv_lora_rank
        heads = (
            matrix.apply(np.ascontiguousarray(x_THL[:, head, :width]), parts)
            for head, matrix in enumerate(self._of_values)
        )
        return np.concatenate(list(heads), axis=1)


def _norm(weight: np.ndarray) -> Norm:
    return Norm(weight, None, LATENT_EPS, centred=False)


def _rotated(x: np.ndarray, rotary: Rotary, spec: ModelSpec) -> np.ndarray:
    return x if rotary is None else rotate(x, *rotary, spec.rotary_pairs == "neighbours")
