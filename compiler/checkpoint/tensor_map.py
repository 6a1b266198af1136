"""Finds the tensor, or the rows of a fused tensor, that holds each role; checks every shape and dtype.

Reads headers only, with one exception: a head that is stored although config.json declares it tied is compared with the
embeddings, block by block. Tensors that no role uses are refused: they show that config.json describes another model.
"""

import re
from collections import Counter
from collections.abc import Mapping
from math import prod
from types import MappingProxyType

import numpy as np

from coldpress.compiler.architectures._common import Place
from coldpress.compiler.checkpoint.gguf_files import GgufModel
from coldpress.compiler.checkpoint.mxfp4 import BLOCKS, GROUP, GROUP_BYTES, SCALES
from coldpress.compiler.checkpoint.tensors import FLOAT_DTYPES, PACKED_DTYPE, READABLE, read_entry
from coldpress.compiler.checkpoint.weight_files import Located
from coldpress.compiler.llama_cpp import names as llama_cpp_names
from coldpress.compiler.llama_cpp.architectures import LlamaCppArchitecture
from coldpress.compiler.llama_cpp.types import QUANTIZED
from coldpress.runtime.artifact.errors import short
from coldpress.schemas.errors import CheckpointError
from coldpress.schemas.model import ModelSpec, StoredTensor, TensorSource, role_shape

