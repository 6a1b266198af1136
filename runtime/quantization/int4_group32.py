"""int4_group32: groups of 32 values, each a float16 scale d and 16 bytes; value = (q - 8) * d.

The values and the layout are those of llama.cpp's Q4_0: the low nibbles of the 16 bytes are values 0..15, the high ones
16..31; d = (the signed value of largest magnitude) / -8; q = min(15, floor(x / d + 8.5)), with the scale before its
rounding to float16.
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

GROUP_BYTES = 2 + GROUP // 2

MAX_LOGIT_ERROR = 0.8
"""Error of dense logits, as a share of the largest logit, that rounding to this format does not explain: small real
models have half of it at most (EXPERIMENTS.md)."""
MAX_WEIGHT_ERROR = 0.3
"""Norm of a tensor's rounding error, as a share of the tensor's norm, above which `quantize` warns: trained models have
0.1 at most."""
SCALE_SIGNS: tuple[int, ...] = (1, -1)
"""Of a scale: there is one more level on one side, and the sign says which."""


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
    return float16(_scale(values)[..., 0], "int4_group32").astype(np.float32)


def nearest(values: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """The nearest values, float32 alike, that codes can say under given `scales`, which broadcast against `values`."""
    return nearest_level(values, scales, -8, 7) * scales


def pack(values: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Codes uint8 [n, nbytes(length)] of what `nearest` gave, float32 [n, length], under `scales` [n, groups]."""
    levels = nearest_level(padded(values), scales[:, :, None], -8, 7)
    return _packed((levels + 8).astype(np.uint8), scales.astype("<f2")).reshape(len(values), -1)


def _scale(values: np.ndarray) -> np.ndarray:
    """float32 [..., 1], before it is rounded to float16."""
    peak = np.abs(values).argmax(axis=-1)[..., None]  # the first one of equals, as in llama.cpp
    return np.take_along_axis(values, peak, axis=-1) / np.float32(-8)


def _encode(values: np.ndarray, codes: np.ndarray) -> None:
    x = padded(values)
    scale = _scale(x)
    q = np.minimum((x * inverse(scale) + np.float32(8.5)).astype(np.uint8), 15)
    codes[...] = _packed(q, float16(scale[..., 0], "int4_group32")).reshape(codes.shape)


def _packed(q: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """uint8 [n, groups, GROUP_BYTES] of q uint8 [n, groups, 32] and float16 scales [n, groups]."""
    out = np.empty((*scales.shape, GROUP_BYTES), np.uint8)
    out[:, :, :2] = scales[:, :, None].view(np.uint8)
    out[:, :, 2:] = q[:, :, : GROUP // 2] | (q[:, :, GROUP // 2 :] << 4)
    return out


def _decode(codes: np.ndarray, values: np.ndarray) -> None:
    count, length = values.shape
    packed = codes.reshape(count, groups(length), GROUP_BYTES)
    scale = np.ascontiguousarray(packed[:, :, :2]).view("<f2").astype(np.float32)
    nibbles = packed[:, :, 2:]
    q = np.concatenate([nibbles & 15, nibbles >> 4], axis=2).astype(np.float32)
    values[...] = ((q - np.float32(8)) * scale).reshape(count, -1)[:, :length]
