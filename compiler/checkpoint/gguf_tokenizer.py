"""Writes tokenizer.json and tokenizer_config.json of a model in GGUF, for the ids that llama.cpp gives.

llama.cpp has two tokenizers that tokenizer.json's BPE can stand for: `gpt2`, on bytes, with merges by rank and the
expressions of `tokenizer.ggml.pre`, which split the text first; and `llama` (SentencePiece), on characters, which joins
any neighbours that form a token, the best score first. Others are refused (src/llama-vocab.cpp): all refusals are
CheckpointErrors that name the key, what was found and what was expected.
"""

from typing import Any

import numpy as np

from coldpress.compiler.checkpoint.gguf_files import GgufModel
from coldpress.compiler.llama_cpp.splits import SPLITS
from coldpress.runtime.artifact.errors import short

KEYS = "tokenizer.ggml."
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""GGUF's types of tokens."""
SPECIAL = (UNKNOWN, CONTROL, USER_DEFINED)
"""Those that are found in a text before it is split."""
SPACE = "▁"
DEFAULT_IDS = {"gpt2": {"bos": 11, "eos": 11}, "llama": {"bos": 1, "eos": 2, "unknown": 0}}
"""Ids that llama.cpp takes where a file has none."""
ENDS = {
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<EOT>", "_<EOT>"),
    *("[EOT]", "[EOS]", "<eos>", "</s>", "<｜end▁of▁sentence｜>", "<end_of_utterance>", "<|eom_id|>", "<|return|>"),
    *("<|call|>", "<|calls|>", "<|flush|>"),
}
"""Special tokens that end a text for llama.cpp, whatever the file's keys say. It takes ordinary tokens with these texts
for special ones, too, such as Qwen's `</s>`; the models were not trained so, and here the file decides."""
HARMONY, HARMONY_PART = {"<|return|>", "<|call|>"}, "<|end|>"
"""Where a file has both, the third ends a part of an answer only (gpt-oss)."""
MAX_TOKEN_CHARACTERS = 1000


def special_ids(model: GgufModel) -> dict[str, Any]:
    """`bos_token_id`, `eos_token_id` and `pad_token_id` of config.json, each where the file has one."""
    tokens, kind = _tokens(model), _kind(model)
    found = {name: _id(model, name, len(tokens)) for name in ("bos", "eos", "eot", "eom", "padding", "unknown")}
    for name, default in DEFAULT_IDS[kind].items():
        if found[name] is None and default < len(tokens):
            found[name] = default
    special = {tokens[number]: number for number, kind in enumerate(_types(model)) if kind in SPECIAL}
    known = ENDS - {HARMONY_PART} if special.keys() >= HARMONY else ENDS
    by_text = [number for text, number in special.items() if text in known]
    ends = [found[name] for name in ("eos", "eot", "eom") if found[name] is not None]
    config: dict[str, Any] = {"bos_token_id": found["bos"], "eos_token_id": list(dict.fromkeys((*ends, *by_text)))}
    return config | ({} if found["padding"] is None else {"pad_token_id": found["padding"]})


def tokenizer_of(model: GgufModel) -> tuple[dict[str, Any], dict[str, Any]]:
    """Writes (tokenizer.json, tokenizer_config.json)."""
    tokens, types = _tokens(model), _types(model)
    ids = special_ids(model)
    if _kind(model) == "gpt2":
        parts, adds_bos = _of_bytes(model, tokens)
    else:
        parts, adds_bos = _of_characters(model, tokens, types), True
    bos = [ids["bos_token_id"]] if _flag(model, "add_bos_token", adds_bos) else []
    eos = ids["eos_token_id"][:1] if _flag(model, "add_eos_token", False) else []
    if None in bos:
        raise model.refused(f"{KEYS}add_bos_token is true, and {KEYS}bos_token_id is missing")
    added = [_added(model, number, tokens[number], kind) for number, kind in enumerate(types) if kind in SPECIAL]
    whole = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, **parts}
    whole["post_processor"] = _template(tokens, bos, eos)
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": bool(bos)}
    for name, number in (("bos_token", ids["bos_token_id"]), ("eos_token", next(iter(ids["eos_token_id"]), None))):
        if number is not None:
            settings[name] = tokens[number]
    template = model.text("tokenizer.chat_template")
    return whole, settings | ({} if template is None else {"chat_template": template})


