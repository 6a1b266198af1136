"""Families, units and slices (design, section 1) as data: a unit is selected, cached and read as a whole.

A unit's bytes are its slices' bytes one after another, in the order given here; all units of a family have equal size.
Code works on roles and slices; people and files use the names of families.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from coldpress.schemas.base import Record
from coldpress.schemas.errors import UnknownNameError
from coldpress.schemas.model import ATTENTION_ROLES, MLP_ROLES, MatrixRole, ModelSpec, matrices, role_shape

Signal = Literal[
    "attention_input",
    "attention_mixed",
    "mlp_input",
    "expert_inputs",
    "mlp_activation",
    "mlp_up",
    "mlp_inner",
    "router_logits",
    "router_scores",
]
"""Vectors of a layer, in this order: attention's input after the norm; the mixed heads, the input of o_proj; the MLP's
input after the norm; the same vector once per expert, 0 for experts that a token does not use; act(gate), or act(up)
without a gate; up, after its activation if it has one (dReLU); the product of both, or act(up), in a mixture weighted
by the router; the router's logits; what it chooses experts by (runtime/routers)."""
Axis = Literal["hidden_size", "intermediate_size", "heads", "blocks"]
"""The dimension along which a unit is an index; `heads` has `ModelSpec.mixed_size` entries, `blocks` one for each block
of neurons (`block_neurons`)."""
BLOCK_SIZES = (256, 32)
"""Neurons of a block: the values of a block of llama.cpp's K formats, or of its other formats."""

JOINT = "+"
"""Stands between the formats of slices."""
PLUGIN_NAME = r"^[a-z][a-z0-9_]*$"
Method = Annotated[str, Field(pattern=PLUGIN_NAME)]
"""A selector: the name of a file of runtime/sparsity; loading it checks that the file exists."""
FormatName = Annotated[str, Field(pattern=PLUGIN_NAME)]
"""A format of codes: the name of a file of runtime/quantization; loading it checks that the file exists."""
UnitFormat = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*(\+[a-z][a-z0-9_]*)*$")]
"""The format of a unit's slices or, where they differ, that of each slice in their order with `+` between them."""
LayerFormats = UnitFormat | tuple[UnitFormat, ...]
"""The format of the units of all layers, or that of each layer; where the matrices of a layer's MLP differ, the formats
of gate, up and down, or of up and down, with `+` between them."""


class HeadFormat(Record):
    """A format that the head has of its own."""

    role: Literal["embed_tokens.weight", "lm_head.weight"]
    """The head's tensor (`ModelSpec.head_role`)."""
    format: FormatName


class KeptFormat(Record):
    """Matrices outside of units in another format than goes with the layers': a quantized file's, or a chosen one."""

    format: FormatName
    roles: tuple[str, ...]


class OwnFormats(Record):
    """Formats of layers, beside matrices in formats of their own."""

    layers: LayerFormats
    head: HeadFormat | None = None
    kept: tuple[KeptFormat, ...] = ()

    def __hash__(self) -> int:  # pydantic's own, which type checkers do not see
        return hash((self.layers, self.head, self.kept))


Formats = LayerFormats | OwnFormats
"""The formats of a model's matrices. Without `OwnFormats` the head, embeddings and attention have those that go with
the layers' (compiler/cost_model.py:stored_format)."""


class Slice(Record):
    """A unit's part of one matrix: `row` i is weight[i, :], `column` i is weight[:, i] (Hugging Face's order). `rows`
    are the rows of a block's neurons one after another, and `columns` their columns, row by row: both are stored in the
    codes of whole rows."""

    role: MatrixRole
    axis: Literal["row", "column", "rows", "columns"]


class Family(Record):
    """All units of one kind in a layer."""

    name: str
    axis: Axis
    slices: tuple[Slice, ...]
    signal: Signal
    """The vector that a selector sees."""
    activity: Signal
    """The vector whose entry i says whether unit i is active, and how strongly: the signal itself, unless it comes too
    early to have one entry per unit."""

    @property
    def roles(self) -> tuple[MatrixRole, ...]:
        return tuple(piece.role for piece in self.slices)


def _family(name: str, axis: Axis, signal: Signal, activity: Signal | None = None, **slices: str) -> Family:
    pieces = tuple(Slice.model_validate({"role": f"{role}_proj", "axis": axis}) for role, axis in slices.items())
    return Family(name=name, axis=axis, slices=pieces, signal=signal, activity=activity or signal)


