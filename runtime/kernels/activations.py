"""What products with quantized rows take of their vector: its float32 values, or whole numbers in groups of 32.

`int16` and `int8` round each group of 32 values to multiples of a scale of its own, the largest magnitude to 32512 or
127, so that a group's product with codes is a sum of whole numbers, which processors have instructions for. Formats
that have no whole-number codes (fp16), or that the native core does not know, take float32 all the same.
"""

from typing import Literal

import numpy as np

from coldpress.schemas.errors import known_name

ActivationFormat = Literal["fp32", "int16", "int8"]
ACTIVATIONS: tuple[ActivationFormat, ...] = ("fp32", "int16", "int8")
DEFAULT_ACTIVATIONS: ActivationFormat = "fp32"
BITS: dict[ActivationFormat, int] = {"fp32": 0, "int16": 16, "int8": 8}
"""As the native core is told."""
LARGEST: dict[ActivationFormat, int] = {"int16": 32512, "int8": 127}
"""What a group's largest magnitude becomes. 32512 = 256 * 127: two bytes with a sign each."""
SMALLEST_PEAK = np.float32(1e-30)
"""Groups of smaller values are zeros: the inverse of their scale is beyond float32."""
GROUP = 32
"""Values that share a scale; the last group is filled up with zeros."""
ROUNDED_FORMATS = ("int8_group32", "int4_group32")
"""Formats of rows for which the vector is rounded."""


def activation_format(name: str) -> ActivationFormat:
    """The format of that name.

    Raises:
        UnknownNameError: if there is none.
    """
    return known_name("activation format", name, ACTIVATIONS)


def reference_rounded(x: np.ndarray, fmt: str, activations: ActivationFormat) -> np.ndarray:
    """float64 [n]: what products with rows of `fmt` take `x` float32 [n] for; a group that is not finite is NaN."""
    if activations == "fp32" or fmt not in ROUNDED_FORMATS:
        return x.astype(np.float64)
    most = np.float32(LARGEST[activations])
    groups = np.pad(x, (0, -x.size % GROUP)).reshape(-1, GROUP)
    peak = np.abs(groups).max(axis=1, keepdims=True)
    used = peak >= SMALLEST_PEAK
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        numbers = np.where(used, np.rint(groups * (most / peak)), np.float32(0))
        scales = np.where(used, peak / most, np.float32(0))
        rounded = numbers.astype(np.float64) * scales
    return np.where(np.isfinite(peak), rounded, np.nan).ravel()[: x.size]
