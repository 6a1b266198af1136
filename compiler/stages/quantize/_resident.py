"""Lists the tensors that stay in DRAM, with the formats that the cost model assumes.

The roles are the model's (`Model.tensors`), so biases and q/k norms appear where the architecture has them. A head tied
to the embeddings is not stored twice; rotary frequencies, which checkpoints do not hold, are added.
"""

from coldpress.compiler.cost_model import stored_format
from coldpress.runtime.artifact.contents import coarse_role, coarse_shape
from coldpress.schemas.families import FamilyName, FormatName, Formats, slices, unit_role
from coldpress.schemas.model import Model, role_shape
from coldpress.schemas.quantized import ResidentTensor


def layer_resident(
    model: Model, layer: int, families: tuple[FamilyName, ...], formats: Formats
) -> tuple[ResidentTensor, ...]:
    """Lists the tensors that one layer keeps in DRAM, sorted by role."""
    prefix = f"layers.{layer}."
    on_flash = {piece.role for family in families for piece in slices(family, model.spec)}
    roles = (
        role
        for role in sorted(model.tensors)
        if role.startswith(prefix) and (role.endswith(".bias") or unit_role(role, model.spec) not in on_flash)
    )
    return tuple(_tensor(role, model.tensors[role].shape, formats) for role in roles)


def coarse_tensors(
    model: Model, layer: int, families: tuple[FamilyName, ...], formats: Formats
) -> tuple[ResidentTensor, ...]:
    """Lists the coarse planes of a layer's units, of formats in planes."""
    roles = {coarse_role(layer, family): coarse_shape(family, model.spec) for family in families}
    return tuple(_tensor(role, shape, formats) for role, shape in roles.items())


def shared_resident(model: Model, format_name: FormatName) -> tuple[ResidentTensor, ...]:
    """Lists the tensors that all layers share: embeddings, positions, norm, head, rotary frequencies; by role."""
    shapes = {role: source.shape for role, source in model.tensors.items() if not role.startswith("layers.")}
    if model.spec.tie_word_embeddings:
        shapes.pop("lm_head.weight", None)
    shapes |= {role: role_shape(model.spec, role) for role in model.spec.frequencies.values()}
    return tuple(_tensor(role, shapes[role], format_name) for role in sorted(shapes))


def _tensor(role: str, shape: tuple[int, ...], formats: Formats) -> ResidentTensor:
    return ResidentTensor(role=role, format=stored_format(role, formats), shape=shape)
