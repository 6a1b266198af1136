"""Decides the contents of a GGUF file and writes it; gguf.py says which types exist and what is exact.

The vocabulary is that of the artifact's tokenizer.json: tokens, types, scores or merges, and text splitting. Two
tokenizers of llama.cpp do what tokenizer.json's BPE does: `gpt2`, on bytes, with merges by rank and one of its own
expressions to split text; and `llama` (SentencePiece), on characters, which joins any neighbours that form a token, by
the token's score. A tokenizer that would give other tokens there is refused: prompts would change.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from coldpress.compiler.llama_cpp.architectures import LlamaCppArchitecture
from coldpress.compiler.llama_cpp.formats import formats, type_of
from coldpress.compiler.llama_cpp.names import counts_from_one
from coldpress.compiler.llama_cpp.splits import DIGIT, GPT2, SPLITS
from coldpress.compiler.stages.export import _llama_cpp
from coldpress.compiler.stages.export._stored import StoredModel, StoredTensor
from coldpress.compiler.stages.export.gguf import Options, fits
from coldpress.runtime import plugins
from coldpress.runtime.artifact import strict_json
from coldpress.runtime.artifact.errors import JsonError, short
from coldpress.runtime.artifact.reader import Artifact
from coldpress.runtime.quantization import Format
from coldpress.runtime.text.process import TOKENIZER_FILE
from coldpress.runtime.text.tokenizer import TextCodec
from coldpress.schemas.errors import ColdpressError

NAMES = {split.patterns: name for name, split in reversed(SPLITS.items())}
"""Expressions that split a text -> llama.cpp's name for them, the first of several."""
SPACE = "▁"
METASPACE = {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "never", "split": False}
REMEDY = "give gguf_tokenizer=false for a file that takes token ids alone"
Json = Mapping[str, Any]


def file_type(name: str) -> gguf.LlamaFileType:
    """Returns llama.cpp's name for a file whose matrices mostly have this type."""
    names = (f"ALL_{name}", f"MOSTLY_{name}", f"MOSTLY_{name}_M")
    return next(gguf.LlamaFileType[one] for one in names if one in gguf.LlamaFileType.__members__)


@dataclass(frozen=True)
class Planned:
    name: str
    roles: tuple[str, ...]
    """Roles of the matrices it holds: one, those of all experts, or those whose rows it joins."""
    stored: StoredTensor
    """Storage of the first role; all others are stored the same way."""
    type: str
    """One of GGUF's."""
    rotated_heads: int
    """Heads whose rows llama.cpp expects in another order; 0 for most tensors."""
    shape: tuple[int, ...]
    """Rows and columns; the matrices of several experts have their number in front."""

    @property
    def copied(self) -> bool:
        return (
            self.stored.format is not None
            and self.stored.format == formats().get(self.type)
            and not self.stored.by_column
        )

    @property
    def exact(self) -> bool:
        lossless = {("F32", None), ("F16", "fp16")}
        return self.copied or (self.type, self.stored.format) in lossless


def write(model: StoredModel, options: Options, path: Path) -> list[str]:
    """Writes the file; returns the names of the tensors whose values were rounded again. Raises ColdpressError if
    llama.cpp has no such architecture or tokenizer, or GGUF no type for the weights."""
    architecture = _llama_cpp.architecture_of(model.spec)
    _llama_cpp.check_biases(model, architecture)
    writer = gguf.GGUFWriter(path, architecture.name)
    try:
        _llama_cpp.add_shape(writer, model)
        planned = [_planned(model, architecture, roles, options) for roles in _llama_cpp.roles(model, architecture)]
        rounded = [tensor.name for tensor in planned if not tensor.exact]
        _add_facts(writer, model, planned, rounded)
        if options.gguf_tokenizer:
            add_vocabulary(writer, model.artifact)
        else:
            writer.add_tokenizer_model("none")
        extra = _llama_cpp.rope_factors(model)
        for tensor in planned:
            _declare(writer, tensor)
        for name, values in extra.items():
            writer.add_tensor_info(name, values.shape, values.dtype, values.nbytes)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for tensor in planned:
            _append(writer, (_encoded(model, tensor, role) for role in tensor.roles))
        for values in extra.values():
            _append(writer, (values,))
    finally:
        writer.close()
    return rounded


def _planned(
    model: StoredModel, architecture: LlamaCppArchitecture, roles: tuple[str, ...], options: Options
) -> Planned:
    stored = model.tensors[roles[0]]
    heads = architecture.rotated_heads(model.spec, roles[0])
    name, kind = _llama_cpp.tensor_name(architecture, roles[0]), _type_of(stored, options)
    if ".experts." in roles[0]:
        return Planned(name, roles, stored, kind, heads, (len(roles), *stored.shape))
    num_rows = sum(model.tensors[role].shape[0] for role in roles)
    return Planned(name, roles, stored, kind, heads, (num_rows, *stored.shape[1:]))


