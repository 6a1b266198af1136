"""The operations of a decoder on weights in their storage format, one per file.

Each file has a function that calls the native core and its plain numpy `reference…`; tests compare the two. A format
that the core does not know, added as a file of runtime/quantization, uses the reference: slow, but correct. Sums are
float32 everywhere.
"""

from coldpress.schemas.families import UnitFormat, slice_formats

NATIVE_FORMATS = ("fp16", "int8_group32", "int4_group32", "int3_group32", "int4_2_2", "int4_3_1", "int8_4_4")
"""The formats that the native core multiplies; numpy decodes others for each product, about fifteen times as slowly."""

FEW_TOKENS = 32
"""A pass of at most this many tokens computes each token separately, with the same bits as alone. For more tokens it is
faster to decode the weights and multiply matrices."""


def is_native(name: UnitFormat) -> bool:
    """Whether the native core multiplies units in this format."""
    return all(one in NATIVE_FORMATS for one in slice_formats(name))
