"""int4_2_2: int4_group32 in planes of two bits; a coarse group is a float16 d and 8 bytes: value = (4 q - 6.5) * d.

Value i is in bits 2 (i // 8) of byte i mod 8, in the coarse plane and in the refinement, which has 8 bytes a group.
"""

from coldpress.runtime.quantization._groups import GROUP
from coldpress.runtime.quantization._planes import PlanesFormat


class Plugin(PlanesFormat):
    """Two bits in DRAM, two on flash."""

    WHOLE, HIGH_BITS, LOW_BITS, MIDDLE = "int4_group32", 2, 2, 1.5
    CODE_BYTES = 2 * GROUP // 8
    MAX_LOGIT_ERROR = 2.0  # small real models have at most half of it
    MAX_WEIGHT_ERROR = 0.6  # trained models have at most 0.3