def _type_of(stored: StoredTensor, options: Options) -> str:
    if stored.format is None:
        return "F32"
    wanted = type_of(stored.format) if options.gguf_type == "stored" else options.gguf_type
    return wanted if fits(wanted, stored.shape[1]) else "F16"


def _add_facts(writer: gguf.GGUFWriter, model: StoredModel, planned: list[Planned], rounded: list[str]) -> None:
    manifest = model.artifact.manifest
    writer.add_name(manifest.source.name)
    if manifest.source.license:
        writer.add_license(manifest.source.license)
    types: Counter[str] = Counter(tensor.type for tensor in planned if tensor.stored.format is not None)
    writer.add_file_type(file_type(types.most_common(1)[0][0]))
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_string("coldpress.artifact_sha256", model.artifact.sha256)
    writer.add_uint32("coldpress.num_rounded_tensors", len(rounded))
    writer.add_array("coldpress.rounded_tensors", rounded)


def _declare(writer: gguf.GGUFWriter, tensor: Planned) -> None:
    shape = tensor.shape
    if tensor.type in ("F32", "F16"):
        dtype = np.dtype(np.float32 if tensor.type == "F32" else np.float16)
        writer.add_tensor_info(tensor.name, shape, dtype, prod(shape) * dtype.itemsize)
        return
    row_bytes = plugins.load("coldpress.runtime.quantization", Format, formats()[tensor.type]).nbytes(shape[-1])
    kind = gguf.GGMLQuantizationType[tensor.type]
    coded = (*shape[:-1], row_bytes)
    writer.add_tensor_info(tensor.name, coded, np.dtype(np.uint8), prod(coded), kind)


def _append(writer: gguf.GGUFWriter, matrices: Iterable[np.ndarray]) -> None:
    """Writes the next tensor, a matrix at a time: all experts of a layer may exceed memory many times."""
    file = (writer.fout or [])[0]
    writer.write_padding(file, file.tell())
    for matrix in matrices:
        matrix.tofile(file)
    writer.write_padding(file, file.tell())


def _encoded(model: StoredModel, tensor: Planned, role: str) -> np.ndarray:
    if tensor.copied:
        return np.ascontiguousarray(_llama_cpp.neighbours(model.codes(role), tensor.rotated_heads))
    values = _llama_cpp.neighbours(model.values(role), tensor.rotated_heads)
    if tensor.type == "F32":
        values = values + np.float32(1) if counts_from_one(model.spec, role) else values
        return np.ascontiguousarray(values, "<f4")
    codec = plugins.load("coldpress.runtime.quantization", Format, formats()[tensor.type])
    return codec.encode(np.ascontiguousarray(values))


def add_vocabulary(writer: gguf.GGUFWriter, artifact: Artifact) -> None:
    """Adds the vocabulary. Raises ColdpressError if there is no tokenizer, or llama.cpp would give other tokens."""
    if all(entry.path != TOKENIZER_FILE for entry in artifact.manifest.files):
        raise ColdpressError(f"the artifact has no {TOKENIZER_FILE}; {REMEDY}")
    data = artifact.read_bytes(TOKENIZER_FILE, strict_json.TOKENIZER.size_bytes)
    found = strict_json.parse(data, partial(JsonError, TOKENIZER_FILE, "the text"), strict_json.TOKENIZER)
    model = found["model"]
    for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(key):
            raise _refused(f"its {key} is {short(model[key])}")
    if model.get("type") != "BPE":
        raise _refused(f"its model is {short(model.get('type'))}, expected BPE")
    tokens, types = _tokens(found, artifact.manifest.model.vocab_size)
    if model.get("byte_fallback"):
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_add_space_prefix(_has_space_prefix(found))
        writer.add_token_list(tokens)
        writer.add_token_scores(_scores(model, tokens, types))
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(_split_name(found))
        writer.add_token_list(tokens)
        writer.add_token_merges([" ".join(pair) for pair in _merges(model)])
    writer.add_token_types(types)
    _add_special(writer, artifact, model, tokens)


def _refused(what: str) -> ColdpressError:
    return ColdpressError(f"{TOKENIZER_FILE}: {what}: llama.cpp would not give the same tokens; {REMEDY}")


def _tokens(found: Json, vocab_size: int) -> tuple[list[str], list[int]]:
    """Returns (text, type) of every id of the model; ids without a token are `unused`."""
    tokens = [f"[PAD{number}]" for number in range(vocab_size)]
    types = [int(gguf.TokenType.UNUSED)] * vocab_size
    added = {entry["id"]: entry for entry in found.get("added_tokens") or ()}
    numbered = {number: text for text, number in found["model"]["vocab"].items()}
    numbered |= {number: entry["content"] for number, entry in added.items()}
    is_llama = found["model"].get("byte_fallback")
    for number, text in numbered.items():
        if number >= vocab_size and number in added:
            continue  # the model has no row for it, so no prompt may have it
        if number >= vocab_size:
            raise _refused(f"it has the token id {number}, and the model {vocab_size} tokens")
        tokens[number], types[number] = text, int(gguf.TokenType.NORMAL)
        if is_llama and len(text) == 6 and text.startswith("<0x"):
            types[number] = int(gguf.TokenType.BYTE)
    for number, entry in added.items():
        if number >= vocab_size:
            continue
        if any(entry.get(key) for key in ("single_word", "lstrip", "rstrip")):
            raise _refused(f"the token {short(entry['content'])} takes spaces or words around it into account")
        kind = gguf.TokenType.CONTROL if entry.get("special") else gguf.TokenType.USER_DEFINED
        types[number] = int(gguf.TokenType.UNKNOWN if tokens[number] == found["model"].get("unk_token") else kind)
    return tokens, types


