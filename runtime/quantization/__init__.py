"""Storage formats of weights, one per file: encode float32 values as codes, and decode them.

A file has one class `Plugin`, which extends `Format`; formats with one scale per group of 32 values extend
`GroupFormat` (runtime/quantization/_groups.py), and define only the levels and the layout of a group's bytes.
"""

from abc import abstractmethod
from typing import ClassVar

import numpy as np

from coldpress.runtime.plugins import PluginBase


class Format(PluginBase):
    """A way of storing slices of weights (rows or columns of a matrix). The base class of all formats."""

    MAX_LOGIT_ERROR: ClassVar[float]
    """Error of dense logits, as a share of the largest logit, above which rounding to this format is not the cause: at
    least twice the error of small real models (docs/experiments/checks.md)."""
    MAX_WEIGHT_ERROR: ClassVar[float]
    """Norm of a tensor's rounding error, as a share of the tensor's norm, above which `quantize` warns."""
    MULTIPLE: ClassVar[int] = 1
    """A slice's number of values is a multiple of this."""
    IS_FINAL: ClassVar[bool] = True
    """True if values that were decoded are encoded as they were: no range is searched anew."""
    GGUF_TYPE: ClassVar[str]
    """The type of GGUF that has the same values and layout."""
    IS_COMPARED: ClassVar[bool] = False
    """True if a search with an open format takes it into account; others take part where a user names them, or where a
    quantized file has them."""

    @abstractmethod
    def nbytes(self, length: int) -> int:
        """Bytes of one slice of `length` values."""

    @abstractmethod
    def encode(self, values: np.ndarray, prices: np.ndarray | None = None) -> np.ndarray:
        """float32 [n, length] -> codes uint8 [n, nbytes(length)], rounded to nearest.

        With `prices`, those of a squared error at each place of a slice, float32 [length], above 0, formats of few bits
        take the scales that lose least; finer formats ignore them. Raises `ColdpressError` if a value or a scale is
        beyond the format's range.
        """

    @abstractmethod
    def decode(self, codes: np.ndarray, length: int) -> np.ndarray:
        """uint8 [n, nbytes(length)] -> float32 [n, length]. Raises `ColdpressError` if `codes` has another number of
        bytes per slice."""

    @abstractmethod
    def finite(self, codes: np.ndarray) -> bool:
        """Tells whether codes uint8 [n, nbytes(length)] decode to finite values; does not decode if possible."""

    def scales(self, values: np.ndarray, prices: np.ndarray | None = None) -> np.ndarray:
        """Computes the scale of each group, float32 [n] as it will be stored, from values float32 [n, at most 32].

        For algorithms that choose codes (compiler/rounding); 1 in a format without scales. `prices` as for `encode`,
        float32 [m, the same], where m divides n. Raises `ColdpressError` if a scale is beyond the format's range.
        """
        return np.ones(len(values), np.float32)

    def nearest(self, values: np.ndarray, scales: np.ndarray) -> np.ndarray:
        """Rounds `values` to the nearest float32 [..., n] that codes can represent under `scales`, which broadcast."""
        rows = values.reshape(-1, values.shape[-1])
        return self.decode(self.encode(rows), values.shape[-1]).reshape(values.shape)

    def pack(self, values: np.ndarray, scales: np.ndarray) -> np.ndarray:
        """Encodes results of `nearest`, float32 [n, length], under `scales` [n, groups]: uint8 [n, nbytes(length)]."""
        return self.encode(values)
