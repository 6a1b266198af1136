"""fp16: IEEE half precision, little-endian, two bytes per value; a slice has no groups and no padding."""

import numpy as np

from coldpress.runtime.quantization._groups import decode_blocks, encode_blocks, float16

MAX_LOGIT_ERROR = 0.01
"""Error of dense logits, as a share of the largest logit, that rounding to this format does not explain: small real
models have a fifth of it at most (EXPERIMENTS.md)."""
MAX_WEIGHT_ERROR = 0.001
"""Norm of a tensor's rounding error, as a share of the tensor's norm, above which `quantize` warns: trained models have
0.0002 at most."""
SCALE_SIGNS: tuple[int, ...] = ()
"""Of a scale, which there is none of."""


def nbytes(length: int) -> int:
    """Bytes of one slice of `length` values."""
    return 2 * length


def encode(values: np.ndarray) -> np.ndarray:
    """float32[n, length] -> uint8[n, nbytes(length)], rounded to nearest even.

    Raises:
        ColdpressError: if a value is beyond float16.
    """
    return encode_blocks(values, nbytes(values.shape[1]), _encode)


def decode(codes: np.ndarray, length: int) -> np.ndarray:
    """uint8[n, nbytes(length)] -> float32[n, length], exact.

    Raises:
        ColdpressError: if `codes` has another number of bytes per slice.
    """
    return decode_blocks(codes, length, nbytes(length), _decode)


def finite(codes: np.ndarray) -> bool:
    """Whether uint8[n, nbytes(length)] decode to finite values."""
    magnitudes = np.ascontiguousarray(codes).view("<u2") & 0x7FFF
    return bool(magnitudes.max(initial=0) < 0x7C00)


def scales(values: np.ndarray) -> np.ndarray:
    """1 for each group, float32 [n], from float32 [n, at most 32]: values stand for themselves."""
    return np.ones(len(values), np.float32)


def nearest(values: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """The nearest values that codes can say, float32 alike; `scales` play no part.

    Raises:
        ColdpressError: if a value is beyond float16.
    """
    return float16(values, "fp16").astype(np.float32)


def pack(values: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Codes uint8 [n, nbytes(length)] of what `nearest` gave, float32 [n, length]."""
    return encode(values)


def _encode(values: np.ndarray, codes: np.ndarray) -> None:
    codes[...] = np.ascontiguousarray(float16(values, "fp16")).view(np.uint8)


def _decode(codes: np.ndarray, values: np.ndarray) -> None:
    values[...] = np.ascontiguousarray(codes).view("<f2")