def _merges(model: Json) -> list[tuple[str, str]]:
    """Returns pairs by rank; older files write a pair as one text."""
    pairs = (pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"])
    return [(left, right) for left, right in pairs]


def _split_name(found: Json) -> str:
    """Returns llama.cpp's name for the way in which a tokenizer on bytes splits text before it merges."""
    whole, ignores = found.get("pre_tokenizer") or {}, bool(found["model"].get("ignore_merges"))
    normalizer = (found.get("normalizer") or {}).get("type")
    *pieces, last = (whole["pretokenizers"] if whole.get("type") == "Sequence" else [whole]) or [{}]
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space"):
        raise _refused(f"its pre-tokenizer ends with {short(last)}, expected bytes without a space in front")
    patterns = (*map(_expression, pieces), *((GPT2,) if last.get("use_regex", True) else ()))
    if patterns not in NAMES:
        raise _refused(f"no known expression splits text like its pre-tokenizer {short((pieces or [last])[0])}")
    name = NAMES[patterns]
    if ignores != SPLITS[name].keeps_words or normalizer not in (None, *(["NFC"] if name == "qwen2" else [])):
        raise _refused(f"with ignore_merges {ignores} and the normalizer {normalizer} it is no '{name}'")
    return name


def _expression(part: Json) -> str:
    if part.get("type") == "Digits" and part.get("individual_digits"):
        return DIGIT
    is_plain = part.get("type") == "Split" and part.get("behavior") == "Isolated" and not part.get("invert")
    return part["pattern"].get("Regex", "") if is_plain else ""


def _has_space_prefix(found: Json) -> bool:
    """Tells whether a tokenizer on characters puts a space before each text; all spaces become `SPACE`."""
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    prepend = {"type": "Prepend", "prepend": SPACE}
    normalizer, splitting = found.get("normalizer") or {}, found.get("pre_tokenizer") or {}
    steps = (
        normalizer.get("normalizers") if normalizer.get("type") == "Sequence" else [normalizer] if normalizer else []
    )
    if not splitting and steps in ([prepend, replace], [replace]):
        return steps != [replace]
    if splitting == METASPACE and not steps:  # only prepend_scheme "never": others skip texts that begin with a space
        return False
    raise _refused(
        f"spaces are treated by {short(normalizer)} and {short(splitting)}, expected '{SPACE}' in their place"
    )


def _scores(model: Json, tokens: list[str], types: list[int]) -> list[float]:
    """Returns a score per token, below 0, by the rank of its first merge; higher scores merge first. Raises
    ColdpressError if merges do not follow from tokens and scores alone."""
    known, merges = set(tokens), _merges(model)
    missing = [f"<0x{byte:02X}>" for byte in range(256) if f"<0x{byte:02X}>" not in known]
    if missing:
        raise _refused(f"there is no token {missing[0]} for a byte")
    rank: dict[str, int] = {}
    for number, (left, right) in enumerate(merges):
        if rank.setdefault(left + right, number) != number and "".join(merges[number - 1]) != left + right:
            raise _refused(f"{short(left + right)} is made at two ranks")
    pairs = set(merges)
    for text in (text for text, kind in zip(tokens, types, strict=True) if kind == gguf.TokenType.NORMAL):
        for place in range(1, len(text)):
            left, right = text[:place], text[place:]
            if left in known and right in known and (left, right) not in pairs:
                raise _refused(f"{short(left)} and {short(right)} are not merged, though {short(text)} is a token")
    return [-1.0 - rank[text] if text in rank else -1.0e6 for text in tokens]


def _add_special(writer: gguf.GGUFWriter, artifact: Artifact, model: Json, tokens: list[str]) -> None:
    spec, around = artifact.manifest.model, TextCodec(artifact).encode("")
    bos = [] if spec.bos_token_id is None else [spec.bos_token_id]
    begins, ends = bool(bos) and around[:1] == bos, bool(around[1:]) and around[-1] in spec.eos_token_ids
    if len(around) != begins + ends:
        raise _refused(f"a text gets the tokens {around} around it, expected at most one at its begin and its end")
    if bos:
        writer.add_bos_token_id(bos[0])
    for number, key in zip(spec.eos_token_ids, (writer.add_eos_token_id, writer.add_eot_token_id), strict=False):
        key(number)
    if model.get("unk_token") in tokens:
        writer.add_unk_token_id(tokens.index(model["unk_token"]))
    writer.add_add_bos_token(begins)
    writer.add_add_eos_token(ends)
