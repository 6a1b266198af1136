"""Activation predictors: per layer `fc1` [rank, hidden_size] and `fc2` [units of `neuron`, rank], no bias.

A unit is predicted active where fc2 · relu(fc1 · x) >= threshold; x is the MLP's input after its norm. In a mixture of
experts fc2 has a row for every unit of every expert, and a token scores only the units of the experts that it uses;
densities are, as everywhere, shares of all experts' units.
Arrays of a predictor: `fc1`, `fc2` uint8 [rows, row_bytes], each row encoded in `format` along its last dimension.
`predict` trains predictors of several sizes for every layer, and `size` takes one of them. Predictors are valid only
for the weights with digest `weights_sha256`. A layer that uses all its units has no predictor.
"""

from pydantic import Field

from coldpress.schemas.base import ArrayFile, Count, PositiveCount, Record, Sha256, Share
from coldpress.schemas.families import WHOLE_MLP, FormatName, num_units
from coldpress.schemas.metrics import Measured
from coldpress.schemas.model import ModelSpec


def matrix_shapes(spec: ModelSpec, rank: int) -> dict[str, tuple[int, int]]:
    return {"fc1": (rank, spec.hidden_size), "fc2": (num_units(WHOLE_MLP, spec), rank)}


class Point(Record):
    """A threshold, and the figures of the stored predictor with it, on calibration tokens that served for no choice."""

    threshold: float
    recall: Share
    precision: Share
    predicted_density: Share


class PredictorSize(Record):
    """A predictor of one size."""

    rank: PositiveCount
    arrays: ArrayFile
    nbytes: PositiveCount
    points: tuple[Point, ...] = Field(min_length=1)
    """Thresholds by falling value: the first obeys the limit of overprediction; the others miss less, without limit."""


class TrainedLayer(Record):
    """One layer's predictors, the smallest first."""

    layer: Count
    format: FormatName
    density: Share
    """Share of active units, on the same tokens."""
    skewness: Share
    """0 if all units are equally likely to be active, 1 if each is always or never active (compiler/stages/predict)."""
    suggested_rank: PositiveCount
    """The rank that sparsity and skewness suggest; one of the sizes."""
    sizes: tuple[PredictorSize, ...] = Field(min_length=1)


class TrainedPredictors(Record):
    """The result of `predict` for a chunk of layers."""

    weights_sha256: Sha256
    layers: tuple[TrainedLayer, ...]


class LayerPredictor(Point):
    """One layer's predictor, of the size that `size` chose."""

    layer: Count
    rank: PositiveCount
    format: FormatName
    arrays: ArrayFile
    nbytes: PositiveCount
    density: Share
    """Share of active units."""
    num_parameters: PositiveCount
    output_cosine: float
    """Mean cosine of the MLP's output with and without the units that the predictor leaves out, on validation text."""


class SizesTried(Record):
    predictor_bytes: PositiveCount
    ppl: Measured


class Predictors(Record):
    """The result of `size`: predictors of all layers that have one, by layer."""

    weights_sha256: Sha256
    layers: tuple[LayerPredictor, ...]
    ppl_without: Measured | None = None
    """Perplexity of the model without predictors on the validation text; None if no layer has a predictor."""
    tried: tuple[SizesTried, ...] = ()
    """Perplexity as a function of bytes, by bytes."""
