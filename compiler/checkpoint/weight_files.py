"""Finds a checkpoint's tensors in its safetensors files, and reads every byte of them once.

Pickle files are never opened. Names in an index are names of files in the folder, nothing else; links must stay in the
folder or, in the hub's cache, in that repository's own store. One pass in blocks computes the files' digests and checks
that every value is finite and small enough for an artifact.
"""

import hashlib
import logging
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from coldpress.compiler.checkpoint.headers import read_header
from coldpress.compiler.checkpoint.mxfp4 import LARGEST_SCALE, SCALES
from coldpress.compiler.checkpoint.source_json import POINTER_BYTES, read_object, refuse_pointer
from coldpress.compiler.io import sha256_of
from coldpress.compiler.llama_cpp.types import BLOCKS, QUANTIZED, decode
from coldpress.runtime.artifact.tensor_files import TensorEntry
from coldpress.schemas.errors import CheckpointError, clipped
from coldpress.schemas.model import SourceFile

log = logging.getLogger(__name__)

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_INDEX_BYTES = 64 << 20
MAX_SHARDS = 1024
BLOCK_BYTES = 4 << 20
DECODED_BLOCKS = 1 << 12
"""GGUF's blocks, of up to 256 values, that are in memory as float32 at a time."""
LARGEST_VALUE = 65504
"""fp16's."""
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".h5", ".msgpack")
FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,254}")
LARGEST = {
    "F32": (np.uint32, 0x7FFFFFFF, 0x477FE000),
    "F16": (np.uint16, 0x7FFF, 0x7BFF),
    "BF16": (np.uint16, 0x7FFF, 0x477F),
    SCALES: (np.uint8, 0xFF, LARGEST_SCALE),
}
"""dtype -> (unsigned type to read values as, mask of all bits but the sign, bits of the largest allowed value).

That value is fp16's largest, 65504, or the next one below it in the dtype: resident tensors are stored in fp16. Larger
values, infinity and NaN have larger bits; so have the scales of MXFP4 that lead to such values.
"""


@dataclass(frozen=True)
class Located:
    path: Path
    entry: TensorEntry


def locate(folder: Path) -> dict[str, Located]:
    """Returns every tensor of the checkpoint in `folder`, by name; checks headers and index, reads no values. Raises
    CheckpointError naming file and tensor, what was found and what was expected."""
    if is_there(folder, WEIGHTS):
        path = regular_file(folder, WEIGHTS)
        return {name: Located(path, entry) for name, entry in read_header(path).items()}
    if not is_there(folder, INDEX):
        raise _nothing(folder)
    return _indexed(folder, _weight_map(regular_file(folder, INDEX)))


def is_there(folder: Path, name: str) -> bool:
    """Tells whether a folder has an entry `name`, also if it is a link that leads nowhere."""
    return os.path.lexists(folder / name)


def regular_file(folder: Path, name: str) -> Path:
    """Returns the file `name` of a checkpoint's folder; raises CheckpointError if the name is no plain name, the file
    is missing or a pointer of git-lfs, or a link leads out of the checkpoint."""
    if not FILE_NAME.fullmatch(name) or ".." in name:
        raise CheckpointError(f"{name[:80]!r} is not a plain file name; a checkpoint's files lie in its own folder")
    path = folder / name
    if not path.is_file():
        raise CheckpointError(f"{name} is missing in the checkpoint; complete it")
    # the hub's cache stores files in blobs/ and links to them from snapshots/<revision>/
    stores = [folder.resolve()]
    if folder.resolve().parent.name == "snapshots":
        stores.append(folder.resolve().parent.parent / "blobs")
    if path.resolve().parent not in stores:
        raise CheckpointError(f"{name} is a link that leads out of the checkpoint's folder; copy the file instead")
    with path.open("rb") as file:
        refuse_pointer(name, file.read(POINTER_BYTES))
    return path


def source_file(path: Path) -> SourceFile:
    return SourceFile(name=path.name, size_bytes=path.stat().st_size, sha256=sha256_of(path))


