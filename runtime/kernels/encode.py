"""Keys and values of tokens to the codes of an int8 KV cache, written where the cache keeps them."""

import numpy as np

from coldpress.runtime import _native
from coldpress.runtime.quantization import int8_group32
from coldpress.runtime.quantization._groups import FLOAT16_MAX


def encode_heads(values: np.ndarray, out: np.ndarray) -> None:
    """Writes the heads of tokens into `out`, bit for bit what the format's `encode` gives.

    Args:
        values: float32[tokens, kv_heads, head_dim], contiguous.
        out: uint8[tokens, kv_heads, bytes], contiguous; what it holds after an error means nothing.

    Raises:
        ColdpressError: if a group's scale is beyond float16.
        ValueError: if shapes disagree.
        TypeError: if an array has another dtype or is not contiguous.
    """
    if not _native.encode_int8(values, out) < FLOAT16_MAX + 16:
        reference_encode_heads(values, out)  # says what is wrong


def reference_encode_heads(values: np.ndarray, out: np.ndarray) -> None:
    """What `encode_heads` writes, in numpy."""
    tokens, heads, head_dim = values.shape
    out[:] = int8_group32.Plugin().encode(values.reshape(-1, head_dim)).reshape(tokens, heads, -1)
