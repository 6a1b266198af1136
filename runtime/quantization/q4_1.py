"""q4_1: llama.cpp's Q4_1, 5 bits a weight: 4-bit numbers in groups of 32 with a float16 step and minimum."""

from coldpress.runtime.quantization._minimums import HalfRanges


class Plugin(HalfRanges):
    """20 bytes per 32 values: step, minimum, 16 of numbers."""

    HIGHEST = 15
    BLOCK_BYTES = 20
    GGUF_TYPE = "Q4_1"
    IS_COMPARED = True
    MAX_LOGIT_ERROR = 0.7
    MAX_WEIGHT_ERROR = 0.2