IGNORED = re.compile(r"(.*\.)?(rotary_emb\.inv_freq|masked_bias|(attn|attention)\.bias)")
"""Buffers that old versions saved; nothing reads them."""
HEAD = "lm_head.weight"
OLD_NAMES = {HEAD: "embed_out.weight"}
"""Names before transformers 5 (GPT-NeoX)."""
COMPARED_ROWS = 4096
FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors of GGUF that `gguf_config` has read."""


def _find(located: Mapping[str, Located], name: str) -> Located | None:
    """Finds a tensor by its full name, its old one, or without the prefix, which models saved without a head lack."""
    return located.get(name) or located.get(name.partition(".")[2]) or located.get(OLD_NAMES.get(name, name))


def match_tensors(
    spec: ModelSpec,
    names: Mapping[str, tuple[str, ...]],
    located: Mapping[str, Located],
    ignored: str = "",
    places: Mapping[str, Place] = MappingProxyType({}),
) -> dict[str, TensorSource]:
    """Finds every role's tensor. `names` has tensor names and their roles, several being stacked rows
    (compiler/architectures); `places` those of its names that are parts of other tensors; `ignored` is a pattern of
    names that the architecture leaves out. Raises CheckpointError if a tensor is missing, foreign, of another shape or
    dtype, or tied but different."""
    tensors: dict[str, TensorSource] = {}
    used: set[str] = set()
    for name, roles in names.items():
        if name in places:
            tensors[roles[0]] = _placed(spec, places[name], located, roles[0], used)
            continue
        found = _find(located, name)
        if found is None and spec.tie_word_embeddings and roles == ("embed_tokens.weight",):
            found = located.get(HEAD)  # a checkpoint may store either of two tied tensors
        if found is None:
            raise _missing(name)
        used.add(found.entry.name)
        tensors |= _sources(spec, found, roles)
    if spec.tie_word_embeddings and HEAD in located and HEAD not in used:
        _check_tied(located[HEAD], tensors["embed_tokens.weight"], located)
        used.add(HEAD)
    unused = (name for name in set(located) - used if not re.fullmatch(ignored, name))
    if foreign := sorted(name for name in unused if not IGNORED.fullmatch(name)):
        raise CheckpointError(
            f"tensor {foreign[0]} has no place in a {spec.model_type} model with this config.json "
            f"({len(foreign)} such tensors); check the configuration"
        )
    return dict(sorted(tensors.items()))


def _sources(spec: ModelSpec, found: Located, roles: tuple[str, ...]) -> dict[str, TensorSource]:
    counts = Counter(roles)
    shapes = {role: role_shape(spec, role) for role in counts}
    num_rows = sum(shape[0] for shape in shapes.values())
    _check_tensor(found, (num_rows, *shapes[roles[0]][1:]))
    sources, row = dict[str, TensorSource](), 0
    for role in dict.fromkeys(roles):
        size = shapes[role][0] // counts[role]
        sources[role] = TensorSource(
            file=str(found.path.resolve()),
            tensor=found.entry.name,
            row_start=row,
            row_stop=row + size,
            num_parts=counts[role],
            stride_rows=num_rows // counts[role] if counts[role] > 1 else 0,
            shape=shapes[role],
        )
        row += size
    return sources


def _placed(spec: ModelSpec, place: Place, located: Mapping[str, Located], role: str, used: set[str]) -> TensorSource:
    """Returns the place of a role in a tensor that holds other roles, too; adds what it reads to `used`."""
    rows, *rest = shape = role_shape(spec, role)
    whole = place.num_parts * rows, *rest
    experts = () if place.index is None else (place.num_entries or spec.num_experts,)
    is_packed = place.packed and _find(located, f"{place.tensor}{BLOCKS}") is not None
    groups = (*experts, *whole[:-1], -(-whole[-1] // GROUP))
    stored = (*experts, *(reversed(whole) if place.transposed else whole))
    expected = {BLOCKS: (*groups, GROUP_BYTES), SCALES: groups} if is_packed else {"": stored}
    found = list[StoredTensor]()
    for end, wanted in expected.items():
        part = _find(located, f"{place.tensor}{end}")
        if part is None:
            raise _missing(f"{place.tensor}{end}")
        _check_tensor(part, wanted, (PACKED_DTYPE,) if is_packed else FLOAT_DTYPES)
        used.add(part.entry.name)
        found.append(StoredTensor(file=str(part.path.resolve()), tensor=part.entry.name))
    start, size = (place.part, 1) if place.interleaved else (place.part * rows, rows)
    return TensorSource(
        file=found[0].file,
        tensor=found[0].tensor,
        row_start=start,
        row_stop=start + size,
        num_parts=rows // size,
        stride_rows=place.num_parts if place.interleaved else 0,
        shape=shape,
        index=place.index,
        transposed=place.transposed and not is_packed,
        scales=found[1] if is_packed else None,
    )


def _missing(name: str) -> CheckpointError:
    return CheckpointError(f"tensor {name} is missing in the checkpoint, but config.json asks for it")


def _check_tensor(found: Located, expected: tuple[int, ...], dtypes: tuple[str, ...] = FLOAT_DTYPES) -> None:
    entry, file = found.entry, found.path.name
    if entry.shape != expected:
        raise CheckpointError(
            f"{file}: tensor {entry.name} has the shape {list(entry.shape)}, expected {list(expected)} by config.json"
        )
    if entry.dtype not in dtypes:
        raise CheckpointError(
            f"{file}: tensor {entry.name} has the unsupported dtype {entry.dtype}, expected {', '.join(dtypes)}"
        )


def _check_tied(head: Located, embeddings: TensorSource, located: Mapping[str, Located]) -> None:
    _check_tensor(head, embeddings.shape)
    other = located[embeddings.tensor]
    for start in range(0, embeddings.shape[0], COMPARED_ROWS):
        stop = min(start + COMPARED_ROWS, embeddings.shape[0])
        one, two = (read_entry(found.path, found.entry, start, stop) for found in (head, other))
        if not np.array_equal(one, two, equal_nan=True):
            raise CheckpointError(
                f"{HEAD} and {embeddings.tensor} differ, but config.json declares them tied; set "
                f"tie_word_embeddings to false or remove {HEAD}"
            )


def match_gguf(spec: ModelSpec, parameters: Mapping[str, tuple[str, ...]], model: GgufModel) -> dict[str, TensorSource]:
    """Finds every role's tensor in GGUF; `parameters` are transformers' names and their roles (compiler/architectures).
    Raises CheckpointError if a tensor is missing, foreign, or of another shape or type."""
    architecture = llama_cpp_names.named(spec)
    assert architecture is not None  # `gguf_config` names only those that llama.cpp has
    found = {role: _gguf_source(spec, architecture, role, model) for roles in parameters.values() for role in roles}
    used = {source.tensor for source in found.values()} | set(FACTORS)
    foreign = sorted(name for name in set(model.located) - used if not _is_left_out(spec, name))
    if foreign:
        raise model.refused(
            f"the tensor {short(foreign[0])} has no place in a model of the architecture {architecture.name} with "
            f"these keys ({len(foreign)} such tensors), so the model would be computed otherwise than by llama.cpp"
        )
    return dict(sorted(found.items()))


def _is_left_out(spec: ModelSpec, name: str) -> bool:
    """Tells whether a tensor belongs to a layer behind the last one, which predicts further tokens (GLM-4.5)."""
    part, _, rest = name.partition(".")
    layer = rest.partition(".")[0]
    return part == "blk" and layer.isdecimal() and int(layer) >= spec.num_hidden_layers


def _gguf_source(spec: ModelSpec, architecture: LlamaCppArchitecture, role: str, model: GgufModel) -> TensorSource:
    name, shape = llama_cpp_names.tensor_name(architecture, role), role_shape(spec, role)
    if name is None:
        raise model.refused(f"llama.cpp's architecture {architecture.name} has no tensor for {role}")
    located = model.located.get(name)
    if located is None:
        raise model.refused(f"the tensor {name} is missing, expected it for {role}")
    above, start = _rows_in_gguf(spec, architecture, role)
    index = int(role.split(".")[3]) if ".experts." in role else None
    rows = (above, *shape[1:])
    _check_gguf(located, rows if index is None else (spec.num_experts, *rows))
    return TensorSource(
        file=str(located.path.resolve()),
        tensor=name,
        row_start=start,
        row_stop=start + shape[0],
        shape=shape,
        index=index,
        paired_heads=architecture.rotated_heads(spec, role),
        added=float(llama_cpp_names.counts_from_one(spec, role)),
        quantized=located.entry.dtype if located.entry.dtype in QUANTIZED else None,
    )


def _rows_in_gguf(spec: ModelSpec, architecture: LlamaCppArchitecture, role: str) -> tuple[int, int]:
    """(rows of all modules that share the role's tensor, rows before the role's)."""
    *before, module, kind = role.split(".")
    members = next((held for held in architecture.fused.values() if module in held), (module,))
    if "experts" in before or "shared_expert" in before:
        members = (module,)
    sizes = [role_shape(spec, ".".join((*before, member, kind)))[0] for member in members]
    return sum(sizes), sum(sizes[: members.index(module)])


def _check_gguf(located: Located, expected: tuple[int, ...]) -> None:
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
