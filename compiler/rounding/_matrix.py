"""Chooses the codes of a matrix of a model, by what is known of its inputs."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import numpy as np

from coldpress.compiler.io import load_arrays
from coldpress.compiler.rounding import rtn
from coldpress.compiler.rounding._weights import Algorithm, Axis, Weights, weights_of
from coldpress.schemas.errors import CheckpointError, ColdpressError
from coldpress.schemas.families import FormatName
from coldpress.schemas.gram import INPUT_OF, GramMatrices, measured_roles
from coldpress.schemas.model import Model


@dataclass(frozen=True)
class Known:
    """Measurements of the inputs of the matrices to encode."""

    grams: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Gram matrix of a matrix's inputs by role (`down_proj`), float32 [n, n]; none of experts: each sees few tokens."""
    importance: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Mean squares of a matrix's inputs by name (`down_proj`, `experts.3.up_proj`), float32 [n]."""

    def weights(self, model: Model, role: str, axis: Axis) -> Weights:
        matrix = matrix_of(role)
        return weights_of(model, role, axis, self.grams.get(matrix), self.importance.get(matrix))


@dataclass(frozen=True)
class Rounding:
    algorithm: Algorithm
    gram: GramMatrices | None = None
    """Gram matrices, where the algorithm needs them."""

    @property
    def name(self) -> str:
        return self.algorithm.name()

    def codes(self, model: Model, role: str, axis: Axis, format_name: FormatName) -> np.ndarray:
        """Returns the codes of a layer's matrix, uint8 [n, nbytes(length)], a row for each slice along `axis`.
        Memory holds the matrix and its Gram matrix.

        Raises:
            CheckpointError: if a value is beyond the format's range.
        """
        from threadpoolctl import threadpool_limits

        layer = int(role.split(".")[1])
        names = measured_roles(model.spec) & {matrix_of(role)}
        weights = Known(grams_of(self.gram, layer, names)).weights(model, role, axis)
        with threadpool_limits(1):  # on several cores products round otherwise; a job of `quantize` has one
            return choose_codes(self.algorithm, weights, role, format_name)


NEAREST = Rounding(rtn.Plugin())


def matrix_of(role: str) -> str:
    """Returns a tensor's name inside its layer, such as `experts.3.up_proj`; outside the layers, the role itself."""
    return role.removesuffix(".weight").split(".", 2)[-1]


def grams_of(gram: GramMatrices | None, layer: int, matrices: Collection[str]) -> dict[str, np.ndarray]:
    """Returns the Gram matrices of the inputs of a layer's matrices, by name, where they are known; matrices with the
    same input share one."""
    inputs: dict[str, str] = {role: signal for role, signal in INPUT_OF.items() if role in matrices}
    if gram is None or not inputs:
        return {}
    signals = load_arrays(gram.layers[layer].arrays, *dict.fromkeys(inputs.values()))
    return {role: signals[signal] for role, signal in inputs.items()}


def choose_codes(algorithm: Algorithm, weights: Weights, role: str, format_name: FormatName) -> np.ndarray:
    """Returns the codes of a matrix's slices, uint8 [n, nbytes(length)]: the source's own where it has them, so that
    nothing is rounded twice.

    Raises:
        CheckpointError: if a value is beyond the format's range; the text names the matrix.
    """
    try:
        kept = weights.codes(format_name)
        return algorithm.quantize(weights, format_name) if kept is None else kept
    except ColdpressError as error:
        raise CheckpointError(f"{role}: {error}") from error
