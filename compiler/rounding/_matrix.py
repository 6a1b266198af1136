"""Chooses the codes of a matrix of a model, by what is known of its inputs."""

from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import TYPE_CHECKING

import numpy as np

from coldpress.compiler.io import load_arrays
from coldpress.compiler.rounding import rtn
from coldpress.compiler.rounding._weights import Algorithm, Axis, Weights, weights_of
from coldpress.schemas.activations import Activations
from coldpress.schemas.base import ArrayFile
from coldpress.schemas.errors import CheckpointError, ColdpressError
from coldpress.schemas.families import FormatName
from coldpress.schemas.gram import INPUT_OF, GramMatrices, measured_roles
from coldpress.schemas.model import Model

if TYPE_CHECKING:
    from threadpoolctl import ThreadpoolController

LEAST_SHARE = 1e-4
"""The least importance of an input, over the mean of its matrix."""


@dataclass(frozen=True)
class InputStatistics:
    """Measurements of the inputs of the matrices to encode."""

    grams: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Gram matrix of a matrix's inputs by role (`down_proj`), float32 [n, n]; none of experts: each sees few tokens."""
    importance: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Mean squares of a matrix's inputs by name (`down_proj`, `experts.3.up_proj`), float32 [n]."""
    activations: Activations | None = None
    """Statistics that have the mean squares of other matrices' inputs."""

    def weights(self, model: Model, role: str, axis: Axis) -> Weights:
        matrix = matrix_of(role)
        importance = self.importance.get(matrix)
        if importance is None:
            importance = measured_importance(self.activations, role, model)
        return weights_of(model, role, axis, self.grams.get(matrix), _prices(importance))


@dataclass(frozen=True)
class Rounding:
    algorithm: Algorithm
    gram: GramMatrices | None = None
    """Gram matrices, where the algorithm needs them."""
    activations: Activations | None = None
    """Statistics of the model's inputs, where they are known."""

    @property
    def name(self) -> str:
        return self.algorithm.name()

    def codes(self, model: Model, role: str, axis: Axis, format_name: FormatName) -> np.ndarray:
        """Returns the codes of a layer's matrix, uint8 [n, nbytes(length)], a row for each slice along `axis`. Memory
        holds the matrix and its Gram matrix. Raises CheckpointError if a value is beyond the format's range."""
        with on_one_core(self.algorithm):
            return choose_codes(self.algorithm, self.weights(model, role, axis), role, format_name)

    def weights(self, model: Model, role: str, axis: Axis) -> Weights:
        layer = int(role.split(".")[1])
        names = measured_roles(model.spec) & {matrix_of(role)}
        known = InputStatistics(grams_of(self.gram, layer, names), activations=self.activations)
        return known.weights(model, role, axis)


NEAREST = Rounding(rtn.Plugin())


def on_one_core(algorithm: Algorithm) -> AbstractContextManager[object]:
    """Limits an algorithm's products to one core: on several they round otherwise, and a job of `quantize` has one."""
    return _libraries(algorithm.name()).limit(limits=1)


@cache
def _libraries(algorithm: str) -> "ThreadpoolController":
    """Looks once for the libraries loaded with an algorithm, which may bring its own: that takes as long as rounding a
    small matrix."""
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController()


def matrix_of(role: str) -> str:
    """Returns a tensor's name inside its layer, such as `experts.3.up_proj`; outside the layers, the role itself."""
    return role.removesuffix(".weight").split(".", 2)[-1]


def grams_of(gram: GramMatrices | None, layer: int, matrices: Collection[str]) -> dict[str, np.ndarray]:
    """Returns the known Gram matrices of a layer's matrices by name; matrices with the same input share one."""
    inputs: dict[str, str] = {role: signal for role, signal in INPUT_OF.items() if role in matrices}
    if gram is None or not inputs:
        return {}
    signals = load_arrays(gram.layers[layer].arrays, *dict.fromkeys(inputs.values()))
    return {role: signals[signal] for role, signal in inputs.items()}


def measured_importance(activations: Activations | None, role: str, model: Model) -> np.ndarray | None:
    """Returns the mean square of each input of a layer's matrix over calibration text, float32 [inputs]; None where it
    was not measured, as of a shared expert's down projection. In a mixture, all experts' gate and up have the inputs of
    every token; the inputs of an expert's down projection are weighted by the router."""
    outer, *inner = role.removesuffix(".weight").split(".")
    if activations is None or outer != "layers" or (signal := INPUT_OF.get(inner[-1])) is None:  # type: ignore[arg-type]
        return None
    file = activations.layers[int(inner[0])].mean_squares
    is_of_all = len(inner) > 2 and signal == "mlp_inner"
    if file is None or (is_of_all and inner[1] != "experts"):
        return None
    found = _mean_squares(file.array_file, file.sha256).get(signal)
    if found is None or not is_of_all:
        return found
    start = int(inner[2]) * model.spec.intermediate_size
    return found[start : start + model.spec.intermediate_size]


@lru_cache(maxsize=4)
def _mean_squares(path: str, sha256: str) -> dict[str, np.ndarray]:
    """Returns the means over all blocks of text by signal, float32 [n], added up in the order of blocks."""
    blocks = load_arrays(ArrayFile(array_file=path, sha256=sha256))
    return {signal: each.mean(axis=0, dtype=np.float64).astype(np.float32) for signal, each in blocks.items()}


def _prices(importance: np.ndarray | None) -> np.ndarray | None:
    """Returns importances above 0, since other text may use an input that this text did not. None where it used none,
    as of an expert that no token chose."""
    if importance is None or not importance.any():
        return None
    return np.maximum(importance, np.float32(LEAST_SHARE * importance.mean(dtype=np.float64)))


def choose_codes(algorithm: Algorithm, weights: Weights, role: str, format_name: FormatName) -> np.ndarray:
    """Returns the codes of a matrix's slices, uint8 [n, nbytes(length)]: the source's own where it has them, so that
    nothing is rounded twice. Raises CheckpointError if a value is beyond the format's range; the text names the
    matrix."""
    try:
        kept = weights.codes(format_name)
        return algorithm.quantize(weights, format_name) if kept is None else kept
    except ColdpressError as error:
        raise CheckpointError(f"{role}: {error}") from error
