"""Activation predictors: per layer `fc1` [rank, hidden_size] and `fc2` [units of `neuron`, rank], no bias.

A unit is predicted active where fc2 · relu(fc1 · x) >= threshold, x being the MLP's input after its norm. In a mixture
of experts fc2 has a row for every unit of every expert, and of a token only units of the experts that it uses are
scored; densities are, as everywhere, shares of all experts' units.
Arrays of a predictor: `fc1`, `fc2` uint8 [rows, row_bytes], each row encoded in `format` along its last dimension.
`predict` gives every layer a ladder of them, `size` takes one of each. Predictors hold for one model's weights only:
`weights_sha256` binds them. A layer all of whose units are used has none.
"""

from pydantic import Field

from coldpress.schemas.base import ArrayFile, Count, PositiveCount, Record, Sha256, Share
from coldpress.schemas.families import WHOLE_MLP, FormatName, num_units
from coldpress.schemas.metrics import Measured
from coldpress.schemas.model import ModelSpec


def matrix_shapes(spec: ModelSpec, rank: int) -> dict[str, tuple[int, int]]:
    """Rows and columns of a predictor's two matrices, by name."""
    return {"fc1": (rank, spec.hidden_size), "fc2": (num_units(WHOLE_MLP, spec), rank)}


class Point(Record):
    """A threshold, and what it makes of a predictor as stored, on calibration tokens that nothing was chosen by."""

    threshold: float
    recall: Share
    precision: Share
    predicted_density: Share


class Rung(Record):
    """A predictor of one size."""

    rank: PositiveCount
    arrays: ArrayFile
    nbytes: PositiveCount
    points: tuple[Point, ...] = Field(min_length=1)
    """Thresholds by falling value: the first keeps to the limit of overprediction, the others miss less, whatever they
    predict."""


class Ladder(Record):
    """One layer's predictors, the smallest first."""

    layer: Count
    format: FormatName
    density: Share
    """Share of the units that are active, on the same tokens."""
    skewness: Share
    """0 where all units are as likely to be active, 1 where each always or never is (compiler/stages/predict)."""
    suggested_rank: PositiveCount
    """What sparsity and skewness let expect; one of the rungs."""
    rungs: tuple[Rung, ...] = Field(min_length=1)


class Ladders(Record):
    """What `predict` gives for a chunk of layers."""

    weights_sha256: Sha256
    layers: tuple[Ladder, ...]


class LayerPredictor(Point):
    """One layer's predictor, of the size that `size` chose."""

    layer: Count
    rank: PositiveCount
    format: FormatName
    arrays: ArrayFile
    nbytes: PositiveCount
    density: Share
    """Share of the units that are active."""
    num_parameters: PositiveCount
    output_cosine: float
    """Mean cosine of the MLP's output with and without what the predictor leaves out, on validation text."""


class SizesTried(Record):
    """A choice of sizes that was measured."""

    predictor_bytes: PositiveCount
    ppl: Measured


class Predictors(Record):
    """What `size` gives: predictors of all layers that have one, by layer."""

    weights_sha256: Sha256
    layers: tuple[LayerPredictor, ...]
    ppl_without: Measured | None = None
    """Of the model without predictors on the validation text; None where there are none."""
    tried: tuple[SizesTried, ...] = ()
    """The curve from bytes to perplexity, by bytes."""
