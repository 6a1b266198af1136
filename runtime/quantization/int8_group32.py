"""int8_group32: groups of 32 values, each a float16 scale d and 32 signed bytes q; value = q * d.

The values and the layout are those of llama.cpp's Q8_0: d = (largest magnitude) / 127, q = x / d rounded half away from
zero, with the scale before its rounding to float16.
"""

import numpy as np

from coldpress.runtime.quantization._groups import (
    GROUP,
    decode_blocks,
    encode_blocks,
    finite_scales,
    float16,
    groups,
    inverse,
    nearest_level,
    padded,
)

GROUP_BYTES = 2 + GROUP

MAX_LOGIT_ERROR = 0.1
"""Error of dense logits, as a share of the largest logit, that rounding to this format does not explain: small real
models have a fifth of it at most (EXPERIMENTS.md)."""
MAX_WEIGHT_ERROR = 0.02
"""Norm of a tensor's rounding error, as a share of the tensor's norm, above which `quantize` warns: trained models have
0.006 at most."""
SCALE_SIGNS: tuple[int, ...] = (1,)
"""Of a scale: levels are symmetric, so the other sign says nothing else."""


def nbytes(length: int) -> int:
    """Bytes of one slice of `length` values; the last group is padded with zeros."""
    return groups(length) * GROUP_BYTES


def encode(values: np.ndarray) -> np.ndarray:
    """float32[n, length] -> uint8[n, nbytes(length)].

    Raises:
        ColdpressError: if a group's scale is beyond float16.
    """
    return encode_blocks(values, nbytes(values.shape[1]), _encode)


def decode(codes: np.ndarray, length: int) -> np.ndarray:
    """uint8[n, nbytes(length)] -> float32[n, length].

    Raises:
        ColdpressError: if `codes` has another number of bytes per slice.
    """
    return decode_blocks(codes, length, nbytes(length), _decode)


def finite(codes: np.ndarray) -> bool:
    """Whether uint8[n, nbytes(length)] decode to finite values."""
    return finite_scales(codes, GROUP_BYTES)


def scales(values: np.ndarray) -> np.ndarray:
    """Scale of each group, float32 [n] as it will be stored, from float32 [n, at most 32].

    Raises:
        ColdpressError: if a scale is beyond float16.
    """
    return float16(_scale(values)[..., 0], "int8_group32").astype(np.float32)


def nearest(values: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """The nearest values, float32 alike, that codes can say under given `scales`, which broadcast against `values`."""
    return nearest_level(values, scales, -127, 127) * scales


def pack(values: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Codes uint8 [n, nbytes(length)] of what `nearest` gave, float32 [n, length], under `scales` [n, groups]."""
    levels = nearest_level(padded(values), scales[:, :, None], -127, 127)
    return _packed(levels, scales.astype("<f2")).reshape(len(values), -1)


def _scale(values: np.ndarray) -> np.ndarray:
    """float32 [..., 1], before it is rounded to float16."""
    return np.abs(values).max(axis=-1, keepdims=True) / np.float32(127)


def _encode(values: np.ndarray, codes: np.ndarray) -> None:
    x = padded(values)
    scale = _scale(x)
    stored = float16(scale[..., 0], "int8_group32")
    codes[...] = _packed(_round_half_away(x * inverse(scale)), stored).reshape(codes.shape)


def _packed(q: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """uint8 [n, groups, GROUP_BYTES] of whole q [n, groups, 32] and float16 scales [n, groups]."""
    out = np.empty((*scales.shape, GROUP_BYTES), np.uint8)
    out[:, :, :2] = scales[:, :, None].view(np.uint8)
    out[:, :, 2:] = q.astype(np.int8).view(np.uint8)
    return out


def _decode(codes: np.ndarray, values: np.ndarray) -> None:
    count, length = values.shape
    packed = codes.reshape(count, groups(length), GROUP_BYTES)
    scale = np.ascontiguousarray(packed[:, :, :2]).view("<f2").astype(np.float32)
    whole = packed[:, :, 2:].view(np.int8).astype(np.float32) * scale
    values[...] = whole.reshape(count, -1)[:, :length]


def _round_half_away(x: np.ndarray) -> np.ndarray:
    whole = np.trunc(x)  # x - whole is exact, which trunc(x + 0.5) is not just below one half
    return whole + np.where(np.abs(x - whole) >= 0.5, np.sign(x), np.float32(0))