FAMILIES: Mapping[str, Family] = {
    family.name: family
    for family in (
        # row-column bundling: LLM in a flash 3.2
        _family("neuron", "intermediate_size", "mlp_input", "mlp_inner", gate="row", up="row", down="column"),
        _family("block", "blocks", "mlp_input", "mlp_inner", gate="rows", up="rows", down="columns"),
        _family("up_down", "intermediate_size", "mlp_activation", up="row", down="column"),
        _family("gate_down", "intermediate_size", "mlp_up", gate="row", down="column"),
        _family("mlp_in", "hidden_size", "mlp_input", gate="column", up="column"),
        _family("mlp_mid", "intermediate_size", "mlp_inner", down="column"),
        _family("attn_in", "hidden_size", "attention_input", q="column", k="column", v="column"),
        _family("attn_out", "heads", "attention_mixed", o="column"),
    )
}


KNOWN_BEFORE: Mapping[Signal, tuple[MatrixRole, ...]] = {
    "mlp_input": (),
    "mlp_activation": ("gate_proj",),
    "mlp_up": ("up_proj",),
    "mlp_inner": ("gate_proj", "up_proj"),
}
"""Matrices that must be known before a signal is, in an MLP with a gate."""
WHOLE_MLP = "neuron"
"""The family whose units hold the whole MLP, so that no part of the MLP stays resident."""
BLOCKS = "block"
"""The family whose units hold neighbouring neurons; only runs that use all neurons, or whole experts, read them."""


def known_family(name: str) -> str:
    """Returns `name` if a family has it; raises ValueError with the text of `UnknownNameError`, which lists them."""
    if name not in FAMILIES:
        raise ValueError(str(UnknownNameError("family", name, FAMILIES)))
    return name


FamilyName = Annotated[str, AfterValidator(known_family)]


def of_layers(formats: Formats) -> LayerFormats:
    return formats.layers if isinstance(formats, OwnFormats) else formats


def head_of(formats: Formats) -> HeadFormat | None:
    """Returns the head's own format; None if it has the one that goes with the layers'."""
    return formats.head if isinstance(formats, OwnFormats) else None


def kept_of(formats: Formats) -> tuple[KeptFormat, ...]:
    return formats.kept if isinstance(formats, OwnFormats) else ()


def with_own(layers: LayerFormats, head: HeadFormat | None = None, kept: tuple[KeptFormat, ...] = ()) -> Formats:
    """Returns the inverse of `of_layers`, `head_of` and `kept_of`."""
    return OwnFormats(layers=layers, head=head, kept=kept) if head or kept else layers


def with_head(formats: Formats, head: HeadFormat) -> Formats:
    """Returns formats beside one of the head's own, which then keeps no code of the file."""
    kept = {role: one.format for one in kept_of(formats) for role in one.roles if role != head.role}
    return with_own(of_layers(formats), head, kept_of(with_kept(of_layers(formats), kept)))


def with_kept(formats: Formats, kept: Mapping[str, FormatName]) -> Formats:
    """Returns formats beside those of some matrices, by role."""
    groups = [
        KeptFormat(format=name, roles=tuple(sorted(role for role, own in kept.items() if own == name)))
        for name in sorted({*kept.values()})
    ]
    return with_own(of_layers(formats), head_of(formats), tuple(groups))


def without_kept(formats: Formats) -> Formats:
    return with_own(of_layers(formats), head_of(formats))


def by_layer(formats: Formats, num_layers: int) -> Formats:
    """Returns formats with the name of each layer's, where the matrices of an MLP differ: as records have them."""
    layers = of_layers(formats)
    if isinstance(layers, str) and JOINT in layers:
        return with_own((layers,) * num_layers, head_of(formats), kept_of(formats))
    return formats


def layer_format(formats: Formats, layer: int) -> UnitFormat:
    found = of_layers(formats)
    return found if isinstance(found, str) else found[layer]


def matrix_formats(name: UnitFormat) -> dict[MatrixRole, FormatName]:
    names = slice_formats(name)
    return dict(zip(MLP_ROLES[-len(names) :], names, strict=True)) if len(names) > 1 else dict.fromkeys(MLP_ROLES, name)


def slice_formats(name: UnitFormat, count: int = 1) -> tuple[FormatName, ...]:
    """Returns the formats in a unit's format: one for each of `count` slices, where they all have the same."""
    names = tuple(name.split(JOINT))
    return names * count if len(names) == 1 else names


