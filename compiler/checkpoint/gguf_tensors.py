"""Finds the rows of a GGUF file's tensors that hold each role; checks every shape and type.

llama.cpp has the tensors of each architecture under its own names, some with rows in another order, with several
modules stacked, or with all experts in one (compiler/llama_cpp). Values stay where they are: `tensors.py` reads them.
"""

from collections.abc import Mapping
from math import prod

from coldpress.compiler.checkpoint.gguf_files import GgufModel
from coldpress.compiler.checkpoint.tensors import FLOAT_DTYPES, READABLE
from coldpress.compiler.checkpoint.weight_files import Located
from coldpress.compiler.llama_cpp import names
from coldpress.compiler.llama_cpp.architectures import Architecture
from coldpress.compiler.llama_cpp.types import QUANTIZED
from coldpress.runtime.artifact.errors import short
from coldpress.schemas.errors import CheckpointError
from coldpress.schemas.model import ModelSpec, TensorSource, role_shape

FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that `gguf_config` has read."""


def match_gguf(spec: ModelSpec, parameters: Mapping[str, tuple[str, ...]], model: GgufModel) -> dict[str, TensorSource]:
    """Returns the place of every role's tensor; `parameters` are transformers' names and their roles
    (compiler/architectures).

    Raises:
        CheckpointError: if a tensor is missing, foreign, or of another shape or type.
    """
    architecture = names.named(spec)
    assert architecture is not None  # `gguf_config` names only those that llama.cpp has
    found = {role: _source(spec, architecture, role, model) for roles in parameters.values() for role in roles}
    used = {source.tensor for source in found.values()} | set(FACTORS)
    foreign = sorted(name for name in set(model.located) - used if not _is_left_out(spec, name))
    if foreign:
        raise model.refused(
            f"the tensor {short(foreign[0])} has no place in a model of the architecture {architecture.name} with "
            f"these keys ({len(foreign)} such tensors), so the model would be computed otherwise than by llama.cpp"
        )
    return dict(sorted(found.items()))


def _is_left_out(spec: ModelSpec, name: str) -> bool:
    """Returns whether a tensor belongs to a layer behind the last one, which predicts further tokens (GLM-4.5)."""
    part, _, rest = name.partition(".")
    layer = rest.partition(".")[0]
    return part == "blk" and layer.isdecimal() and int(layer) >= spec.num_hidden_layers


def _source(spec: ModelSpec, architecture: Architecture, role: str, model: GgufModel) -> TensorSource:
    name, shape = names.tensor_name(architecture, role), role_shape(spec, role)
    if name is None:
        raise model.refused(f"llama.cpp's architecture {architecture.name} has no tensor for {role}")
    located = model.located.get(name)
    if located is None:
        raise model.refused(f"the tensor {name} is missing, expected it for {role}")
    above, start = _stacked(spec, architecture, role)
    index = int(role.split(".")[3]) if ".experts." in role else None
    rows = (above, *shape[1:])
    _check(located, rows if index is None else (spec.num_experts, *rows))
    return TensorSource(
        file=str(located.path.resolve()),
        tensor=name,
        row_start=start,
        row_stop=start + shape[0],
        shape=shape,
        index=index,
        paired_heads=architecture.rotated_heads(spec, role),
        added=float(names.counts_from_one(spec, role)),
        quantized=located.entry.dtype if located.entry.dtype in QUANTIZED else None,
    )


def _stacked(spec: ModelSpec, architecture: Architecture, role: str) -> tuple[int, int]:
    """Returns (rows of all modules that share the role's tensor, rows before the role's)."""
    *before, module, kind = role.split(".")
    members = next((held for held in architecture.fused.values() if module in held), (module,))
    if "experts" in before or "shared_expert" in before:
        members = (module,)
    sizes = [role_shape(spec, ".".join((*before, member, kind)))[0] for member in members]
    return sum(sizes), sum(sizes[: members.index(module)])


def _check(located: Located, expected: tuple[int, ...]) -> None:
    entry, file = located.entry, located.path.name
    if entry.shape != expected and not (expected[0] == 1 and entry.shape == expected[1:]):
        raise CheckpointError(
            f"{file}: the tensor {entry.name} has the shape {list(entry.shape)}, expected {list(expected)} by its keys"
        )
    allowed = READABLE if len(expected) > 1 else FLOAT_DTYPES
    if entry.dtype not in allowed or prod(expected) == 0:
        raise CheckpointError(
            f"{file}: the tensor {entry.name} has the type {entry.dtype}, expected {', '.join(allowed)}"
        )
