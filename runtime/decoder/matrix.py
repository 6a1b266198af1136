"""Resident tensors in use: quantized rows applied to activations, or read row by row.

Holds the codes as they lie in DRAM (uint8 [M, row_bytes]) with their format; no matrix is ever decoded as a whole.
Shape letters: T tokens, N input values, M rows.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from coldpress.runtime import plugins
from coldpress.runtime.kernels import FEW_TOKENS, gemv, matmul
from coldpress.runtime.kernels.activations import ActivationFormat
from coldpress.runtime.quantization import Format
from coldpress.schemas.families import FormatName
from coldpress.schemas.quantized import ResidentTensor


@dataclass(frozen=True)
class Matrix:
    """`codes` uint8 [M, row_bytes], rows of `length` values in `format`; float32 [M, length] where format is None."""

    codes: np.ndarray
    length: int
    format: FormatName | None
    bias: np.ndarray | None
    """float32 [M], added to every product."""
    activations: ActivationFormat = "fp32"
    """What a decoded token's input is rounded to."""

    def apply(self, x_TN: np.ndarray, parts: Sequence[slice] = ()) -> np.ndarray:
        """`x` times the transposed matrix, plus the bias: float32 [T, N] -> float32 [T, M].

        Up to FEW_TOKENS the product of each token has the bits that it has alone. Of `parts`, which cover the tokens,
        each has the bits that it has alone.
        """
        if len(parts) < 2:
            return self._product(x_TN)
        y_TM = np.empty((len(x_TN), len(self.codes)), np.float32)
        few = [part for part in parts if part.stop - part.start <= FEW_TOKENS]
        for part in parts:
            if part not in few:
                y_TM[part] = self._product(x_TN[part])
        places = np.concatenate([np.arange(int(part.start), int(part.stop)) for part in few] or [np.arange(0)])
        for start in range(0, places.size, FEW_TOKENS):
            of_few = places[start : start + FEW_TOKENS]
            y_TM[of_few] = self._product(x_TN[of_few])
        return y_TM

    def _product(self, x_TN: np.ndarray) -> np.ndarray:
        few = len(x_TN) <= FEW_TOKENS
        if self.format is None:
            y_TM = np.stack([self.codes @ x for x in x_TN]) if few else x_TN @ self.codes.T
        elif few:
            y_TM = gemv.gemv_each(self.codes, self.length, self.format, x_TN, self.activations)
        else:
            y_TM = matmul.matmul(self.codes, self.length, self.format, x_TN)
        return y_TM if self.bias is None else y_TM + self.bias

    def rows(self, ids: np.ndarray) -> np.ndarray:
        """The rows `ids` int [T], decoded: float32 [T, N]."""
        codes = self.codes[ids]
        if self.format is None:
            return codes
        return plugins.load("coldpress.runtime.quantization", Format, self.format).decode(codes, self.length)


class Resident:
    """The resident tensors of an artifact by role; the reader has checked that all are there, in the model's shapes."""

    def __init__(
        self,
        arrays: Mapping[str, np.ndarray],
        tensors: Iterable[ResidentTensor],
        activations: ActivationFormat = "fp32",
    ) -> None:
        """`arrays` as the reader gives them, `tensors` as the manifest describes them; `activations` of matrices."""
        self._arrays = arrays
        self._activations: ActivationFormat = activations
        self._tensors = {tensor.role: tensor for tensor in tensors}

    def vector(self, role: str) -> np.ndarray:
        """A norm's weight, a bias or frequencies: float32 [n]."""
        return self._arrays[role]

    def optional_vector(self, role: str) -> np.ndarray | None:
        """The same; None where the model has none."""
        return self._arrays.get(role)

    def matrix(self, name: str) -> Matrix:
        """`<name>.weight` with `<name>.bias`, if there is one."""
        tensor = self._tensors[f"{name}.weight"]
        bias = self.optional_vector(f"{name}.bias")
        return Matrix(self._arrays[tensor.role], tensor.shape[-1], tensor.format, bias, self._activations)
