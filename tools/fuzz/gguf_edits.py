"""Edits of a GGUF file: bytes of its header, keys and their values, and tensors."""

import random
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from coldpress.compiler.llama_cpp.header import read_header
from coldpress.compiler.llama_cpp.types import BLOCKS
from coldpress.schemas.errors import ColdpressError
from tools.fuzz.json_edits import Unfit, regular

KEYS = (
    *("GGUF", "general.architecture", "general.alignment", "llama.block_count", "llama.context_length"),
    *("llama.embedding_length", "llama.feed_forward_length", "llama.attention.head_count", "llama.rope.freq_base"),
    *("llama.attention.head_count_kv", "llama.attention.key_length", "llama.attention.layer_norm_rms_epsilon"),
    *("tokenizer.ggml.model", "tokenizer.ggml.pre", "tokenizer.ggml.tokens", "tokenizer.ggml.token_type"),
    *("tokenizer.ggml.merges", "tokenizer.ggml.bos_token_id", "tokenizer.ggml.eos_token_id", "blk.0.attn_q.weight"),
    *("blk.1.ffn_down.weight", "token_embd.weight", "output_norm.weight"),
)
MORE = (
    *("llama.expert_count", "llama.expert_used_count", "llama.rope.scaling.type", "llama.rope.scaling.factor"),
    *("llama.rope.scaling.attn_factor", "llama.attention.sliding_window", "llama.attention.value_length"),
    *("llama.rope.dimension_count", "llama.attention.scale", "llama.logit_scale", "llama.nextn_predict_layers"),
    *("tokenizer.ggml.scores", "tokenizer.ggml.add_space_prefix", "tokenizer.ggml.add_bos_token", "split.count"),
    *("tokenizer.ggml.eot_token_id", "tokenizer.ggml.padding_token_id", "tokenizer.ggml.unknown_token_id"),
    *("tokenizer.ggml.remove_extra_whitespaces", "tokenizer.chat_template", "general.type", "general.license"),
    *("general.name", "split.no", "tokenizer.ggml.add_eos_token"),
)
"""Keys that the compiler knows and the bases lack."""
TEXTS = (
    "",
    "a",
    " ",
    "\0",
    "\n",
    "\x1b[2J",
    "▁",
    "Ġ",
    "\U0010ffff",
    "x" * 5000,
    "{{ x",
    "llama",
    "gpt2",
    "qwen2",
    "yarn",
)
NUMBERS = (0, 1, -1, 2, 3, 255, 383, 384, 1 << 20, (1 << 31) - 1, (1 << 32) - 1, 1 << 62, 0.0, 1e-45, -3e38)
ODD = (*TEXTS, *NUMBERS, float("nan"), float("inf"), True, False, ["a", "a"], [""] * 384, np.zeros(3, np.float32))
LOOP = "{% for a in range(10**9) %}{% for b in range(10**9) %}{% endfor %}{% endfor %}"
Tensors = dict[str, tuple[np.ndarray, str]]
"""Name -> (values, or rows of blocks uint8; type)."""


def header_bytes(folder: Path, chance: random.Random) -> str:
    """Overwrites a value of the header, or the type in front of it; the sizes around it stay."""
    path = source(folder)
    data = bytearray(regular(path).read_bytes())
    key = chance.choice(KEYS)
    place = data.find(key.encode())
    if place < 0:
        raise Unfit
    place += len(key) + chance.choice((0, 4, 8))
    value = chance.choice((b"\0", b"\xff", b"\x7f", bytes([chance.randrange(256)]))) * chance.choice((1, 4, 8))
    data[place : place + len(value)] = value
    path.write_bytes(data)
    return f"{path.name}: {value!r} at {key} + {place - data.find(key.encode()) - len(key)}"


def key(folder: Path, chance: random.Random) -> str:
    """Removes a key, or gives it an odd value, another key's, or an odd entry."""
    values, tensors = _read(folder)
    name = chance.choice((*values, *MORE))
    found = values.get(name)
    how = chance.choice(("remove", "odd", "another", "inside", "inside"))
    if how == "remove":
        values.pop(name, None)
    elif how == "inside" and isinstance(found, list | np.ndarray) and len(found):
        values[name] = _with_odd_entry(found, chance)
    elif how == "another":
        values[name] = values[chance.choice(list(values))]
    else:
        values[name] = chance.choice((*ODD, LOOP))
    _write(folder, values, tensors)
    return f"{how} {name}: {str(values.get(name))[:60]!a}"


