"""Encodes keys and values of tokens straight into an int8 KV cache."""

import numpy as np

from coldpress.runtime import _native
from coldpress.runtime.quantization import int8_group32
from coldpress.runtime.quantization._groups import FLOAT16_MAX


def encode_heads(values: np.ndarray, out: np.ndarray) -> None:
    """Writes the heads of tokens into `out`, with the same bits as the format's `encode`.

    Args:
        values: float32[tokens, kv_heads, head_dim], contiguous.
        out: uint8[tokens, kv_heads, bytes], contiguous; its contents are undefined after an error.

    Raises:
        ColdpressError: if a group's scale is beyond float16.
        ValueError: if shapes disagree.
        TypeError: if an array has another dtype or is not contiguous.
    """
    if not _native.encode_int8(values, out) < FLOAT16_MAX + 16:
        int8_group32.Plugin().encode(values.reshape(-1, values.shape[2]))  # raises the error, with the offending value
