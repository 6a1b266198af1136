"""Converts what older checkpoints have to what `ingest` reads: pickled weights, and a tokenizer in two files.

PyTorch's unpickler that makes tensors alone (`weights_only`) reads the pickles, and the values stay in the file until
they are written: memory is bounded by the largest tensor. Nothing in the result is trusted: `ingest` checks it as it
checks any checkpoint.
"""

import json
import logging
import re
import shutil
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coldpress.compiler.checkpoint.hub import checkpoint_paths
from coldpress.compiler.checkpoint.source_json import read_object
from coldpress.compiler.checkpoint.source_tokenizer import MAX_SETTINGS_BYTES, SETTINGS, TOKENIZER
from coldpress.compiler.checkpoint.weight_files import INDEX, MAX_SHARDS, WEIGHTS, is_there, regular_file, weight_map_in
from coldpress.compiler.io import digest, make_folder, own_cache, replacing, sha256_of
from coldpress.schemas.errors import CheckpointError, clipped

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

PICKLE, PICKLE_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
SHARD = re.compile(r"pytorch_model(-\d{5}-of-\d{5})?\.bin")
VOCABULARY, MERGES = "vocab.json", "merges.txt"
SPECIAL_KEYS = ("bos_token", "eos_token", "unk_token", "pad_token")
MAX_PICKLE_BYTES = 64 << 20
"""Limit on the part of a file that the unpickler reads: names and shapes, without values."""
MAX_VOCABULARY_BYTES = 64 << 20
DTYPES = {
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "uint8": "U8",
    "bool": "BOOL",
}
"""torch's name of a dtype -> safetensors'."""


def converted(folder: Path) -> Path:
    """Returns the folder of a checkpoint that `ingest` can read: `folder` itself, or its conversion in the cache, named
    after the contents of the files. Raises CheckpointError if a file is no pickle of tensors, or a tensor cannot be
    converted."""
    names = [path.name for path in checkpoint_paths(folder)]
    has_pickles = not {WEIGHTS, INDEX} & {*names} and any(map(SHARD.fullmatch, names))
    has_parts = TOKENIZER not in names and {VOCABULARY, MERGES} <= {*names}
    if not (has_pickles or has_parts):
        return folder
    files = {name: regular_file(folder, name) for name in names}
    target = own_cache() / "converted" / digest(*(text for name in names for text in (name, sha256_of(files[name]))))
    if target.is_dir():
        return target
    unfinished = target.with_suffix(".unfinished")
    make_folder(unfinished)
    for name, file in files.items():
        if not SHARD.fullmatch(name) and name not in (PICKLE_INDEX, VOCABULARY, MERGES):
            shutil.copy(file, unfinished / name)
    if has_pickles:
        _convert_weights(folder, unfinished)
    if has_parts:
        with replacing(unfinished / TOKENIZER) as temporary:
            temporary.write_text(_joined_tokenizer(folder), encoding="utf-8")
    if not target.is_dir():
        unfinished.replace(target)
    return target


def _convert_weights(folder: Path, target: Path) -> None:
    """Writes the weights of `folder` as safetensors files; those that an interrupted run left whole are kept."""
    weight_map: dict[str, str] = {}
    if is_there(folder, PICKLE):
        shards = [PICKLE]
    else:
        weight_map = weight_map_in(regular_file(folder, PICKLE_INDEX))
        shards = sorted(set(weight_map.values()))
        wrong = [name for name in shards if not SHARD.fullmatch(name)]
        if wrong or not 0 < len(shards) <= MAX_SHARDS:
            raise CheckpointError(
                f"{PICKLE_INDEX}: it names {len(shards)} files{', such as ' + clipped(wrong[0]) if wrong else ''}, "
                f"expected 1 to {MAX_SHARDS} of the form pytorch_model-00001-of-00002.bin"
            )
    for number, name in enumerate(shards, 1):
        written = target / _renamed(name)
        if not written.exists():
            log.info("ingest: converting pickled weights %d/%d", number, len(shards))
            with replacing(written) as temporary:
                _write(temporary, _tensors(regular_file(folder, name)))
    if weight_map:
        text = json.dumps({"weight_map": {tensor: _renamed(file) for tensor, file in weight_map.items()}})
        with replacing(target / INDEX) as temporary:
            temporary.write_text(text, encoding="utf-8")


