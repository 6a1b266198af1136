"""q5_1: llama.cpp's Q5_1, 6 bits a weight: 5-bit numbers in groups of 32 with a float16 step and minimum."""

from coldpress.runtime.quantization import q4_1


class Plugin(q4_1.Plugin):
    """24 bytes per 32 values: step, minimum, 4 of fifth bits, 16 of low bits."""

    HIGHEST = 31
    HIGH_BYTES = 4
    BLOCK_BYTES = 24
    GGUF_TYPE = "Q5_1"
    MAX_LOGIT_ERROR = 0.5
    MAX_WEIGHT_ERROR = 0.1
