"""Attention of a decoder layer and the cache of its keys and values, for one token or a chunk of consecutive ones.

Covers what the supported architectures differ in: grouped queries, biases, per-head q/k norms (Qwen3, before rotation),
rotary or no positions, sliding windows. Like the MLP it knows roles and slices only: matrices whose columns are the
units of a family are added up from blocks (ActiveFlow 2.1, TEAL), the others are resident. Shape letters: T tokens, N
hidden_size, H heads, D head_dim.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from coldpress.runtime.decoder.arithmetic import rms_norm, rotate
from coldpress.runtime.decoder.blocks import Blocks, column_sums
from coldpress.runtime.decoder.matrix import Resident
from coldpress.runtime.kernels import FEW_TOKENS, attention
from coldpress.runtime.kernels.encode import encode_heads
from coldpress.runtime.plan.kv_cache import DEFAULT_KV_CACHE, head_bytes
from coldpress.schemas.errors import ArtifactError, ColdpressError
from coldpress.schemas.families import FAMILIES, resident_roles, slices
from coldpress.schemas.layout import KvCacheFormat
from coldpress.schemas.model import ATTENTION_ROLES, MatrixRole, ModelSpec


@dataclass
class KvCache:
    """Keys and values of all layers, [num_hidden_layers, context, kv_heads, head_dim], filled to `length`: float16, or
    uint8 of int8_group32, whose last axis is a head's bytes."""

    keys: np.ndarray
    values: np.ndarray
    length: int = 0

    @property
    def context_length(self) -> int:
        """Tokens that fit."""
        return self.keys.shape[1]


@dataclass(frozen=True)
class Span:
    """Consecutive tokens of one sequence among those of a pass: the next ones behind what its cache holds."""

    cache: KvCache
    """Of all layers; its `length` is for the caller to advance, once the pass is through all layers."""
    num_tokens: int


def new_cache(spec: ModelSpec, context_length: int, kind: KvCacheFormat = DEFAULT_KV_CACHE) -> KvCache:
    """An empty cache for `context_length` tokens."""
    width, dtype = (spec.head_dim, np.float16) if kind == "fp16" else (head_bytes(spec.head_dim, kind), np.uint8)
    shape = (spec.num_hidden_layers, context_length, spec.num_key_value_heads, width)
    return KvCache(np.zeros(shape, dtype), np.zeros(shape, dtype))


class Attention:
    """One layer's attention: what of it is resident, and what comes in blocks."""

    def __init__(self, layer: int, spec: ModelSpec, families: tuple[str, ...], resident: Resident) -> None:
        """Takes the resident tensors of `layer`.

        Raises:
            ArtifactError: if one of its matrices is in two families, or in one that is not made of columns.
        """
        prefix = f"layers.{layer}."
        self._layer, self._spec = layer, spec
        self._families = [FAMILIES[name] for name in families if set(FAMILIES[name].roles) & set(ATTENTION_ROLES)]
        on_flash = [piece for family in self._families for piece in slices(family.name, spec)]
        if len({piece.role for piece in on_flash}) != len(on_flash) or any(p.axis != "column" for p in on_flash):
            names = ", ".join(family.name for family in self._families)
            raise ArtifactError(
                f"the artifact keeps {names} on flash, expected each matrix of attention in one of them, as columns"
            )
        self._matrices = {
            role: resident.matrix(prefix + role)
            for role in resident_roles([family.name for family in self._families], spec)
            if role in ATTENTION_ROLES
        }
        self._biases = {role: resident.optional_vector(f"{prefix}{role}.bias") for role in ATTENTION_ROLES}
        self._q_norm, self._k_norm = (resident.optional_vector(f"{prefix}{name}_norm.weight") for name in "qk")

    def apply(
        self,
        x_TN: np.ndarray,
        rotary: tuple[np.ndarray, np.ndarray] | None,
        spans: Sequence[Span],
        blocks: Blocks,
        parts: Sequence[slice] = (),
    ) -> np.ndarray:
        """The attention's output for the next tokens of some sequences; their keys and values enter the caches.

        Args:
            x_TN: Input after the norm, float32 [T, hidden_size], the spans' tokens one after the other.
            rotary: cos and sin of their positions; None with learned positions.
            spans: What sequences they belong to.
            blocks: Gives the units of the families that hold its matrices.
            parts: As of `Matrix.apply`.

        Returns:
            float32 [T, hidden_size].
        """
        projected = self._project(("q_proj", "k_proj", "v_proj"), x_TN, blocks, parts)
        queries = self._heads(projected["q_proj"], self._q_norm, rotary)
        keys = self._heads(projected["k_proj"], self._k_norm, rotary)
        values = self._heads(projected["v_proj"], None, None)
        mixed, first = np.empty_like(queries), 0
        for span in spans:
            of_span = slice(first, first + span.num_tokens)
            self._append(span, keys[of_span], values[of_span])
            mixed[of_span] = self._attend(span, queries[of_span])
            first = of_span.stop
        return self._project(("o_proj",), mixed.reshape(len(x_TN), -1), blocks, parts)["o_proj"]

    def _append(self, span: Span, keys: np.ndarray, values: np.ndarray) -> None:
        """Writes keys and values, float32 [tokens, kv_heads, head_dim], behind what the span's cache holds."""
        place = slice(span.cache.length, span.cache.length + span.num_tokens)
        for kept, given in ((span.cache.keys, keys), (span.cache.values, values)):
            if kept.dtype == np.uint8:
                encode_heads(given, kept[self._layer, place])
            else:
                self._append_halves(given, kept[self._layer, place])

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
        """float32 [tokens, heads, head_dim]: each token sees what comes before it in its sequence, and itself."""
        keys, values = span.cache.keys[self._layer], span.cache.values[self._layer]
        length, window = span.cache.length, self._spec.sliding_window
        if span.num_tokens > FEW_TOKENS:
            return attention.attend_prefill(queries, keys, values, length + span.num_tokens, window)
        each = (attention.attend(q, keys, values, length + 1 + at, window) for at, q in enumerate(queries))
        return np.stack(list(each))

    def _project(
        self, roles: tuple[MatrixRole, ...], x_TN: np.ndarray, blocks: Blocks, parts: Sequence[slice]
    ) -> dict[MatrixRole, np.ndarray]:
        """Outputs of matrices that take the same input, biases added."""
        found: dict[MatrixRole, np.ndarray] = {
            role: self._matrices[role].apply(x_TN, parts) for role in roles if role in self._matrices
        }
        for family in self._families:
            wanted: list[MatrixRole] = [role for role in family.roles if role in roles]
            if wanted:
                sums = column_sums(self._layer, family, wanted, self._spec, x_TN, blocks)
                found |= {role: self._with_bias(role, total) for role, total in sums.items()}
        return found

    def _with_bias(self, role: MatrixRole, values: np.ndarray) -> np.ndarray:
        bias = self._biases[role]
        return values if bias is None else values + bias

    def _heads(
        self, x: np.ndarray, norm: np.ndarray | None, rotary: tuple[np.ndarray, np.ndarray] | None
    ) -> np.ndarray:
        """[T, H * D] -> [T, H, D], normed per head and rotated, contiguous."""
        x_THD = x.reshape(len(x), -1, self._spec.head_dim)
        if norm is not None:
            x_THD = rms_norm(x_THD, norm, self._spec.norm_eps)
        return x_THD if rotary is None else rotate(x_THD, *rotary)