def _added(model: GgufModel, number: int, text: str, kind: int) -> dict[str, Any]:
    """Returns an entry of `added_tokens`; Phi-3's swallow the spaces behind them, which only llama.cpp's code says."""
    is_phi = any(name in (model.text("general.name") or "").lower() for name in ("phi-3", "phi3"))
    return {
        "id": number,
        "content": text,
        **dict.fromkeys(("single_word", "lstrip", "normalized"), False),
        "rstrip": is_phi and text not in ("<unk>", "<s>", "<|endoftext|>"),
        "special": kind != USER_DEFINED,
    }


def _kind(model: GgufModel) -> str:
    found = model.text(f"{KEYS}model")
    if found not in DEFAULT_IDS:
        said = "has no tokenizer" if found in (None, "none", "no_vocab") else f"has the tokenizer {short(found)}"
        raise model.refused(
            f"it {said} ({KEYS}model), expected one of {', '.join(DEFAULT_IDS)}; give a file with such a tokenizer"
        )
    return found


def _tokens(model: GgufModel) -> list[str]:
    found = model.values.get(f"{KEYS}tokens")
    rows = model.located["token_embd.weight"].entry.shape[0] if "token_embd.weight" in model.located else 0
    if not isinstance(found, list) or not all(isinstance(text, str) for text in found) or len(found) != rows:
        what = f"a list of {len(found)}" if isinstance(found, list) else short(found)
        raise model.refused(f"{KEYS}tokens is {what}, expected a list of {rows} texts, one for each embedding")
    tokens = [text or f"[EMPTY_{number}]" for number, text in enumerate(found)]
    if len(set(tokens)) < len(tokens):
        seen = set[str]()
        twice = next(text for text in tokens if text in seen or seen.add(text))
        raise model.refused(f"{KEYS}tokens has {short(twice)} twice, expected distinct tokens")
    return tokens


def _types(model: GgufModel) -> list[int]:
    found = model.values.get(f"{KEYS}token_type")
    count = len(_tokens(model))
    if found is None:
        return [NORMAL] * count
    if not isinstance(found, np.ndarray) or found.dtype.kind not in "iu" or found.size < count:
        raise model.refused(f"{KEYS}token_type is no list of {count} numbers, one for each token")
    return found[:count].tolist()


def _id(model: GgufModel, name: str, count: int) -> int | None:
    """The id of a special token; None if the file has none, or one beyond the tokens, which llama.cpp ignores."""
    found = model.values.get(f"{KEYS}{name}_token_id")
    if found is not None and type(found) is not int:
        raise model.refused(f"{KEYS}{name}_token_id is {short(found)}, expected a token's number")
    return found if found is not None and 0 <= found < count else None


def _flag(model: GgufModel, name: str, default: bool) -> bool:
    found = model.values.get(f"{KEYS}{name}", default)
    if not isinstance(found, bool):
        raise model.refused(f"{KEYS}{name} is {short(found)}, expected true or false")
    return found


def _template(tokens: list[str], bos: list[int], eos: list[int]) -> dict[str, Any] | None:
    if not bos and not eos:
        return None
    before, behind = ([{"SpecialToken": {"id": tokens[number], "type_id": 0}} for number in ids] for ids in (bos, eos))
    single = [*before, {"Sequence": {"id": "A", "type_id": 0}}, *behind]
    special = {tokens[n]: {"id": tokens[n], "ids": [n], "tokens": [tokens[n]]} for n in (*bos, *eos)}
    pair = [*single, {"Sequence": {"id": "B", "type_id": 1}}]
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": special}


