"""Activation statistics: what `calibrate` and `recalibrate` found, per layer and family.

Arrays of a family (safetensors): `bits` uint8 [num_units, ceil(num_tokens / 8)], unit-major, bit t & 7 of byte t >> 3
is token t (little bit order), padding bits 0; `counts` int64 [num_units], tokens on which the unit is active;
`magnitude_histogram` uint64 [num_bins] of |signal| over all units and tokens with `magnitude_edges` float32
[num_bins + 1]. `bits` and `counts` are absent while no density has been chosen and activations are not exact zeros.
Arrays of a layer: `mlp_inputs` float16 [num_tokens, hidden_size], the MLP's input after its norm.
"""

from schemas.base import ArrayFile, Count, PositiveCount, Record, Sha256, Share
from schemas.families import FamilyName


class FamilyStatistics(Record):
    """Statistics of one family in one layer."""

    family: FamilyName
    num_units: PositiveCount
    density: Share | None
    """Mean share of active units; None where `bits` is absent."""
    arrays: ArrayFile


class LayerStatistics(Record):
    """Statistics of one layer."""

    layer: Count
    families: tuple[FamilyStatistics, ...]
    inputs: ArrayFile
    input_similarity: float | None
    """Mean cosine between this layer's MLP input and the previous layer's (ActiveFlow 2.2); None for layer 0."""

    def family(self, name: FamilyName) -> FamilyStatistics:
        """The statistics of one family."""
        return next(found for found in self.families if found.family == name)


class Activations(Record):
    """What `calibrate` gives: one entry per layer, in the order of layer numbers."""

    num_tokens: PositiveCount
    exact_zeros: bool
    """Whether activity is |signal| > 0 (ReLU) rather than a chosen density."""
    weights_sha256: Sha256 | None = None
    """The weights that ran (`Model.weights_sha256`); None in records made by hand."""
    layers: tuple[LayerStatistics, ...]
