"""Latent attention: keys and values of all heads are made of one latent of each token (DeepSeek-AI 2024, DeepSeek-V2,
section 2.1).

The cache holds a token's latent, normed, and the rotated part of its key, which all heads share. A head's key is K c,
and its value is V c, of the latent c and two matrices of the head. Attention needs neither: a query q has the score
q (K c) = (K' q) c, and the sum of weighted values is V (sum of weighted latents). So each head has a query of the
latent's width, all heads share one key, and the value is the latent (section 2.1.2: both matrices are absorbed). Shape
letters: T tokens, H heads, L width of the latent, R rotary_dim, V v_head_dim.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from coldpress.runtime.arithmetic import rotate
from coldpress.runtime.decoder.matrix import Matrix, Resident
from coldpress.runtime.decoder.norms import Norm
from coldpress.schemas.model import ModelSpec

LATENT_EPS = 1e-6
"""The epsilon of the latents' norms: transformers has this one, whatever a model's other norms have."""
Rotary = tuple[np.ndarray, np.ndarray] | None


class Latents:
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
            x: What q_proj gives, float32 [T, n]: all heads, or the latent of the queries.
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
        found[..., spec.kv_lora_rank :] = self._rotated(x_THD[..., spec.qk_nope_head_dim :], rotary)
        return found

    def keys(self, x: np.ndarray, rotary: Rotary) -> np.ndarray:
        """Returns what the cache holds, float32 [T, 1, L + R], from what k_proj gives, float32 [T, L + R]."""
        latents, rest = np.split(x, [self._spec.kv_lora_rank], axis=-1)
        return np.concatenate((self._k_norm.apply(latents)[:, None], self._rotated(rest[:, None], rotary)), axis=-1)

    def mixed(self, x_THL: np.ndarray, parts: Sequence[slice]) -> np.ndarray:
        """Returns the mixed heads, float32 [T, H * V], from weighted sums of the cache, float32 [T, H, L + R]."""
        width = self._spec.kv_lora_rank
        heads = (
            matrix.apply(np.ascontiguousarray(x_THL[:, head, :width]), parts)
            for head, matrix in enumerate(self._of_values)
        )
        return np.concatenate(list(heads), axis=1)

    def _rotated(self, x: np.ndarray, rotary: Rotary) -> np.ndarray:
        return x if rotary is None else rotate(x, *rotary, self._spec.rotary_pairs == "neighbours")


def _norm(weight: np.ndarray) -> Norm:
    return Norm(weight, None, LATENT_EPS, centred=False)
