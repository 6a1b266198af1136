"""Decodes MXFP4: groups of 32 numbers of 4 bits (e2m1) with a shared power of two (OCP Microscaling Formats 1.0,
section 5.3).

A checkpoint has two tensors for a packed one: `<name>_blocks` uint8 [..., groups, 16], the first number of a byte in
its low bits, and `<name>_scales` uint8 [..., groups]: s stands for 2**(s - 127). bfloat16 holds all of them exactly.
"""

import numpy as np

BLOCKS, SCALES = "_blocks", "_scales"
"""The ends of the two tensors' names."""
GROUP, GROUP_BYTES = 32, 16
LARGEST_SCALE = 140
"""The largest whose numbers fp16 holds: 6 * 2**13."""
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
NUMBERS = np.concatenate([E2M1, -E2M1])
"""By code: the highest of the four bits is the sign."""
PAIRS = np.stack([np.tile(NUMBERS, 16), np.repeat(NUMBERS, 16)], axis=1)
"""By byte, float32 [256, 2]."""
DECODED_ROWS = 256
"""Rows that are in memory as float32 at a time."""


def decode_bfloat16(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """uint8 [rows, groups, 16] and [rows, groups] -> the bits of bfloat16 numbers, uint16 [rows, 32 * groups]."""
    bits = np.empty((len(blocks), GROUP * blocks.shape[1]), np.uint16)
    for start in range(0, len(blocks), DECODED_ROWS):
        rows = slice(start, start + DECODED_ROWS)
        powers = np.ldexp(np.float32(1), scales[rows].astype(np.int32) - 127)
        values = PAIRS[blocks[rows]].reshape(*powers.shape, GROUP) * powers[..., None]
        bits[rows] = (values.view(np.uint32) >> 16).reshape(len(values), -1)
    return bits
