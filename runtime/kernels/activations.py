"""The formats of vectors in products with quantized rows: float32 values, or whole numbers in groups of 32.

`int16` and `int8` round each group of 32 values to multiples of the group's scale, so that the largest magnitude
becomes 32512 or 127. A group's product with codes is then a sum of whole numbers, for which processors have
instructions.
Formats without whole-number codes (fp16), or unknown to the native core, always take float32.
"""

from typing import Literal

import numpy as np

from coldpress.runtime.kernels import NATIVE_FORMATS
from coldpress.schemas.errors import known_name

ActivationFormat = Literal["fp32", "int16", "int8"]
ACTIVATIONS: tuple[ActivationFormat, ...] = ("fp32", "int16", "int8")
DEFAULT_ACTIVATIONS: ActivationFormat = "fp32"
BITS: dict[ActivationFormat, int] = {"fp32": 0, "int16": 16, "int8": 8}
"""The native core's argument for each format."""
LARGEST: dict[ActivationFormat, int] = {"int16": 32512, "int8": 127}
"""The whole number of a group's largest magnitude. 32512 = 256 * 127: the sum of two signed bytes, one times 256."""
SMALLEST_PEAK = np.float32(1e-30)
"""Groups whose largest magnitude is smaller become zeros: the inverse of their scale would overflow float32."""
GROUP = 32
"""Values that share a scale; the last group is padded with zeros."""
ROUNDED_FORMATS = tuple(name for name in NATIVE_FORMATS if name != "fp16")
"""Formats of rows whose products round the vector."""


def activation_format(name: str) -> ActivationFormat:
    """Returns the activation format `name`.

    Raises:
        UnknownNameError: if there is no such format.
    """
    return known_name("activation format", name, ACTIVATIONS)


def reference_rounded(x: np.ndarray, fmt: str, activations: ActivationFormat) -> np.ndarray:
    """Rounds `x` float32 [n] as products with rows of `fmt` do: float64 [n]; a group that is not finite is NaN."""
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
