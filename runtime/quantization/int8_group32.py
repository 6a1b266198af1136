"""int8_group32: groups of 32 values, each a float16 scale d and 32 signed bytes q; value = q * d.

The values and the layout are those of llama.cpp's Q8_0: d = (largest magnitude) / 127, q = x / d rounded half away from
zero, with the scale before its rounding to float16.
"""

import numpy as np

from runtime.quantization._groups import GROUP, decode_blocks, encode_blocks, float16, groups, inverse, padded

GROUP_BYTES = 2 + GROUP

MAX_LOGIT_ERROR = 0.1
"""Error of dense logits, as a share of the largest logit, that rounding to this format does not explain: small real
models have a fifth of it at most (EXPERIMENTS.md)."""
MAX_WEIGHT_ERROR = 0.02
"""Norm of a tensor's rounding error, as a share of the tensor's norm, above which `quantize` warns: trained models have
0.006 at most."""


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


def _encode(values: np.ndarray, codes: np.ndarray) -> None:
    x = padded(values)
    scale = np.abs(x).max(axis=2, keepdims=True) / np.float32(127)
    out = codes.reshape(*x.shape[:2], GROUP_BYTES)
    out[:, :, :2] = float16(scale, "int8_group32").view(np.uint8)
    out[:, :, 2:] = _round_half_away(x * inverse(scale)).astype(np.int8).view(np.uint8)


def _decode(codes: np.ndarray, values: np.ndarray) -> None:
    count, length = values.shape
    packed = codes.reshape(count, groups(length), GROUP_BYTES)
    scale = np.ascontiguousarray(packed[:, :, :2]).view("<f2").astype(np.float32)
    whole = packed[:, :, 2:].view(np.int8).astype(np.float32) * scale
    values[...] = whole.reshape(count, -1)[:, :length]


def _round_half_away(x: np.ndarray) -> np.ndarray:
    whole = np.trunc(x)  # x - whole is exact, which trunc(x + 0.5) is not just below one half
    return whole + np.where(np.abs(x - whole) >= 0.5, np.sign(x), np.float32(0))