def _bpe(tokens: list[str], merges: list[tuple[str, str]], **own: Any) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": {text: number for number, text in enumerate(tokens)},
        "merges": [list(pair) for pair in merges],
        **own,
    }


def _of_bytes(model: GgufModel, tokens: list[str]) -> tuple[dict[str, Any], bool]:
    """Returns (normalizer, pre-tokenizer, decoder and model, whether a text begins with a token by default)."""
    name = model.text(f"{KEYS}pre")
    if name not in SPLITS:
        raise model.refused(
            f"{KEYS}pre is {short(name)}, so it is not known how to split texts, expected llama-bpe, qwen2, gpt-2, "
            "smollm or another name of compiler/llama_cpp/splits.py; give a file that names one"
        )
    split = SPLITS[name]
    pieces = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in split.patterns
    ]
    as_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    parts = {
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*pieces, as_bytes]},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": _bpe(tokens, _merges(model, set(tokens)), ignore_merges=split.keeps_words),
    }
    return parts, split.adds_bos


def _merges(model: GgufModel, tokens: set[str]) -> list[tuple[str, str]]:
    """Returns the merges by rank; leaves out those whose parts or result are no token, which never apply."""
    found = model.values.get(f"{KEYS}merges")
    if not isinstance(found, list) or not all(isinstance(text, str) for text in found):
        raise model.refused(f"{KEYS}merges is {short(found)}, expected a list of texts, two tokens in each")
    pairs = dict[tuple[str, str], None]()
    for text in found:
        place = text.find(" ", 1)
        if place < 0:
            raise model.refused(f"{KEYS}merges has {short(text)}, expected two tokens with a space between them")
        pairs.setdefault((text[:place], text[place + 1 :]))
    return [pair for pair in pairs if {*pair, "".join(pair)} <= tokens]


def _of_characters(model: GgufModel, tokens: list[str], types: list[int]) -> dict[str, Any]:
    scores = model.values.get(f"{KEYS}scores")
    if not isinstance(scores, np.ndarray) or scores.size < len(tokens) or not np.isfinite(scores).all():
        raise model.refused(f"{KEYS}scores is no list of {len(tokens)} finite numbers, one for each token")
    if (longest := max(map(len, tokens), default=0)) > MAX_TOKEN_CHARACTERS:
        raise model.refused(f"{KEYS}tokens has one of {longest} characters, expected at most {MAX_TOKEN_CHARACTERS}")
    if _flag(model, "remove_extra_whitespaces", False):
        raise model.refused(f"{KEYS}remove_extra_whitespaces is true, which is not supported, expected false")
    has_prefix = _flag(model, "add_space_prefix", True)
    steps: list[dict[str, Any]] = [{"type": "Prepend", "prepend": SPACE}] if has_prefix else []
    steps.append({"type": "Replace", "pattern": {"String": " "}, "content": SPACE})
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if has_prefix else []
    spaces = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    unknown = next((text for text, kind in zip(tokens, types, strict=True) if kind == UNKNOWN), None)
    return {
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": [spaces, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]},
        "model": _bpe(tokens, _pairs(tokens, types, scores), unk_token=unknown, byte_fallback=BYTE in types),
    }


def _pairs(tokens: list[str], types: list[int], scores: np.ndarray) -> list[tuple[str, str]]:
    """Returns every two tokens that form a third, the best score of a third first: SentencePiece joins these."""
    known = set(tokens)
    ranked = sorted(
        (number for number in range(len(tokens)) if types[number] in (NORMAL, USER_DEFINED, UNUSED)),
        key=lambda number: (-scores[number], number),
    )
    return [
        (text[:place], text[place:])
        for text in (tokens[number] for number in ranked)
        for place in range(1, len(text))
        if text[:place] in known and text[place:] in known
    ]
