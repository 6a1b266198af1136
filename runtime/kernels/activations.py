"""The formats of vectors in products with quantized rows: float32 values, or whole numbers in groups of 32.

`int16` and `int8` round each group of 32 values to multiples of the group's scale, so that the largest magnitude
becomes 32512 or 127. A group's product with codes is then a sum of whole numbers, for which processors have
instructions.
Formats without whole-number codes (fp16) always take float32.
"""

from typing import Literal

ActivationFormat = Literal["fp32", "int16", "int8"]
ACTIVATIONS: tuple[ActivationFormat, ...] = ("fp32", "int16", "int8")
DEFAULT_ACTIVATIONS: ActivationFormat = "int16"
BITS: dict[ActivationFormat, int] = {"fp32": 0, "int16": 16, "int8": 8}
"""The native core's argument for each format."""
