"""Finds the matrices outside of units that keep a quantized file's codes: attention's, embeddings, shared experts.

They stay in rows, so that their codes can be taken as they are, without a loss. The head is another case: its format is
chosen by its loss.
"""

from coldpress.compiler.checkpoint.tensors import codes_type
from coldpress.compiler.cost_model import HasShapes, slice_bytes, stored_format
from coldpress.compiler.llama_cpp.formats import formats
from coldpress.schemas.families import FormatName, Formats, UnitFormat, slice_formats, unit_role, with_kept
from coldpress.schemas.model import MLP_ROLES, Model


def keeping(model: HasShapes, layers: UnitFormat) -> Formats:
    """Returns a format of layers beside those of the matrices that keep their codes: where the file's MLPs have the
    layers' format, too, or where the codes take no more bytes than they otherwise would. A model that is only
    described has no codes."""
    if not isinstance(model, Model):
        return layers
    spec, kept = model.spec, dict[str, FormatName]()
    is_own = not own_formats_of_mlps(model).isdisjoint(slice_formats(layers))
    for role, source in model.tensors.items():
        own, usual, length = own_format(model, role), stored_format(role, layers), source.shape[-1]
        if own is None or usual in (None, own) or role == spec.head_role or unit_role(role, spec) in MLP_ROLES:
            continue
        if is_own or slice_bytes(length, own) <= slice_bytes(length, usual):
            kept[role] = own
    return with_kept(layers, kept)


def own_formats_of_mlps(model: Model) -> set[FormatName]:
    """Returns the formats that a quantized file has the units' first matrices in."""
    roles = (role for role in model.tensors if role.startswith("layers.") and role.endswith("up_proj.weight"))
    return {name for role in roles if (name := own_format(model, role)) is not None}


def own_format(model: Model, role: str) -> FormatName | None:
    """Returns the format of a matrix's rows in a quantized file; None if it has none here."""
    return formats().get(codes_type(model, role) or "")
