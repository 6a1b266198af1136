"""Activation statistics per layer and family, as `calibrate` and `recalibrate` write them.

Arrays of a family (safetensors): `bits` uint8 [num_units, ceil(num_tokens / 8)], unit-major, bit t & 7 of byte t >> 3
is token t (little bit order), padding bits 0; `counts` int64 [num_units], tokens on which the unit is active;
`context_counts` uint16 (uint32 for longer blocks) [num_blocks, num_units], the counts of each block of tokens, which
the model saw as one context; `task_counts` int64 [num_tasks, num_units], the counts of each task of the corpus, absent
if it names no task (ActiveFlow Fig. 6); `magnitude_histogram` uint64 [num_bins] of |signal| over all units and tokens
with `magnitude_edges` float32 [num_bins + 1]. `bits` and all counts are absent while no density has been chosen and
activations are not exact zeros.

Arrays of a layer: `mlp_inputs` float16 [num_tokens, hidden_size], the MLP's input after its norm; after the first
layer, `block_similarity` float64 [num_blocks], each block's mean cosine with the previous layer, and `top_shared` int64
[num_blocks, num_densities], the channels that are among the largest in both layers, summed over the block's tokens.

Arrays of the inputs of a layer's matrices: for each signal that a matrix multiplies (`INPUT_OF`, schemas/gram.py), the
mean square of each of its entries over the tokens of each block, float32 [num_blocks, n]. In a mixture `mlp_inner` has
the units of all experts one after another, each weighted by the router and 0 on tokens that do not use it.

Arrays of a layer's experts: `used` uint8 [num_experts, ceil(num_tokens / 8)], packed like `bits`, which tokens use each
expert; after the first layer, `guessed` int64 [num_blocks], a block's uses whose expert the router already chooses from
the MLP input of the layer before; `task_counts` int64 [num_tasks, num_experts], absent if the corpus names no task.
"""

from collections.abc import Collection
from typing import Literal

from coldpress.schemas.base import ArrayFile, Count, Extended, PositiveCount, Record, Sha256, Share
from coldpress.schemas.experts import ExpertCurve
from coldpress.schemas.families import FamilyName


class FamilyStatistics(Record):
    family: FamilyName
    num_units: PositiveCount
    density: Share | None
    """Mean share of active units; None if `bits` is absent."""
    arrays: ArrayFile
    in_layer_before: Share | None = None
    """Share of the active units that are active in the previous layer, too, for families whose units are entries of the
    hidden state; None for layer 0, for other families, and if `bits` is absent."""


class TopPrecision(Record):
    """Prediction of the next layer's largest MLP inputs by a layer's (ActiveFlow 2.2 and Fig. 4: attention inputs)."""

    density: Share
    """Share of channels that count as largest."""
    precision: Share
    """Mean share of the largest channels of this layer's MLP input that are also largest in the previous layer's."""


class ExpertUses(Record):
    num_experts: PositiveCount
    predictability: Share | None
    """Share of uses whose expert the router chooses from the MLP input of the layer before; None for layer 0."""
    arrays: ArrayFile


class LayerStatistics(Extended):
    LATER = ("experts", "mean_squares")

    layer: Count
    families: tuple[FamilyStatistics, ...]
    inputs: ArrayFile
    input_similarity: float | None
    """Mean cosine between this layer's MLP input and the previous layer's (ActiveFlow 2.2); None for layer 0."""
    top_precision: tuple[TopPrecision, ...] = ()
    """By ascending density; empty for layer 0."""
    experts: ExpertUses | None = None
    """None, which is left out of the file, for a layer without experts."""
    mean_squares: ArrayFile | None = None
    """None, which is left out of the file, where a selector left out units, and in records made by hand."""

    def family(self, name: FamilyName) -> FamilyStatistics | None:
        return next((found for found in self.families if found.family == name), None)


class TaskTokens(Record):
    name: str
    num_tokens: Count


class Activations(Extended):
    """The result of `calibrate`: one entry per layer, in the order of layer numbers."""

    LATER = ("experts",)

    num_tokens: PositiveCount
    block_tokens: PositiveCount | None = None
    """Tokens of a context; None in records made by hand."""
    first_block: Count = 0
    """Index of the first block among the calibration blocks; above 0 only in shards."""
    exact_zeros: bool
    """True if activity, where it was counted, is |signal| > 0 (ReLU) rather than a chosen density."""
    compute_dtype: Literal["float32", "bfloat16"] | None = None
    """The dtype of the pass; None in records made by hand."""
    tasks: tuple[TaskTokens, ...] = ()
    """The rows of `task_counts`."""
    weights_sha256: Sha256 | None = None
    """Digest of the weights that ran (`Model.weights_sha256`); None in records made by hand."""
    layers: tuple[LayerStatistics, ...]
    experts: ExpertCurve | None = None
    """The curve of the layers with experts together; None, which is left out of the file, if there are none."""

    def are_exact(self, families: Collection[FamilyName]) -> bool:
        """Returns whether the zeros of these families are exact, so that their activity is known without a density."""
        found = [layer.family(name) for layer in self.layers for name in families]
        return self.exact_zeros and all(family is not None and family.density is not None for family in found)

    def of_layers(self, layers: Collection[int]) -> "Activations":
        return self.model_copy(update={"layers": tuple(entry for entry in self.layers if entry.layer in layers)})

    def of_families(self, families: Collection[FamilyName]) -> "Activations":
        layers = tuple(
            layer.model_copy(update={"families": tuple(entry for entry in layer.families if entry.family in families)})
            for layer in self.layers
        )
        return self.model_copy(update={"layers": layers, "exact_zeros": self.are_exact(families)})
