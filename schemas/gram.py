"""Gram matrices of the inputs of a model's matrices: the result of `gram`; `quantize` uses them to correct rounding.

Arrays of a layer (safetensors): for each signal that a matrix of the layer multiplies, such as `mlp_inner`, the sum
over tokens of x xᵀ, float32 [n, n], symmetric, where x [n] is the signal after the build's selector.
"""

from collections.abc import Mapping

from coldpress.schemas.base import ArrayFile, Count, PositiveCount, Record, Sha256
from coldpress.schemas.families import Signal
from coldpress.schemas.model import MatrixRole, ModelSpec

INPUT_OF: Mapping[MatrixRole, Signal] = {
    "q_proj": "attention_input",
    "k_proj": "attention_input",
    "v_proj": "attention_input",
    "o_proj": "attention_mixed",
    "gate_proj": "mlp_input",
    "up_proj": "mlp_input",
    "down_proj": "mlp_inner",
}
"""The signal that each matrix multiplies."""


def measured_roles(spec: ModelSpec) -> frozenset[str]:
    """Returns the matrices whose inputs are measured. In a mixture these are attention's: each expert sees few tokens,
    so that experts, and MLPs beside them, are rounded without Gram matrices (compiler/rounding/gptq.py)."""
    return frozenset(spec.attention_roles if spec.is_mixture else INPUT_OF)


class LayerGram(Record):
    layer: Count
    arrays: ArrayFile


class GramMatrices(Record):
    """The result of `gram`: one entry per layer, in the order of layer numbers."""

    num_tokens: PositiveCount
    weights_sha256: Sha256
    """Digest of the weights that ran (`Model.weights_sha256`)."""
    layers: tuple[LayerGram, ...]
