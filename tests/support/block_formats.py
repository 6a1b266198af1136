"""llama.cpp's block formats by the `gguf` package, the oracle of their kernels: random codes, and what they mean."""

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

HALVES = {
    "q4_k": (0, 2),
    "q4_1": (0, 2),
    "q6_k": (208,),
    "q5_k": (0, 2),
    "q5_0": (0,),
    "q5_1": (0, 2),
    "iq4_nl": (0,),
    "q3_k": (108,),
    "q2_k": (80, 82),
}
"""The bytes of a block at which a float16 begins: its scale, and its minimum."""
BLOCK_FORMATS = {name: GGMLQuantizationType[name.upper()] for name in HALVES}


def block_of(fmt: str) -> tuple[int, int]:
    """Returns a block's values and bytes."""
    return GGML_QUANT_SIZES[BLOCK_FORMATS[fmt]]


def block_bytes(fmt: str, length: int) -> int:
    """Returns the bytes of a row of `length` values, whose last block may be partial."""
    values, size = block_of(fmt)
    return -(-length // values) * size


def block_codes(rng: np.random.Generator, fmt: str, count: int, length: int, peak: float = 1.0) -> np.ndarray:
    """Returns rows of blocks whose codes and small numbers take every value, uint8 [count, bytes]; `peak` is a block's
    largest magnitude, and its minimum is up to 256 times as large as its scale, or as small."""
    codes = rng.integers(0, 256, (count, block_bytes(fmt, length)), np.uint8)
    blocks = codes.reshape(-1, block_of(fmt)[1])
    for at in HALVES[fmt]:
        found = rng.choice((-1, 1), len(blocks)) * 2.0 ** rng.uniform(-8, 0, len(blocks))
        blocks[:, at : at + 2] = found.astype(np.float16)[:, None].view(np.uint8)
    largest = np.abs(block_values(blocks, fmt, block_of(fmt)[0])).max(axis=1)
    for at in HALVES[fmt]:
        halves = np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16)[:, 0]
        blocks[:, at : at + 2] = (halves * (peak / largest)).astype(np.float16)[:, None].view(np.uint8)
    return codes


def half_places(fmt: str, length: int) -> np.ndarray:
    """Returns which bytes of a row belong to a float16, bool [bytes]."""
    found = np.zeros(block_bytes(fmt, length), bool)
    for at in HALVES[fmt]:
        for byte in (at, at + 1):
            found[byte :: block_of(fmt)[1]] = True
    return found


def block_values(codes: np.ndarray, fmt: str, length: int) -> np.ndarray:
    """Returns the first `length` values of each row, float32 [count, length]."""
    if not len(codes):
        return np.empty((0, length), np.float32)
    return dequantize(np.ascontiguousarray(codes), BLOCK_FORMATS[fmt])[:, :length]
