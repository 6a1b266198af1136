"""How much each input of each matrix counts: what `importance` takes from an importance matrix of llama.cpp.

Arrays of a layer (safetensors): under each of the layer's matrices, as `down_proj` or `experts.3.up_proj`, the mean
square of each of its inputs over the text that the file was made from, float32 [inputs]. `shared` holds `lm_head`.
"""

from coldpress.schemas.base import ArrayFile, Count, Record, Sha256


class LayerImportance(Record):
    """The inputs of one layer's matrices."""

    layer: Count
    arrays: ArrayFile


class Importance(Record):
    """What `importance` gives: one entry per layer, in the order of layer numbers."""

    imatrix_sha256: Sha256
    """Of the file."""
    layers: tuple[LayerImportance, ...]
    shared: ArrayFile | None
    """None where the file says nothing of the head, or the model's head is its embeddings."""