def _renamed(shard: str) -> str:
    return WEIGHTS.replace("model", shard.removeprefix("pytorch_").removesuffix(".bin"))


def _tensors(path: Path) -> Mapping[str, "torch.Tensor"]:
    """Returns the tensors of a pickle by name, mapped from the file; raises CheckpointError for anything else in it."""
    import torch

    try:
        with zipfile.ZipFile(path) as archive:
            read_bytes = sum(entry.file_size for entry in archive.infolist() if "/data/" not in entry.filename)
    except (zipfile.BadZipFile, OSError) as error:
        raise CheckpointError(
            f"{path.name}: it is no file of torch 1.6 or newer; write it again with "
            "`python -c 'import torch, sys; f = sys.argv[1]; torch.save(torch.load(f, weights_only=True), f)' FILE`"
        ) from error
    if read_bytes > MAX_PICKLE_BYTES:
        raise CheckpointError(f"{path.name}: found {read_bytes} bytes of pickle, expected at most {MAX_PICKLE_BYTES}")
    try:
        found: Any = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # whatever a damaged or hostile pickle leads to
        raise CheckpointError(
            f"{path.name}: it holds more than tensors, or is damaged, and is not loaded "
            f"({clipped(' '.join(str(error).split()))}); give safetensors"
        ) from error
    if not isinstance(found, dict) or not all(
        isinstance(name, str)
        and isinstance(value, torch.Tensor)
        and (value.layout, value.device.type) == (torch.strided, "cpu")
        for name, value in found.items()
    ):
        raise CheckpointError(f"{path.name}: it holds something else than tensors by name; give safetensors")
    for name, value in found.items():
        if str(value.dtype).removeprefix("torch.") not in DTYPES:
            raise CheckpointError(f"{path.name}: tensor {clipped(name)} has the unknown type {value.dtype}")
        if value.numel() * value.element_size() > value.untyped_storage().nbytes():
            raise CheckpointError(f"{path.name}: tensor {clipped(name)} is larger than what the file has of it")
    if sum(value.numel() * value.element_size() for value in found.values()) > 2 * path.stat().st_size:
        raise CheckpointError(f"{path.name}: its tensors are more than twice as large as the file; give safetensors")
    return found


def _write(path: Path, tensors: Mapping[str, "torch.Tensor"]) -> None:
    """Writes a safetensors file, one tensor at a time; the package's own function would hold all of them."""
    import torch

    header: dict[str, dict[str, Any]] = {}
    stop = 0
    for name, value in tensors.items():
        start, stop = stop, stop + value.numel() * value.element_size()
        kind = DTYPES[str(value.dtype).removeprefix("torch.")]
        header[name] = {"dtype": kind, "shape": [*value.shape], "data_offsets": [start, stop]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for value in tensors.values():
            file.write(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)


def _joined_tokenizer(folder: Path) -> str:
    """Returns the tokenizer.json of GPT-2's byte-level BPE in two files; raises CheckpointError for other kinds."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    settings = read_object(regular_file(folder, SETTINGS), MAX_SETTINGS_BYTES) if is_there(folder, SETTINGS) else {}
    kind = settings.get("tokenizer_class")
    if kind not in ("GPT2Tokenizer", "GPT2TokenizerFast"):
        raise CheckpointError(
            f"{TOKENIZER} is missing in the checkpoint, and its tokenizer_class is {clipped(repr(kind))}, expected "
            "GPT2Tokenizer; write it with save_pretrained"
        )
    files = [regular_file(folder, name) for name in (VOCABULARY, MERGES)]
    for file in files:
        if file.stat().st_size > MAX_VOCABULARY_BYTES:
            raise CheckpointError(
                f"{file.name}: found {file.stat().st_size} bytes, expected at most {MAX_VOCABULARY_BYTES}"
            )
    try:
        found = Tokenizer(models.BPE.from_file(*map(str, files)))
    except Exception as error:
        reason = clipped(" ".join(str(error).split()))
        raise CheckpointError(f"{VOCABULARY} and {MERGES} are no vocabulary ({reason}); complete them") from error
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=settings.get("add_prefix_space") is True)
    found.decoder = decoders.ByteLevel()
    special = [settings.get(key) for key in SPECIAL_KEYS]
    texts = [value.get("content") if isinstance(value, dict) else value for value in special]
    found.add_special_tokens([AddedToken(text, normalized=False) for text in texts if isinstance(text, str)])
    return found.to_str(pretty=True)