def names_in(formats: LayerFormats) -> frozenset[FormatName]:
    """Returns all formats that layers, or matrices of their MLPs, have."""
    return frozenset(
        name for one in ((formats,) if isinstance(formats, str) else formats) for name in slice_formats(one)
    )


def unit_format(names: Sequence[FormatName]) -> UnitFormat:
    """Returns the format of units whose slices have these formats: the inverse of `slice_formats`."""
    return names[0] if len(set(names)) == 1 else JOINT.join(names)


def layer_formats(formats: Formats) -> tuple[UnitFormat, ...]:
    """Returns the format of each layer's units if they differ; else nothing, as in records."""
    found = of_layers(formats)
    return () if isinstance(found, str) else found


def slices(family: str, spec: ModelSpec) -> tuple[Slice, ...]:
    """Returns the slices of one unit of `family`, without those of matrices that the model does not have."""
    return tuple(piece for piece in FAMILIES[family].slices if piece.role in _present(spec))


def _present(spec: ModelSpec) -> tuple[MatrixRole, ...]:
    return (*spec.attention_roles, *(role for role in MLP_ROLES if spec.gated_mlp or role != "gate_proj"))


def block_neurons(spec: ModelSpec) -> int:
    """Returns the neurons of a block; 0 for a model whose MLP, or expert, has no whole number of blocks."""
    return next((size for size in BLOCK_SIZES if spec.intermediate_size % size == 0), 0)


def dense_family(spec: ModelSpec) -> FamilyName:
    """Returns the family of a dense run: blocks, whose matrices keep the codes of whole rows, where there are any."""
    return BLOCKS if block_neurons(spec) else WHOLE_MLP


def num_units(family: str, spec: ModelSpec) -> int:
    """Returns the number of units of `family` in one layer; for the MLP's families, experts times units per expert.
    Neuron i of expert e is unit e * intermediate_size + i, so that (layer, family) is the key of every table. Blocks of
    neurons have such numbers, too."""
    sizes: dict[Axis, int] = {
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "heads": spec.mixed_size,
        "blocks": spec.intermediate_size // max(1, block_neurons(spec)),
    }
    return sizes[FAMILIES[family].axis] * num_experts(family, spec)


def layers_of(family: str, spec: ModelSpec) -> tuple[int, ...]:
    """Returns the layers that have units of `family`: all, but none without experts for the MLP's families of a
    mixture, whose other layers keep their MLP in DRAM."""
    without = frozenset(spec.dense_layers if any(role in MLP_ROLES for role in FAMILIES[family].roles) else ())
    return tuple(layer for layer in range(spec.num_hidden_layers) if layer not in without)


def unit_keys(families: Sequence[FamilyName], spec: ModelSpec) -> list[tuple[int, FamilyName]]:
    """Lists the layers and families that have units: by layer, then in the order of `families`."""
    having = {family: frozenset(layers_of(family, spec)) for family in families}
    layers = range(spec.num_hidden_layers)
    return [(layer, family) for layer in layers for family in families if layer in having[family]]


def unit_role(role: str, spec: ModelSpec) -> MatrixRole | None:
    """Returns the matrix that a layer's tensor belongs to (`layers.3.experts.1.up_proj.weight`), if its slices may be
    those of units; None for an MLP that has no units on flash, for other tensors, and outside the layers."""
    outer, *inner = role.split(".")
    if outer != "layers":
        return None
    layer, *above, module, _ = inner
    in_units = above[:1] == (["experts"] if spec.is_mixture else []) and not spec.is_dense(int(layer))
    known = (*(() if above else ATTENTION_ROLES), *(MLP_ROLES if in_units else ()))
    return next((name for name in known if name == module), None)


def num_experts(family: str, spec: ModelSpec) -> int:
    """Returns over how many experts the units of `family` run; 1 for attention, and for models without experts."""
    return spec.num_experts if any(role in MLP_ROLES for role in FAMILIES[family].roles) else 1


def used_share(family: str, spec: ModelSpec) -> float:
    """Returns the share of a family's units that a token uses if only the router, and no selector, leaves out units."""
    return spec.num_experts_per_tok / spec.num_experts if num_experts(family, spec) > 1 else 1.0


def signal_of(family: str, spec: ModelSpec) -> Signal:
    """Returns the signal that a selector of `family` sees; in a mixture, inputs are repeated once per expert."""
    found = FAMILIES[family]
    several = num_experts(family, spec) > 1
    return "expert_inputs" if several and found.axis == "hidden_size" else found.signal


