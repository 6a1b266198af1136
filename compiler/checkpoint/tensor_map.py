"""Finds the tensor, or the rows of a fused tensor, that holds each role; checks every shape and dtype.

Reads headers only, with one exception: a head that is stored although config.json declares it tied is compared with the
embeddings, block by block. Tensors that no role uses are refused: they show that config.json describes another model.
"""

import re
from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from coldpress.compiler.architectures._common import Place
from coldpress.compiler.checkpoint.mxfp4 import BLOCKS, GROUP, GROUP_BYTES, SCALES
from coldpress.compiler.checkpoint.tensors import FLOAT_DTYPES, PACKED_DTYPE, read_entry
from coldpress.compiler.checkpoint.weight_files import Located
from coldpress.schemas.errors import CheckpointError
from coldpress.schemas.model import ModelSpec, StoredTensor, TensorSource, role_shape

IGNORED = re.compile(r"(.*\.)?(rotary_emb\.inv_freq|masked_bias|(attn|attention)\.bias)")
"""Buffers that old versions saved; nothing reads them."""
HEAD = "lm_head.weight"
OLD_NAMES = {HEAD: "embed_out.weight"}
"""Names before transformers 5 (GPT-NeoX)."""
COMPARED_ROWS = 4096


def _find(located: Mapping[str, Located], name: str) -> Located | None:
    """Returns a tensor by its full name, without the prefix, which models saved without their head lack, or by the name
    that it once had."""
    return located.get(name) or located.get(name.partition(".")[2]) or located.get(OLD_NAMES.get(name, name))


def match_tensors(
    spec: ModelSpec,
    names: Mapping[str, tuple[str, ...]],
    located: Mapping[str, Located],
    ignored: str = "",
    places: Mapping[str, Place] = MappingProxyType({}),
) -> dict[str, TensorSource]:
    """Returns the place of every role's tensor.

    Args:
        names: Tensor names and their roles, several roles being stacked rows (compiler/architectures).
        ignored: A pattern of further names that the architecture leaves out.
        places: Names of `names` that are parts of other tensors of the checkpoint.

    Raises:
        CheckpointError: if a tensor is missing, foreign, of another shape or dtype, or tied but different.
    """
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
    _check_unused(spec, {name for name in set(located) - used if not re.fullmatch(ignored, name)})
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


def _check_unused(spec: ModelSpec, names: set[str]) -> None:
    foreign = sorted(name for name in names if not IGNORED.fullmatch(name))
    if foreign:
        raise CheckpointError(
            f"tensor {foreign[0]} has no place in a {spec.model_type} model with this config.json "
            f"({len(foreign)} such tensors); check the configuration"
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
