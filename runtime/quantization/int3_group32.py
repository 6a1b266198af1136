"""int3_group32: groups of 32 values, each a float16 scale d and 12 bytes; value = (q - 4) * d.

d = (the signed value of largest magnitude) / -4; q = min(7, floor(x / d + 4.5)), with the scale before its rounding to
float16, as in int4_group32. The 12 bytes are the low two bits of each q, value i in bits 2 (i / 8) of byte i mod 8, and
then the high bits, value i in bit i / 4 of byte 8 + i mod 4; / drops the rest.
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

GROUP_BYTES = 2 + 3 * GROUP // 8
LOW_BYTES = GROUP // 4

MAX_LOGIT_ERROR = 1.0
"""Error of dense logits, as a share of the largest logit, that rounding to this format does not explain: small real
models have half of it at most (EXPERIMENTS.md)."""
MAX_WEIGHT_ERROR = 0.45
"""Norm of a tensor's rounding error, as a share of the tensor's norm, above which `quantize` warns: trained models have
0.22 at most."""
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
    return float16(_scale(values)[..., 0], "int3_group32").astype(np.float32)


def nearest(values: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """The nearest values, float32 alike, that codes can say under given `scales`, which broadcast against `values`."""
    return nearest_level(values, scales, -4, 3) * scales


def pack(values: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Codes uint8 [n, nbytes(length)] of what `nearest` gave, float32 [n, length], under `scales` [n, groups]."""
    levels = nearest_level(padded(values), scales[:, :, None], -4, 3)
    return _packed((levels + 4).astype(np.uint8), scales.astype("<f2")).reshape(len(values), -1)


def _scale(values: np.ndarray) -> np.ndarray:
    """float32 [..., 1], before it is rounded to float16."""
    peak = np.abs(values).argmax(axis=-1)[..., None]
    return np.take_along_axis(values, peak, axis=-1) / np.float32(-4)


def _encode(values: np.ndarray, codes: np.ndarray) -> None:
    x = padded(values)
    scale = _scale(x)
    q = np.minimum((x * inverse(scale) + np.float32(4.5)).astype(np.uint8), 7)
    codes[...] = _packed(q, float16(scale[..., 0], "int3_group32")).reshape(codes.shape)


def _packed(q: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """uint8 [n, groups, GROUP_BYTES] of q uint8 [n, groups, 32] and float16 scales [n, groups]."""
    out = np.zeros((*scales.shape, GROUP_BYTES), np.uint8)
    out[:, :, :2] = scales[:, :, None].view(np.uint8)
    for index in range(4):
        out[:, :, 2 : 2 + LOW_BYTES] |= (q[:, :, 8 * index : 8 * index + 8] & 3) << (2 * index)
    for index in range(8):
        out[:, :, 2 + LOW_BYTES :] |= (q[:, :, 4 * index : 4 * index + 4] >> 2) << index
    return out


def _decode(codes: np.ndarray, values: np.ndarray) -> None:
    count, length = values.shape
    packed = codes.reshape(count, groups(length), GROUP_BYTES)
    scale = np.ascontiguousarray(packed[:, :, :2]).view("<f2").astype(np.float32)
    low, high = packed[:, :, 2 : 2 + LOW_BYTES], packed[:, :, 2 + LOW_BYTES :]
    lows = np.concatenate([low >> (2 * index) & 3 for index in range(4)], axis=2)
    highs = np.concatenate([high >> index & 1 for index in range(8)], axis=2)
    q = (lows | highs << 2).astype(np.float32)
    values[...] = ((q - np.float32(4)) * scale).reshape(count, -1)[:, :length]
