"""Resident tensors: matrices that multiply activations straight from their codes, tables read row by row, vectors
and norms.

A matrix stays in DRAM as codes (uint8 [M, row_bytes]) with their format; it is never decoded as a whole.
Shape letters: T tokens, N input values, M rows.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from coldpress.runtime import plugins
from coldpress.runtime.arithmetic import layer_norm, rms_norm
from coldpress.runtime.kernels import FEW_TOKENS, products
from coldpress.runtime.kernels.activations import ActivationFormat
from coldpress.runtime.quantization import Format
from coldpress.schemas.families import FormatName
from coldpress.schemas.model import ModelSpec, norm_parts, qk_norms
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
    """The format that a decoded token's input is rounded to."""

    def apply(self, x_TN: np.ndarray, parts: Sequence[slice] = (), own: np.ndarray | None = None) -> np.ndarray:
        """Multiplies `x` by the transposed matrix and adds the bias: float32 [T, N] -> float32 [T, M].

        Each of up to FEW_TOKENS tokens has the same bits as alone. With `parts`, which cover the tokens, each range is
        bit-identical to computing it alone. With `own`, ascending tokens, only these are multiplied, as float32 [n, M];
        the length of their range still decides how.
        """
        if len(parts) < 2 and own is None:
            return self._product(x_TN, few=len(x_TN) <= FEW_TOKENS)
        own = np.arange(len(x_TN)) if own is None else own
        y_nM = np.empty((own.size, len(self.codes)), np.float32)
        few = list[int]()
        for part in parts or [slice(0, len(x_TN))]:
            first, stop = np.searchsorted(own, (part.start, part.stop)).tolist()
            if part.stop - part.start <= FEW_TOKENS:
                few += range(first, stop)
            elif stop > first:
                y_nM[first:stop] = self._product(x_TN[own[first:stop]], few=False)
        # short ranges are computed together, in groups of at most FEW_TOKENS: their tokens' bits do not depend on that
        for start in range(0, len(few), FEW_TOKENS):
            of_few = few[start : start + FEW_TOKENS]
            y_nM[of_few] = self._product(x_TN[own[of_few]], few=True)
        return y_nM

    def apply_transposed(self, c_TM: np.ndarray, parts: Sequence[slice] = ()) -> np.ndarray:
        """Multiplies `c` by the matrix: float32 [T, M] -> float32 [T, N]; bits as in `apply`."""
        y_TN = np.empty((len(c_TM), self.length), np.float32)
        for part in parts or [slice(0, len(c_TM))]:
            y_TN[part] = self._product_transposed(c_TM[part])
        return y_TN

    def _product_transposed(self, c_TM: np.ndarray) -> np.ndarray:
        if self.format is None:
            few = len(c_TM) <= FEW_TOKENS
            return np.stack([c @ self.codes for c in c_TM]) if few else c_TM @ self.codes
        if len(c_TM) > FEW_TOKENS:
            return products.matmul_t(self.codes, self.length, self.format, c_TM)
        every = np.arange(len(self.codes), dtype=np.int32)
        return np.stack([products.axpy_rows(self.codes, every, 0, self.length, self.format, c) for c in c_TM])

    def _product(self, x_TN: np.ndarray, *, few: bool) -> np.ndarray:
        if self.format is None:
            y_TM = np.stack([self.codes @ x for x in x_TN]) if few else x_TN @ self.codes.T
        elif few:
            y_TM = products.gemv_each(self.codes, self.length, self.format, x_TN, self.activations)
        else:
            y_TM = products.matmul(self.codes, self.length, self.format, x_TN)
        return y_TM if self.bias is None else y_TM + self.bias

    def rows(self, ids: np.ndarray) -> np.ndarray:
        """Decodes the rows `ids` int [T]: float32 [T, N]."""
        codes = self.codes[ids]
        if self.format is None:
            return codes
        return plugins.load("coldpress.runtime.quantization", Format, self.format).decode(codes, self.length)


class Resident:
    """The resident tensors of an artifact by role; the reader has checked that none is missing or misshapen."""

    def __init__(
        self,
        arrays: Mapping[str, np.ndarray],
        tensors: Iterable[ResidentTensor],
        activations: ActivationFormat = "fp32",
    ) -> None:
        """Takes the reader's `arrays` and the manifest's `tensors`; `activations` is the format of matrices' inputs."""
        self._arrays = arrays
        self._activations: ActivationFormat = activations
        self._tensors = {tensor.role: tensor for tensor in tensors}

    def vector(self, role: str) -> np.ndarray:
        """Returns a norm's weight, a bias or the frequencies: float32 [n]."""
        return self._arrays[role]

    def optional_vector(self, role: str) -> np.ndarray | None:
        return self._arrays.get(role)

    def has(self, role: str) -> bool:
        return role in self._tensors

    def matrix(self, name: str) -> Matrix:
        """Returns `<name>.weight` with `<name>.bias`, if there is one."""
        tensor = self._tensors[f"{name}.weight"]
        bias = self.optional_vector(f"{name}.bias")
        return Matrix(self._arrays[tensor.role], tensor.shape[-1], tensor.format, bias, self._activations)


@dataclass(frozen=True)
class Norm:
    weight: np.ndarray
    """float32 [n], or [heads, n]."""
    bias: np.ndarray | None
    eps: float
    centred: bool
    """True if the mean is subtracted (LayerNorm)."""

    def apply(self, x: np.ndarray) -> np.ndarray:
        """Norms the last axis of `x`, float32 [..., n] or [..., heads, n]."""
        if self.centred:
            return layer_norm(x, self.weight, self.bias, self.eps)
        return rms_norm(x, self.weight, self.eps)


def norm_of(name: str, spec: ModelSpec, resident: Resident) -> Norm:
    return _norm(spec, resident.vector(f"{name}.weight"), resident.optional_vector(f"{name}.bias"))


def qk_norm_of(layer: int, name: str, spec: ModelSpec, resident: Resident) -> Norm | None:
    """Returns a layer's norm of q or k, `q_norm` or `k_norm`; None if it has none."""
    roles = [f"layers.{layer}.{role}" for role in qk_norms(spec)[name]]
    if resident.optional_vector(f"{roles[0]}.weight") is None:
        return None
    if spec.qk_norm != "heads":
        return norm_of(roles[0], spec, resident)
    return _norm(spec, np.stack([resident.vector(f"{role}.weight") for role in roles]), None)


def _norm(spec: ModelSpec, weight: np.ndarray, bias: np.ndarray | None) -> Norm:
    counts_from_one = spec.norm.endswith("_1p")
    return Norm(weight + 1 if counts_from_one else weight, bias, spec.norm_eps, "bias" in norm_parts(spec))
