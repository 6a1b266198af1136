"""The operations of a decoder on weights in their storage format, one per file.

Each file has the plain numpy `reference…` and the function that calls the native core; tests hold them equal. A format
that the core does not know, added as a file of runtime/quantization, is computed by the reference: slowly, and rightly.
Sums are float32 everywhere.
"""

NATIVE_FORMATS = ("fp16", "int8_group32", "int4_group32")
"""The formats of codes that the native core reads."""

FEW_TOKENS = 32
"""Up to so many tokens of a pass are computed with one by one, to the bits that each has alone; for more of them, it is
faster to decode weights for a product of matrices."""
