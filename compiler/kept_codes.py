"""Finds the matrices that keep a quantized file's codes: those that are stored by rows, whose codes can be taken as
they are, without a loss."""

from coldpress.compiler.candidates import misfit
from coldpress.compiler.checkpoint.tensors import codes_type
from coldpress.compiler.cost_model import HasShapes, slice_bytes, stored_format
from coldpress.compiler.llama_cpp.formats import formats
from coldpress.runtime.quantization._mixed import coarsest
from coldpress.schemas.families import (
    BLOCKS,
    JOINT,
    FormatName,
    Formats,
    LayerFormats,
    OwnFormats,
    UnitFormat,
    layers_of,
    names_in,
    slices,
    unit_format,
    unit_role,
    with_kept,
)
from coldpress.schemas.model import MLP_ROLES, Model, matrices


def keeping(model: HasShapes, layers: Formats) -> Formats:
    """Returns formats of layers beside those of the matrices outside of MLPs that keep their codes: where the file's
    MLPs have a format of the layers, too, or where the codes take no more bytes than they otherwise would; of the head
    only there. Formats that say this already stay; a model that is only described has no codes."""
    if isinstance(layers, OwnFormats) or not isinstance(model, Model):
        return layers
    spec, kept = model.spec, dict[str, FormatName]()
    is_own = not own_formats_of_mlps(model).isdisjoint(names_in(layers))
    for role, source in model.tensors.items():
        own, usual, length = own_format(model, role), stored_format(role, layers), source.shape[-1]
        if own is None or usual in (None, own) or unit_role(role, spec) in MLP_ROLES:
            continue
        if role == spec.head_role and slice_bytes(length, own) > slice_bytes(length, usual):
            continue
        if is_own or slice_bytes(length, own) <= slice_bytes(length, usual):
            kept[role] = own
    return with_kept(layers, kept)


def own_layers(model: Model) -> LayerFormats | None:
    """Returns the formats that a quantized file has its layers' MLPs in; None if one of them has no such format here,
    or a layer's experts have several, or another matrix has none and does not fit theirs. A mixture's layers without
    experts have the coarsest, since their MLPs are in no units."""
    spec = model.spec
    having, pieces = layers_of(BLOCKS, spec), slices(BLOCKS, spec)
    found: list[UnitFormat] = []
    for layer in having:
        experts = [matrices(piece.role, spec) for piece in pieces]
        names = [{own_format(model, f"layers.{layer}.{name}.weight") for name in each} for each in experts]
        known = [name for each in names if len(each) == 1 for name in each if name is not None]
        if len(known) < len(pieces):
            return None
        found.append(unit_format(known))
    if {*found} == {found[0]} and JOINT not in found[0]:
        formats = found[0]
    else:
        own = dict(zip(having, found, strict=True))
        formats = tuple(own.get(layer, coarsest(tuple(found))) for layer in range(spec.num_hidden_layers))
    rounded = (role for role in model.tensors if stored_format(role, formats) and own_format(model, role) is None)
    return None if misfit(coarsest(formats), spec) and any(rounded) else formats


def own_formats_of_mlps(model: Model) -> set[FormatName]:
    """Returns the formats that a quantized file has the units' first matrices in."""
    roles = (role for role in model.tensors if role.startswith("layers.") and role.endswith("up_proj.weight"))
    return {name for role in roles if (name := own_format(model, role)) is not None}


def own_format(model: Model, role: str) -> FormatName | None:
    """Returns the format of a matrix's rows in a quantized file; None if it has none here."""
    return formats().get(kind) if (kind := codes_type(model, role)) else None
