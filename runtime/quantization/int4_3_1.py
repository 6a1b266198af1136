"""int4_3_1: int4_group32 in three bits and one; a coarse group is a float16 d and 12 bytes: value = (2 q - 7.5) * d.

A coarse group has the layout of int3_group32. The refinement has 4 bytes a group: value i in bit i // 4 of byte i mod
4.
"""

from coldpress.runtime.quantization._groups import GROUP
from coldpress.runtime.quantization._planes import PlanesFormat


class Plugin(PlanesFormat):
    """Three bits in DRAM, one on flash."""

    WHOLE, HIGH_BITS, LOW_BITS, MIDDLE = "int4_group32", 3, 1, 0.5
    CODE_BYTES = 3 * GROUP // 8
    MAX_LOGIT_ERROR = 1.0  # small real models have at most half of it
    MAX_WEIGHT_ERROR = 0.45  # trained models have at most 0.22
