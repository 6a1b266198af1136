"""Importance of each input of each matrix: the result of `importance`, from an importance matrix of llama.cpp.

Arrays of a layer (safetensors): for each matrix of the layer, such as `down_proj` or `experts.3.up_proj`, the mean
square of each of its inputs over the text of llama.cpp's run, float32 [inputs]. `shared` holds `lm_head`.
"""

from coldpress.schemas.base import ArrayFile, Count, Record, Sha256


class LayerImportance(Record):
    layer: Count
    arrays: ArrayFile


class Importance(Record):
    """The result of `importance`: one entry per layer, in the order of layer numbers."""

    imatrix_sha256: Sha256
    """Digest of the importance matrix's file."""
    layers: tuple[LayerImportance, ...]
    shared: ArrayFile | None
    """None if the file has no entry for the head, or the model's head is its embeddings."""
