"""Attention of a decoder layer and the cache of its keys and values, for one token or a chunk of consecutive ones.

Covers what the supported architectures differ in: grouped queries, biases, per-head q/k norms (Qwen3, before rotation),
rotary or no positions, sliding windows. Shape letters: T tokens, N hidden_size, H heads, D head_dim.
"""

from dataclasses import dataclass

import numpy as np

from runtime.kernels import attention
from runtime.model.arithmetic import rms_norm, rotate
from runtime.model.matrix import Resident
from schemas.errors import ColdpressError
from schemas.model import ModelSpec


@dataclass
class KvCache:
    """Keys and values of all layers, float16 [num_hidden_layers, context, kv_heads, head_dim], filled to `length`."""

    keys: np.ndarray
    values: np.ndarray
    length: int = 0

    @property
    def context_length(self) -> int:
        """Tokens that fit."""
        return self.keys.shape[1]


def new_cache(spec: ModelSpec, context_length: int) -> KvCache:
    """An empty cache for `context_length` tokens."""
    shape = (spec.num_hidden_layers, context_length, spec.num_key_value_heads, spec.head_dim)
    return KvCache(np.zeros(shape, np.float16), np.zeros(shape, np.float16))


class Attention:
    """One layer's attention; all of its tensors are resident."""

    def __init__(self, layer: int, spec: ModelSpec, resident: Resident) -> None:
        """Takes the tensors of `layer`."""
        prefix = f"layers.{layer}."
        self._layer = layer
        self._spec = spec
        self._q, self._k, self._v, self._o = (resident.matrix(f"{prefix}{name}_proj") for name in "qkvo")
        self._q_norm, self._k_norm = (resident.optional_vector(f"{prefix}{name}_norm.weight") for name in "qk")

    def apply(self, x_TN: np.ndarray, rotary: tuple[np.ndarray, np.ndarray] | None, cache: KvCache) -> np.ndarray:
        """The attention's output for tokens at positions `cache.length` and on; their keys and values enter the cache.

        Args:
            x_TN: Input after the norm, float32 [T, hidden_size].
            rotary: cos and sin of these positions; None with learned positions.
            cache: All layers' cache; its `length` is the caller's to advance.

        Returns:
            float32 [T, hidden_size].
        """
        start, stop = cache.length, cache.length + len(x_TN)
        keys, values = cache.keys[self._layer], cache.values[self._layer]
        with np.errstate(over="raise"):
            try:
                keys[start:stop] = self._heads(self._k.apply(x_TN), self._k_norm, rotary)
                values[start:stop] = self._heads(self._v.apply(x_TN), None, None)
            except FloatingPointError as error:
                raise ColdpressError(
                    f"layer {self._layer}: a key or value is beyond 65504, the largest number of the fp16 KV cache; "
                    "this model cannot be run"
                ) from error
        queries = self._heads(self._q.apply(x_TN), self._q_norm, rotary)
        if len(x_TN) == 1:
            mixed = attention.attend(queries[0], keys, values, stop, self._spec.sliding_window)
        else:
            mixed = attention.attend_prefill(queries, keys, values, stop, self._spec.sliding_window)
        return self._o.apply(mixed.reshape(len(x_TN), -1))

    def _heads(
        self, x: np.ndarray, norm: np.ndarray | None, rotary: tuple[np.ndarray, np.ndarray] | None
    ) -> np.ndarray:
        """[T, H * D] -> [T, H, D], normed per head and rotated, contiguous."""
        x_THD = x.reshape(len(x), -1, self._spec.head_dim)
        if norm is not None:
            x_THD = rms_norm(x_THD, norm, self._spec.norm_eps)
        return x_THD if rotary is None else rotate(x_THD, *rotary)
