"""Activation predictors: per layer `fc1` [rank, hidden_size] and `fc2` [intermediate_size, rank], no bias.

A unit is predicted active where fc2 · relu(fc1 · x) >= threshold, x being the MLP's input after its norm.
Arrays of a layer: `fc1`, `fc2` uint8 [rows, row_bytes], each row encoded in `format` along its last dimension.
Predictors hold for one model's weights only: `weights_sha256` binds them. A layer all of whose units are used has none.
"""

from schemas.base import ArrayFile, Count, PositiveCount, Record, Sha256, Share
from schemas.families import FormatName


class LayerPredictor(Record):
    """One layer's predictor with its quality, as stored, on validation tokens."""

    layer: Count
    rank: PositiveCount
    format: FormatName
    threshold: float
    arrays: ArrayFile
    recall: Share
    precision: Share
    predicted_density: Share


class Predictors(Record):
    """What `predict` gives for a chunk of layers."""

    weights_sha256: Sha256
    layers: tuple[LayerPredictor, ...]
