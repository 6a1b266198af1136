"""Statistics of the inputs of a model's matrices, which `quantize` corrects rounding by: the results of `gram` and of
`importance`, which reads an importance matrix of llama.cpp.

Arrays of a layer (safetensors), Gram matrices: for each signal that a matrix of the layer multiplies, such as
`mlp_inner`, the sum over tokens of x xᵀ, float32 [n, n], symmetric, where x [n] is the signal after the build's
selector. Importance: for each matrix of the layer, such as `down_proj` or `experts.3.up_proj`, the mean square of each
of its inputs over the text of llama.cpp's run, float32 [inputs]; `shared` holds `lm_head`.
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


class LayerArrays(Record):
    layer: Count
    arrays: ArrayFile


class GramMatrices(Record):
    """The result of `gram`: one entry per layer, in the order of layer numbers."""

    num_tokens: PositiveCount
    weights_sha256: Sha256
    """Digest of the weights that ran (`Model.weights_sha256`)."""
    layers: tuple[LayerArrays, ...]


class Importance(Record):
    """The result of `importance`: one entry per layer, in the order of layer numbers."""

    imatrix_sha256: Sha256
    layers: tuple[LayerArrays, ...]
    shared: ArrayFile | None
    """None if the file has no entry for the head, or the model's head is its embeddings."""
