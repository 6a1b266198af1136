"""Counts how often units are active together, exactly, from packed activation bits (Ripple 4.1, Eqs. 1-2).

Reads uint8 [num_units, ceil(num_tokens / 8)], padding bits 0; counts are exact, and equal for any number of threads:
population counts of the AND of two rows (runtime/native/src/coactivation.cpp), or on a GPU, on request, products of
0/1 matrices: half precision in, single precision within, so that 2,048 tokens at a time are exact.
"""

import numpy as np

from coldpress.runtime import _native
from coldpress.schemas.errors import ColdpressError

GPU_TOKENS = 2048
"""Largest count that half precision holds exactly."""


def pair_counts(bits: np.ndarray, num_tokens: int, threads: int = 1) -> np.ndarray:
    """Counts at [i, j] the tokens on which units i < j are both active; the rest of the square is undefined. uint16
    [num_units, num_units], or uint32 from 65,536 tokens on: 411 MB (uint16) for 14,336 units."""
    num_units, num_bytes = bits.shape
    words = np.zeros((num_units, -(-num_bytes // 8) * 8), np.uint8)
    words[:, :num_bytes] = bits
    counts = np.zeros((num_units, num_units), np.uint16 if num_tokens < 1 << 16 else np.uint32)
    _native.count_pairs(words.view(np.uint64), counts, threads)
    return counts


def gpu_pair_counts(bits: np.ndarray, num_tokens: int) -> np.ndarray:
    """Computes `pair_counts` by matrix products on a GPU.

    Raises:
        ColdpressError: if torch finds no CUDA device.
    """
    import torch

    if not torch.cuda.is_available():
        raise ColdpressError("counting=gpu needs a CUDA device and torch finds none; use counting=cpu")
    counts = torch.zeros((len(bits), len(bits)), dtype=torch.int32, device="cuda")
    shifts = torch.arange(8, dtype=torch.uint8, device="cuda")
    for start in range(0, bits.shape[1], GPU_TOKENS // 8):
        packed = torch.from_numpy(np.ascontiguousarray(bits[:, start : start + GPU_TOKENS // 8])).cuda()
        active = ((packed[:, :, None] >> shifts) & 1).flatten(1).half()
        for row in range(0, len(bits), GPU_TOKENS):  # above the diagonal only
            counts[row : row + GPU_TOKENS, row:] += (active[row : row + GPU_TOKENS] @ active[row:].T).int()
    kind = torch.uint16 if num_tokens < 1 << 16 else torch.uint32
    return counts.to(kind).cpu().numpy()
