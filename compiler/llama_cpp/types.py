"""The types of GGUF's tensors: blocks of values in a row, and their decoders."""

import numpy as np

from coldpress.runtime.kernels.products import decode_rows

NAMES = {
    **{0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0"},
    **{10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K"},
    **{20: "IQ4_NL", 23: "IQ4_XS", 30: "BF16", 39: "MXFP4"},
}
"""By GGML's number."""
BLOCKS = {
    **{"F32": (1, 4), "F16": (1, 2), "BF16": (1, 2)},
    **{"Q8_0": (32, 34), "Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 22), "Q5_1": (32, 24)},
    **{"Q2_K": (256, 84), "Q3_K": (256, 110), "Q4_K": (256, 144), "Q5_K": (256, 176), "Q6_K": (256, 210)},
    **{"IQ4_NL": (32, 18), "IQ4_XS": (256, 136), "MXFP4": (32, 17)},
}
"""Type -> values and bytes of a block."""
QUANTIZED = frozenset(BLOCKS) - {"F32", "F16", "BF16"}
NATIVE = QUANTIZED - {"IQ4_XS", "MXFP4"}
"""Types that the native core has."""


def decode(rows: np.ndarray, dtype: str) -> np.ndarray:
    """Returns the values float32 [rows, columns] of rows uint8 [rows, bytes] of a quantized type, as the package gguf
    does; by the native core where it has the type, in a fortieth of the time."""
    if dtype in NATIVE:
        values, nbytes = BLOCKS[dtype]
        return decode_rows(rows, rows.shape[1] // nbytes * values, dtype.lower(), num_threads=1)
    from gguf import GGMLQuantizationType  # a tenth of a second
    from gguf.quants import dequantize

    with np.errstate(all="ignore"):  # damaged scales give what is not finite, and `ingest` refuses it
        return dequantize(rows, GGMLQuantizationType[dtype])
