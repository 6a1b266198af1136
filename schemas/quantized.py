"""The result of `quantize`: codes of units in the order of unit ids, and the resident tensors.

Arrays of a layer: `units.<family>` uint8 [num_units, unit_bytes]; and every resident tensor of the layer, named by its
role without the `layers.<i>.` prefix: uint8 [rows, row_bytes] if quantized, else float32. `shared` has the model-wide
tensors (embeddings, final norm, head, rotary frequencies), named by their roles.
"""

from coldpress.schemas.base import ArrayFile, Count, Many, PositiveCount, Record
from coldpress.schemas.families import FormatName


class ResidentTensor(Record):
    """Storage of a resident tensor: with `format` None as float32, else as quantized rows of `shape[-1]` values."""

    role: str
    format: FormatName | None
    shape: Many[PositiveCount]


class LayerCodes(Record):
    layer: Count
    arrays: ArrayFile
    resident: tuple[ResidentTensor, ...]
    """Roles with their `layers.<i>.` prefix."""


class Quantized(Record):
    """The result of `quantize` for a chunk of layers; `shared` is set in the chunk that holds layer 0."""

    algorithm: str
    format: FormatName
    layers: tuple[LayerCodes, ...]
    shared: ArrayFile | None
    shared_resident: tuple[ResidentTensor, ...]
