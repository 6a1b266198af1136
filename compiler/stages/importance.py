"""importance: reads a llama.cpp importance matrix by role, so that `quantize` rounds important inputs more exactly.

The file's mean squares take the place of those that `calibrate` measures. Names are llama.cpp's for every architecture;
a tensor that the checkpoint stores fused is fused there, too. A build has this stage only if it names a file; it runs
early, so that a file of another model is refused before the long stages.

Both formats of the file (llama.cpp's tools/imatrix) give the mean square of every input of each matrix, by the matrix's
name in GGUF; experts follow one another. A GGUF file holds sums of squares (`<name>.in_sum2`) and numbers of tokens
(`<name>.counts`), one for each expert. The older format is little-endian without a magic number, and holds means times
a number of calls:

    int32 entries, then for each: int32 length, name, int32 calls, int32 values, float32 values

followed by the number of chunks and the text's name, both optional.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO

import numpy as np
from pydantic import Field

from coldpress.compiler.io import Workspace, sha256_of
from coldpress.compiler.llama_cpp.header import MAGIC, Bytes, read_header
from coldpress.schemas.base import Record
from coldpress.schemas.config import Key
from coldpress.schemas.errors import ColdpressError, clipped
from coldpress.schemas.gram import Importance, LayerArrays
from coldpress.schemas.model import Model
from coldpress.schemas.preflight import StageNeeds

if TYPE_CHECKING:
    from coldpress.compiler.needs import Build

NAMES: Mapping[frozenset[str], str] = {
    frozenset({"q_proj"}): "attn_q",
    frozenset({"k_proj"}): "attn_k",
    frozenset({"v_proj"}): "attn_v",
    frozenset({"q_proj", "k_proj", "v_proj"}): "attn_qkv",
    frozenset({"o_proj"}): "attn_output",
    frozenset({"gate_proj"}): "ffn_gate",
    frozenset({"up_proj"}): "ffn_up",
    frozenset({"gate_proj", "up_proj"}): "ffn_up",
    frozenset({"down_proj"}): "ffn_down",
}
"""Roles that a tensor holds -> its name in GGUF, after `blk.<layer>.`; tensors of all experts end in `_exps`."""
HEAD = "output.weight"
KIND = "imatrix"
SUMS, COUNTS = ".in_sum2", ".counts"
MAX_FILE_BYTES = 4 << 30
"""A mixture of 256 experts in 60 layers takes about 1 GB."""
MAX_ENTRIES = 1 << 16
MAX_EXPERTS = 1 << 12


@dataclass(frozen=True)
class Entry:
    """The place of a matrix, or of all experts' matrices, in the file. It holds no array: many entries may name the
    same bytes, so all of them together can be far larger than the file."""

    at_bytes: int
    num_values: int
    num_counts: int = 1
    counts_at_bytes: int | None = None
    """Place of the divisors, float32 [num_counts], one for each expert; None in the older format, which has `calls`."""
    calls: int = 1


@dataclass(frozen=True)
class Imatrix:
    path: Path
    entries: Mapping[str, Entry]

    def read(self, name: str) -> np.ndarray:
        """Returns mean squares float32 [inputs], experts one after another; 1 for an expert that no token used, as in
        llama.cpp. Raises ColdpressError if a count or a mean is not a finite number that is at least 0."""
        entry = self.entries[name]
        with self.path.open("rb") as file:
            values = Bytes(file, *_named(self.path), entry.at_bytes).floats(entry.num_values)
            if entry.counts_at_bytes is None:
                counts = np.full((entry.num_counts, 1), entry.calls, np.float32)
            else:
                counts = Bytes(file, *_named(self.path), entry.counts_at_bytes).floats(entry.num_counts)[:, None]
        if not (np.isfinite(counts) & (counts >= 0)).all():
            raise _refused(self.path, f"the counts of {clipped(name)} are not valid numbers of tokens")
        with np.errstate(over="ignore", invalid="ignore"):
            means = np.where(counts > 0, values.reshape(len(counts), -1) / np.maximum(counts, 1), np.float32(1))
        if not (np.isfinite(means) & (means >= 0)).all():
            what = f"{clipped(name)} holds NaN, infinity or a number below 0, expected mean squares"
            raise _refused(self.path, what)
        return means.reshape(-1)


def open_imatrix(path: Path) -> Imatrix:
    """Finds a file's entries; raises ColdpressError if it cannot be read or has neither format."""
    try:
        with path.open("rb") as file:
            source = Bytes(file, *_named(path))
            if source.size_bytes > MAX_FILE_BYTES:
                raise _refused(path, f"it has {source.size_bytes} bytes, expected {MAX_FILE_BYTES} at most")
            found = _gguf(file, source) if file.peek(len(MAGIC)).startswith(MAGIC) else _legacy(source)
    except OSError as error:
        raise ColdpressError(
            f"the imatrix {path} cannot be read ({error.strerror}); name the file that llama-imatrix wrote"
        ) from error
    if not found:
        raise _refused(path, "it has no entries, expected one for each matrix")
    return Imatrix(path, found)


def _named(path: Path) -> tuple[str, str]:
    return f"the imatrix {path}", "make it again with llama-imatrix"


def _refused(path: Path, what: str) -> ColdpressError:
    name, remedy = _named(path)
    return ColdpressError(f"{name}: {what}; {remedy}")


