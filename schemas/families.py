"""Families, units and slices (design, section 1): what is selected, cached and read together, as pure arithmetic.

A unit's bytes are its slices' bytes one after another, in the order given here; all units of a family have equal size.
"""

from typing import Literal

from schemas.base import Record
from schemas.model import MLP_ROLES, MlpRole, ModelSpec

FamilyName = Literal["neuron", "up_down", "mlp_in", "mlp_mid"]
Method = Literal["dense", "relu", "predictor", "topk"]
FormatName = Literal["fp16", "int8_group32", "int4_group32"]


class Slice(Record):
    """One row or column of one matrix; `row` i is weight[i, :], `column` i is weight[:, i] (Hugging Face's order)."""

    role: MlpRole
    axis: Literal["row", "column"]


def slices(family: FamilyName, spec: ModelSpec) -> tuple[Slice, ...]:
    """The slices of one unit of `family`; a model without a gate has none of the gate's."""
    layout: dict[FamilyName, tuple[tuple[MlpRole, Literal["row", "column"]], ...]] = {
        "neuron": (("gate_proj", "row"), ("up_proj", "row"), ("down_proj", "column")),
        "up_down": (("up_proj", "row"), ("down_proj", "column")),
        "mlp_in": (("gate_proj", "column"), ("up_proj", "column")),
        "mlp_mid": (("down_proj", "column"),),
    }
    return tuple(Slice(role=role, axis=axis) for role, axis in layout[family] if spec.gated_mlp or role != "gate_proj")


def num_units(family: FamilyName, spec: ModelSpec) -> int:
    """Units of `family` in one layer."""
    return spec.hidden_size if family == "mlp_in" else spec.intermediate_size


def slice_length(piece: Slice, spec: ModelSpec) -> int:
    """Values in one slice."""
    across_hidden = (piece.role == "down_proj") == (piece.axis == "column")
    return spec.hidden_size if across_hidden else spec.intermediate_size


def families_of(method: Method, spec: ModelSpec) -> tuple[FamilyName, ...]:
    """The families an artifact of `method` keeps on flash.

    `relu` needs exact activations before it reads, so the matrix that decides stays resident: the gate, or the up
    projection of a model without one.
    """
    if method == "relu":
        return ("up_down",) if spec.gated_mlp else ("mlp_mid",)
    if method == "topk":
        return ("mlp_in", "mlp_mid")
    return ("neuron",)


def resident_roles(families: tuple[FamilyName, ...], spec: ModelSpec) -> tuple[MlpRole, ...]:
    """The MLP matrices that no family holds, hence stay in DRAM."""
    on_flash = {piece.role for family in families for piece in slices(family, spec)}
    present: tuple[MlpRole, ...] = MLP_ROLES if spec.gated_mlp else ("up_proj", "down_proj")
    return tuple(role for role in present if role not in on_flash)