def activity_of(family: str, spec: ModelSpec) -> Signal:
    found = FAMILIES[family]
    return signal_of(family, spec) if found.signal == found.activity else found.activity


def slice_shape(piece: Slice, spec: ModelSpec) -> tuple[int, int]:
    """Returns how many slices a unit has of a matrix, and the values of each."""
    rows, columns = role_shape(spec, f"{piece.role}.weight")
    neurons = block_neurons(spec)
    of_units = {"row": (1, columns), "column": (1, rows)}
    return (of_units | {"rows": (neurons, columns), "columns": (rows, neurons)})[piece.axis]


def resident_roles(families: Iterable[str], spec: ModelSpec) -> tuple[MatrixRole, ...]:
    """Returns the matrices of a layer that no family holds and that stay in DRAM: attention's, then the MLP's."""
    on_flash = {piece.role for family in families for piece in slices(family, spec)}
    return tuple(role for role in _present(spec) if role not in on_flash)


def resident_names(layer: int, families: Sequence[str], spec: ModelSpec) -> tuple[str, ...]:
    """Returns the names of the matrices that a layer must keep in DRAM: those that no family holds, those that expand
    latents, routers and shared experts."""
    if spec.is_dense(layer):
        others = [name for name in families if not any(role in MLP_ROLES for role in FAMILIES[name].roles)]
        return (*resident_roles(others, spec.of_layer(layer)), *spec.expanding_matrices)
    held = [name for role in resident_roles(families, spec) for name in matrices(role, spec)]
    held += spec.expanding_matrices
    held += ["router"] * spec.is_mixture
    if spec.shared_intermediate_size:
        held += [f"shared_expert.{role}" for role in MLP_ROLES if spec.gated_mlp or role != "gate_proj"]
    return tuple(held)


def mlp_shares(families: Iterable[str], spec: ModelSpec) -> dict[str, float]:
    """Share of the MLP's weights that each family holds, 0 for attention's; its matrices are equally large."""
    count = 3 if spec.gated_mlp else 2
    return {family: sum(piece.role in MLP_ROLES for piece in slices(family, spec)) / count for family in families}


def resident_share(families: Iterable[str], spec: ModelSpec) -> float:
    return 1 - sum(mlp_shares(families, spec).values())


def mlp_density(shares: Mapping[str, float], spec: ModelSpec) -> float:
    """Returns the share of the MLP's weights that a token uses, from the share of each family's units. Matrices in DRAM
    are used whole. In a mixture, all shares are of the experts that the router picks."""
    return 1 - sum(weight * (1 - shares[family]) for family, weight in mlp_shares(shares, spec).items())


def mlp_families(names: Iterable[str], spec: ModelSpec) -> tuple[list[Family], list[Family]]:
    """The MLP's families among `names`: those over its inputs, and those over its inner activation."""
    found = [FAMILIES[name] for name in names if any(piece.role in MLP_ROLES for piece in slices(name, spec))]
    inputs = [family for family in found if family.axis == "hidden_size"]
    return inputs, [family for family in found if family.axis != "hidden_size"]


def missing_for_decoder(names: Sequence[str], spec: ModelSpec) -> str | None:
    """Returns None if the decoder can compute the model with these families on flash; else the families that it needs.
    Each matrix is in one place, at most one family is over the inner activation, and its signal is known before its
    units are read. Experts need such a family."""
    inputs, inner = mlp_families(names, spec)
    roles = [role for name in names for role in FAMILIES[name].roles]
    once = len(set(roles)) == len(roles) and len(inner) < 2
    down_first = any("down_proj" in family.roles for family in inputs)
    is_whole = bool(inner) or not spec.is_mixture
    if once and is_whole and not down_first and all(_is_computable(family, spec) for family in inner):
        return None
    if spec.is_mixture:
        return (
            "families from which experts can be computed: down in one over intermediate_size, whose signal the others "
            "give"
        )
    return (
        f"families from which {'a gated' if spec.gated_mlp else 'an ungated'} MLP can be computed: each matrix in one "
        "of them, and at most one over intermediate_size, whose signal the others give"
    )


def _is_computable(family: Family, spec: ModelSpec) -> bool:
    if family.axis == "blocks" and not block_neurons(spec):
        return False
    gate_matters = spec.gated_mlp or family.signal in ("mlp_input", "mlp_inner")
    is_known = not set(KNOWN_BEFORE[family.signal]) & set(family.roles)
    return "down_proj" in family.roles and is_known and gate_matters
