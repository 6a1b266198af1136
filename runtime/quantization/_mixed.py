"""Formats that differ between layers, or between the matrices of an MLP: the one that stands for all, and words."""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from coldpress.runtime.plugins import load
from coldpress.runtime.quantization import Format
from coldpress.schemas.families import (
    FAMILIES,
    JOINT,
    FamilyName,
    FormatName,
    Formats,
    OwnFormats,
    UnitFormat,
    head_of,
    kept_of,
    layer_format,
    layer_formats,
    matrix_formats,
    names_in,
    of_layers,
    slice_formats,
    unit_format,
)
from coldpress.schemas.model import MLP_ROLES

VALUES = 256
"""Values whose bytes are compared: whole groups in every format."""


def coarsest(formats: Formats) -> FormatName:
    """Returns the format with the fewest bits: that of the artifact's families, of attention, and of predictors."""
    return min(names_in(of_layers(formats)), key=lambda name: (_bytes(name), name))


def _bytes(name: FormatName) -> int:
    return load("coldpress.runtime.quantization", Format, name).nbytes(VALUES)


def format_at(formats: Formats, layer: int, family: FamilyName) -> UnitFormat:
    """Returns the format of a family's units in a layer; attention's have the coarsest."""
    known = matrix_formats(layer_format(formats, layer))
    names = [known[role] for role in FAMILIES[family].roles if role in known]
    return unit_format(names) if names else coarsest(formats)


def format_fields(formats: Formats) -> dict[str, Any]:
    own = {"layer_formats": layer_formats(formats), "head": head_of(formats), "kept": kept_of(formats)}
    return {"format": coarsest(formats), **own}


def in_words(formats: Formats) -> str:
    """Returns a format's name; of several, which layers or matrices have another one; and that of a head's own."""
    if isinstance(formats, OwnFormats):
        layers = in_words(formats.layers)
        return layers if formats.head is None else f"{layers}, the head in {formats.head.format}"
    if isinstance(formats, str) and JOINT not in formats:
        return formats
    layers, base = (formats,) if isinstance(formats, str) else formats, coarsest(formats)
    roles = MLP_ROLES[-max(len(slice_formats(name)) for name in layers) :]
    others: dict[FormatName, dict[str, list[int]]] = {}
    for layer, name in enumerate(layers):
        for role, own in zip(roles, slice_formats(name, len(roles)), strict=True):
            if own != base:
                others.setdefault(own, {}).setdefault(role, []).append(layer)
    words = [f"{own} in {_places(found, len(roles), len(layers))}" for own, found in sorted(others.items())]
    return " with ".join((base, " and ".join(words))) if words else base


def _places(layers_of: dict[str, list[int]], num_roles: int, num_layers: int) -> str:
    if num_roles == 1:
        return ", ".join(map(_layers, layers_of.values()))
    return ", ".join(
        role if len(found) == num_layers else f"{role} of {_layers(found)}" for role, found in layers_of.items()
    )


def _layers(layers: Sequence[int]) -> str:
    runs = [[layer for _, layer in run] for _, run in groupby(enumerate(layers), key=lambda one: one[1] - one[0])]
    named = ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
    return f"layer{'s' if len(layers) > 1 else ''} {named}"
