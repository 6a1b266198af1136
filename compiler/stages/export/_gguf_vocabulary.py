"""Translates an artifact's tokenizer.json into GGUF's vocabulary: tokens, types, scores or merges, and text splitting.

Two tokenizers of llama.cpp do what tokenizer.json's BPE does: `gpt2`, on bytes, with merges by rank and one of its own
expressions to split text; and `llama` (SentencePiece), on characters, which joins any neighbours that form a token, by
the token's score. A tokenizer that would give other tokens there is refused: prompts would change.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import gguf

from coldpress.compiler.llama_cpp.splits import LLAMA3, QWEN2, SPLITS
from coldpress.runtime.artifact import strict_json
from coldpress.runtime.artifact.errors import JsonError, short
from coldpress.runtime.artifact.reader import Artifact
from coldpress.runtime.text.process import TOKENIZER_FILE
from coldpress.runtime.text.tokenizer import TextCodec
from coldpress.schemas.errors import ColdpressError

NAMES = {LLAMA3: "llama-bpe", QWEN2: "qwen2"}
"""Expression -> llama.cpp's name for it."""
SPACE = "▁"
METASPACE = {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "never", "split": False}
REMEDY = "give gguf_tokenizer=false for a file that takes token ids alone"
Json = Mapping[str, Any]


def add(writer: gguf.GGUFWriter, artifact: Artifact) -> None:
    """Adds the vocabulary.

    Raises:
        ColdpressError: if the artifact has no tokenizer, or llama.cpp would give other tokens.
    """
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


# Bytes, with merges


def _split_name(found: Json) -> str:
    whole, ignores = found.get("pre_tokenizer") or {}, bool(found["model"].get("ignore_merges"))
    normalizer = (found.get("normalizer") or {}).get("type")
    parts = whole["pretokenizers"] if whole.get("type") == "Sequence" else [whole]
    last = parts[-1]
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space"):
        raise _refused(f"its pre-tokenizer ends with {short(last)}, expected bytes without a space in front")
    if len(parts) == 1 and last.get("use_regex", True):
        expected, name = False, "gpt-2"
    elif len(parts) == 2 and not last.get("use_regex", True) and _expression(parts[0]) in NAMES:
        name = NAMES[_expression(parts[0])]
        expected = SPLITS[name].keeps_words
    else:
        raise _refused(f"no known expression splits text like its pre-tokenizer {short(parts[0])}")
    if ignores != expected or normalizer not in (None, *(["NFC"] if name == "qwen2" else [])):
        raise _refused(f"with ignore_merges {ignores} and the normalizer {normalizer} it is no '{name}'")
    return name


def _expression(part: Json) -> str:
    is_plain = part.get("type") == "Split" and part.get("behavior") == "Isolated" and not part.get("invert")
    return part["pattern"].get("Regex", "") if is_plain else ""


# Characters, with scores


def _has_space_prefix(found: Json) -> bool:
    """Tells whether a space is put before each text; all spaces become `SPACE`."""
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    prepend = {"type": "Prepend", "prepend": SPACE}
    known = {True: [prepend, replace], False: [replace]}
    normalizer, splitting = found.get("normalizer") or {}, found.get("pre_tokenizer") or {}
    steps = (
        normalizer.get("normalizers") if normalizer.get("type") == "Sequence" else [normalizer] if normalizer else []
    )
    if not splitting:
        for prefix, expected in known.items():
            if steps == expected:
                return prefix
    elif splitting == METASPACE and not steps:  # only prepend_scheme "never": others skip texts that begin with a space
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


# Special tokens


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