def tensor(folder: Path, chance: random.Random) -> str:
    """Removes or renames a tensor, doubles its rows, turns it, or stores random blocks in its place."""
    values, tensors = _read(folder)
    name = chance.choice(list(tensors))
    array, kind = tensors[name]
    how = chance.choice(("remove", "rename", "double", "turn", *sorted(BLOCKS)))
    if how in ("remove", "rename"):
        del tensors[name]
    if how == "rename":
        tensors[chance.choice((*tensors, "blk.0.attn_q.bias", "blk.99.ffn_up.weight", "x"))] = array, kind
    elif how == "double":
        tensors[name] = np.concatenate([array, array]), kind
    elif how == "turn":
        tensors[name] = np.ascontiguousarray(array.T), kind
    elif how in BLOCKS:
        per_block, size_bytes = BLOCKS[how]
        length = array.shape[-1] if kind in ("F16", "F32") else 64
        width = max(1, length // per_block) * size_bytes
        rows = np.random.default_rng(chance.getrandbits(32)).integers(0, 256, (*array.shape[:-1], width), np.uint8)
        plain = {"F32": "<f4", "F16": "<f2"}
        tensors[name] = (rows.view(plain[how]) if how in plain else rows), how
    _write(folder, values, tensors)
    return f"{how}: the tensor {name}"


def _with_odd_entry(found: Any, chance: random.Random) -> Any:
    if isinstance(found, np.ndarray):
        changed = found.copy()
        limits = np.finfo(np.float32) if found.dtype.kind == "f" else np.iinfo(found.dtype)
        changed[chance.randrange(len(changed))] = min(max(chance.choice(NUMBERS), limits.min), limits.max)
        return changed[: chance.choice((None, -1, 1))]
    changed = list(found)
    place = chance.randrange(len(changed))
    changed[place] = chance.choice((*TEXTS, changed[place] * 2, changed[0], changed[-1], "a b", " a", "<0x41>"))
    return changed[: chance.choice((None, None, -1, 1))]


def source(folder: Path) -> Path:
    """Returns the only GGUF file of a folder."""
    found = sorted(folder.glob("*.gguf"))
    if len(found) != 1:
        raise Unfit
    return found[0]


def _read(folder: Path) -> tuple[dict[str, Any], Tensors]:
    path = regular(source(folder))
    try:
        with path.open("rb") as file:
            header = read_header(file, path.name)
    except ColdpressError as error:
        raise Unfit from error
    data, tensors = path.read_bytes(), Tensors()
    for name, entry in header.tensors.items():
        kind = {"F32": "<f4", "F16": "<f2"}.get(entry.dtype, "u1")
        array = np.frombuffer(data[entry.start_bytes : entry.stop_bytes], kind)
        tensors[name] = array.reshape(*entry.shape[:-1], -1), entry.dtype
    return dict(header.values), tensors


def _write(folder: Path, values: dict[str, Any], tensors: Tensors) -> None:
    path = source(folder)
    writer = gguf.GGUFWriter(path, "llama")
    writer.kv_data[0].clear()  # it has written the architecture
    for name, value in values.items():
        kinds, plain = _kinds(value), value.tolist() if isinstance(value, np.ndarray) else value
        if plain != []:
            writer.add_key_value(name, plain, *kinds)
    for name, (array, kind) in tensors.items():
        writer.add_tensor(name, array, raw_dtype=gguf.GGMLQuantizationType[kind])
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    except struct.error as error:
        raise Unfit from error
    finally:
        writer.close()


def _kinds(value: Any) -> list[gguf.GGUFValueType]:
    kinds = gguf.GGUFValueType
    if isinstance(value, list):
        return [kinds.ARRAY, kinds.STRING]
    if isinstance(value, np.ndarray):
        return [kinds.ARRAY, kinds[value.dtype.name.upper()]]
    if isinstance(value, int) and not isinstance(value, bool):
        return [kinds.UINT32 if 0 <= value < 1 << 32 else kinds.INT64]
    return [{bool: kinds.BOOL, float: kinds.FLOAT32, str: kinds.STRING}[type(value)]]
