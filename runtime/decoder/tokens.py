"""The tokens of one pass through the layers, the sequences they belong to, and the KV caches."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from coldpress.runtime.dram.kv_cache import DEFAULT_KV_CACHE, head_bytes
from coldpress.schemas.layout import KvCacheFormat
from coldpress.schemas.model import ModelSpec, RotaryKind


@dataclass
class KvCache:
    """Keys and values of all layers, filled up to `length`.

    Each is float16 [num_hidden_layers, context, kv_heads, head_dim], or uint8 with a head's int8_group32 bytes as the
    last axis. With latent attention both are one array: a value is the latent at the beginning of the key.
    """

    keys: np.ndarray
    values: np.ndarray
    length: int = 0

    @property
    def context_length(self) -> int:
        return self.keys.shape[1]


@dataclass(frozen=True)
class Span:
    """Consecutive tokens of one sequence in a pass; they follow the tokens in its cache."""

    cache: KvCache
    """The sequence's cache; the caller advances its `length` after the pass has gone through all layers."""
    num_tokens: int


def new_cache(spec: ModelSpec, context_length: int, kind: KvCacheFormat = DEFAULT_KV_CACHE) -> KvCache:
    width, dtype = (spec.head_dim, np.float16) if kind == "fp16" else (head_bytes(spec.head_dim, kind), np.uint8)
    shape = (spec.num_hidden_layers, context_length, spec.num_key_value_heads, width)
    keys = np.zeros(shape, dtype)
    return KvCache(keys, keys if spec.is_latent else np.zeros(shape, dtype))


Prior = Callable[[int, np.ndarray], np.ndarray]
"""(layer, its router's scores, float32 [T, E]) -> the scores that its router chooses by (runtime/routing)."""


@dataclass(frozen=True)
class Tokens:
    """Consecutive tokens of one or more sequences, which go through the layers together."""

    spans: Sequence[Span]
    rotary: Mapping[RotaryKind, tuple[np.ndarray, np.ndarray]]
    """cos and sin of their positions, by the kinds of rotation that layers use."""
    parts: Sequence[slice] = ()
    """Token ranges that must give the same bits alone and together (more than FEW_TOKENS tokens only)."""
    kept_T: np.ndarray | None = None
    """The tokens whose units the cache admits, bool [T]; None for all tokens."""
    is_dense: bool = False
    """True if all tokens use all units, so that no selector needs a signal."""
    prior: Prior | None = None
    """Changes the scores by which a layer's router chooses experts; None for the router's own choice."""
