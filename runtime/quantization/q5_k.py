"""q5_k: llama.cpp's Q5_K, 5.5 bits a weight: 5-bit numbers in groups of 32 with 6-bit steps and minimums."""

from coldpress.runtime.quantization._super_blocks import SixBitRanges


class Plugin(SixBitRanges):
    """176 bytes per 256 values: d, dmin, 12 bytes of scales and minimums, 32 of fifth bits, 128 of low bits."""

    HIGHEST = 31
    HIGH_BYTES = 32
    BLOCK_BYTES = 176
    GGUF_TYPE = "Q5_K"
    IS_COMPARED = True
    MAX_LOGIT_ERROR = 0.5
    MAX_WEIGHT_ERROR = 0.1