def scan(path: Path, entries: list[TensorEntry]) -> SourceFile:
    """Returns size and digest of a weights file whose tensors are `entries`, in order; checks every float in it. Raises
    CheckpointError if a tensor holds values that are NaN, infinite or too large; names the tensor and their number."""
    hasher = hashlib.sha256()
    with path.open("rb") as file:
        for entry in entries:
            _pass_over(file, entry.start_bytes - file.tell(), hasher)  # the header, and what GGUF has between tensors
            count, kind = 0, SCALES if entry.name.endswith(SCALES) and entry.dtype == "U8" else entry.dtype
            remaining, block_bytes = entry.stop_bytes - entry.start_bytes, BLOCKS.get(entry.dtype, (1, 1))[1]
            while remaining:
                wanted = min(BLOCK_BYTES // block_bytes * block_bytes, remaining)
                block = file.read(wanted)
                if len(block) < wanted:
                    raise CheckpointError(f"{path.name}: truncated while it was read; download it again")
                hasher.update(block)
                remaining -= len(block)
                count += _out_of_range(block, kind)
            if count:
                raise CheckpointError(
                    f"{path.name}: tensor {entry.name} holds {count} values that are NaN, infinite or beyond 65504, "
                    "expected none; the weights are damaged, or not of a trained model"
                )
        _pass_over(file, None, hasher)
        size_bytes = file.tell()
    return SourceFile(name=path.name, size_bytes=size_bytes, sha256=hasher.hexdigest())


def _pass_over(file: BinaryIO, count: int | None, hasher: "hashlib._Hash") -> None:
    """Reads bytes that hold no values; None stands for all that follow."""
    while count != 0 and (block := file.read(BLOCK_BYTES if count is None else min(BLOCK_BYTES, count))):
        hasher.update(block)
        count = None if count is None else count - len(block)


def _out_of_range(block: bytes, dtype: str) -> int:
    if dtype in QUANTIZED:
        rows = np.frombuffer(block, np.uint8).reshape(-1, BLOCKS[dtype][1])
        parts = np.array_split(rows, -(-len(rows) // DECODED_BLOCKS))
        return sum(int(np.count_nonzero(~(np.abs(decode(part, dtype)) <= LARGEST_VALUE))) for part in parts)
    if dtype not in LARGEST:
        return 0
    kind, magnitude, largest = LARGEST[dtype]
    return int(np.count_nonzero((np.frombuffer(block, kind) & kind(magnitude)) > largest))


def kind_of(folder: Path) -> str | None:
    """Says what a folder without a checkpoint holds instead, and what to give; None if that is unknown."""
    names = sorted(path.name for path in folder.iterdir())
    if "adapter_config.json" in names:
        return "holds a LoRA adapter (adapter_config.json); merge it into its base model and give the merged folder"
    gguf = next((name for name in names if name.lower().endswith(".gguf")), None)
    if gguf:
        return f"holds the GGUF file {gguf} and no checkpoint; to build from it, give the file's own path"
    return None


def _nothing(folder: Path) -> CheckpointError:
    found = sorted(path.name for path in folder.iterdir() if path.is_file())
    pickles = [name for name in found if name.endswith(PICKLES)]
    if pickles:
        return CheckpointError(
            f"the checkpoint has no safetensors: found the pickle file {pickles[0]}, which is never loaded; convert it "
            "with save_pretrained"
        )
    known = kind_of(folder)
    if known:
        return CheckpointError(f"{folder.name} {known}")
    others = [name for name in found if name.endswith(".safetensors")]
    text = f"found {others[0]}" if others else "found none"
    return CheckpointError(f"the checkpoint needs {WEIGHTS} or {INDEX} with its shards, {text}")


def weight_map_in(index: Path) -> dict[str, str]:
    """Reads tensor -> file from an index; raises CheckpointError if it has no such map."""
    found = read_object(index, MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(found, dict) or not all(isinstance(file, str) for file in found.values()):
        raise CheckpointError(f"{index.name}: weight_map is missing or not a map of texts")
    return found


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = weight_map_in(index)
    files = set(weight_map.values())
    if not files or len(files) > MAX_SHARDS:
        raise CheckpointError(f"{index.name}: {len(files)} shards, expected 1 to {MAX_SHARDS}")
    for file in sorted(files):
        if not FILE_NAME.fullmatch(file) or ".." in file or not file.endswith(".safetensors"):
            raise CheckpointError(
                f"{index.name}: the shard {file[:80]!r} is not a plain safetensors name; shards lie in the "
                "checkpoint's own folder"
            )
    return weight_map


def _indexed(folder: Path, weight_map: dict[str, str]) -> dict[str, Located]:
    located: dict[str, Located] = {}
    unnamed: list[str] = []
    for file in sorted(set(weight_map.values())):
        path = regular_file(folder, file)
        for name, entry in read_header(path).items():
            if name in located:
                raise CheckpointError(f"tensor {name} is in two shards, {located[name].path.name} and {file}")
            if weight_map.get(name, file) != file:
                raise CheckpointError(
                    f"{INDEX}: tensor {name} is in {file}, but the index says {weight_map[name]}; download both again"
                )
            unnamed += [] if name in weight_map else [name]
            located[name] = Located(path, entry)
    if unnamed:
        log.warning(
            "the index of the weights does not name %s, which %s has (%d such tensors); they are read, as transformers "
            "does; download the index again, or save the model again, to mend it",
            clipped(unnamed[0]),
            located[unnamed[0]].path.name,
            len(unnamed),
        )
    missing = sorted(set(weight_map) - set(located))
    if missing:
        raise CheckpointError(
            f"{weight_map[missing[0]]}: tensor {clipped(missing[0])} is missing, the index says it is there"
        )
    return located