def _legacy(source: Bytes) -> dict[str, Entry]:
    """Returns the entries of the older format; the bytes after them do not describe the model."""
    count = source.number("i")
    if not 0 < count <= MAX_ENTRIES:
        raise source.refused("it is neither GGUF nor llama.cpp's older form, which begins with the number of entries")
    found: dict[str, Entry] = {}
    for _ in range(count):
        name = source.text("i")
        calls, values = source.number("i"), source.number("i")
        if calls < 0 or values < 1 or name in found:
            raise source.refused(
                f"entry {clipped(name)} has {calls} calls and {values} values, expected one such entry with values"
            )
        found[name] = Entry(source.at, values, calls=max(calls, 1))
        source.skip(4 * values)
    return found


def _gguf(file: BinaryIO, source: Bytes) -> dict[str, Entry]:
    header = read_header(file, source.name, source.remedy)
    if (kind := header.values.get("general.type")) != KIND:
        raise source.refused(f"it is GGUF of the type {clipped(str(kind))}, expected {KIND}")
    for entry in header.tensors.values():
        if entry.dtype != "F32":
            raise source.refused(f"{clipped(entry.name)} is of the type {entry.dtype}, expected F32")
    found: dict[str, Entry] = {}
    for name, sums in header.tensors.items():
        if not name.endswith(SUMS):
            continue
        matrix, count = name.removesuffix(SUMS), math.prod(sums.shape)
        counts = header.tensors.get(matrix + COUNTS)
        matrices = math.prod(counts.shape) if counts else 0
        if counts is None or not 0 < matrices <= MAX_EXPERTS or count % matrices:
            raise source.refused(
                f"{clipped(matrix)} has {count} sums and {matrices} counts, expected a count for each expert, at most "
                f"{MAX_EXPERTS}, and equally many sums for each"
            )
        found[matrix] = Entry(sums.start_bytes, count, matrices, counts.start_bytes)
    return found


class ImportanceConfig(Record):
    """Settings of `importance`."""

    imatrix: Annotated[str | None, Key(default="none")] = Field(
        default=None,
        min_length=1,
        description="a file of llama-imatrix, .gguf or .dat: how much each input counts when scales are chosen, in "
        "place of what calibration text says",
    )


def run(config: ImportanceConfig, model: Model, work: Workspace) -> Importance:
    """Returns the importance of every input of the model's matrices; raises ColdpressError if the file cannot be read,
    or is not of this model."""
    if config.imatrix is None:
        raise ColdpressError("importance has no file to read; give imatrix")
    path = Path(config.imatrix)
    found = open_imatrix(path)
    layers = tuple(
        LayerArrays(layer=layer, arrays=work.save(f"layer-{layer}", _layer(found, model, layer)))
        for layer in range(model.spec.num_hidden_layers)
    )
    size = 0 if model.spec.tie_word_embeddings else model.tensors["lm_head.weight"].shape[1]
    head = {"lm_head": _of(found, HEAD, model, size)} if size and HEAD in found.entries else None
    return Importance(imatrix_sha256=sha256_of(path), layers=layers, shared=work.save("shared", head) if head else None)


def needs(build: "Build") -> StageNeeds:
    layer = 4 * sum(shape[-1] for shape in build.layer_shapes)
    disk_bytes = build.model.spec.num_hidden_layers * (2 * layer + (32 << 10))
    return StageNeeds(
        stage="importance", ram_bytes=build.PYTHON_BYTES + build.BLOCK_BYTES + 8 * layer, disk_bytes=disk_bytes
    )


def _layer(found: Imatrix, model: Model, layer: int) -> dict[str, np.ndarray]:
    """Returns, for each matrix of the layer, the mean squares of its inputs, float32 [inputs]."""
    prefix = f"layers.{layer}."
    matrices = {
        role.removeprefix(prefix).removesuffix(".weight"): source
        for role, source in model.tensors.items()
        if role.startswith(prefix) and role.endswith("_proj.weight")
    }
    fused: dict[str, tuple[str, ...]] = {}
    for role, source in matrices.items():
        name = source.tensor if source.index is None else role  # llama.cpp has gate and up of experts in two tensors
        fused[name] = (*fused.get(name, ()), role)
    read: dict[str, np.ndarray] = {}
    values: dict[str, np.ndarray] = {}
    for roles in fused.values():
        *expert, _ = roles[0].split(".")
        held = frozenset(role.rpartition(".")[2] for role in roles)
        name = f"blk.{layer}.{NAMES[held]}{'_exps' if expert else ''}.weight"
        size, start = matrices[roles[0]].shape[1], 0
        if expert:
            start = int(expert[1]) * size
        if name not in read:
            read[name] = _of(found, name, model, size * (model.spec.num_experts if expert else 1))
        values |= dict.fromkeys(roles, read[name][start : start + size])
    return values


def _of(found: Imatrix, name: str, model: Model, size: int) -> np.ndarray:
    """Returns an entry's values, float32 [size]; raises ColdpressError if it is missing or has more or fewer."""
    if name not in found.entries:
        raise ColdpressError(
            f"the imatrix {found.path} has no entry {name}, expected one for every matrix of {model.name}; its "
            f"{len(found.entries)} entries begin with {clipped(min(found.entries))}; make it of this model"
        )
    if (count := found.entries[name].num_values) != size:
        raise ColdpressError(
            f"the imatrix {found.path} has {count} values for {name}, expected {size}, the inputs of that matrix in "
            f"{model.name}; make it of this model"
        )
    return found.read(name)
