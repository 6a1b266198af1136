"""int8_4_4: int8_group32 in planes of four bits; a coarse group is a float16 d and 16 bytes: value = (16 q - 120) * d.

A coarse group has the layout of int4_group32, and as many levels, but each half a step higher: with int4's own levels
an int8 of 120 or more would be beyond the highest. The refinement has 16 bytes a group, packed in the same way.
"""

from coldpress.runtime.quantization._groups import GROUP
from coldpress.runtime.quantization._planes import PlanesFormat


class Plugin(PlanesFormat):
    """Four bits in DRAM, four on flash."""

    WHOLE, HIGH_BITS, LOW_BITS, MIDDLE = "int8_group32", 4, 4, 8
    CODE_BYTES = GROUP // 2
    MAX_LOGIT_ERROR = 0.8  # small real models have at most half of it
    MAX_WEIGHT_ERROR = 0.3  # trained models have at most 0.1
    SCALE_SIGNS = (1,)
