"""q4_k: llama.cpp's Q4_K, 4.5 bits a weight: 4-bit numbers in groups of 32 with 6-bit steps and minimums."""

from coldpress.runtime.quantization._super_blocks import SixBitRanges


class Plugin(SixBitRanges):
    """144 bytes per 256 values: d, dmin, 12 bytes of scales and minimums, 128 of numbers."""

    HIGHEST = 15
    BLOCK_BYTES = 144
    GGUF_TYPE = "Q4_K"
    IS_COMPARED = True
    MAX_LOGIT_ERROR = 0.7
    MAX_WEIGHT_ERROR = 0.2
