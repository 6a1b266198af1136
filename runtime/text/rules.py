r"""Decides from tokenizer.json, before anything is built, whether the cost of a tokenizer is bounded.

A tokenizer is a small program that its author wrote: patterns, replacements, templates. Nearly all tokenizers in use
consist of the parts below, whose time is linear in the text and whose output is at most a known multiple of it; these
run in this process. All others are allowed, but run with limits on time and memory (runtime/text/process.py).
"""

import re
from collections.abc import Iterator
from typing import Any

from coldpress.runtime.artifact import strict_json
from coldpress.runtime.artifact.errors import short

JSON = strict_json.Limits(size_bytes=64 << 20, depth=32, integer=2**63 - 1, values=1 << 22, names=1 << 21)
"""The largest vocabularies in use, of 260,000 tokens and twice as many merges, take half of each limit."""
MAX_PARTS, MAX_GROWTH, MAX_TEXT = 32, 4096, 1000
"""Limits of a chain: components; characters that they make of one together; characters of any one text in it."""
MAX_TEMPLATE_IDS = 64
"""Most special tokens that a template adds to a prompt."""

KEYS = {"version", "truncation", "padding", "added_tokens", "normalizer", "pre_tokenizer", "post_processor", "decoder"}
GROWTH = {
    "normalizer": {
        **{"NFC": 3, "NFD": 4, "NFKC": 18, "NFKD": 18, "Lowercase": 3, "Strip": 1, "StripAccents": 1, "Nmt": 1},
        **{"BertNormalizer": 12, "ByteLevel": 4, "Prepend": 1, "Replace": 1},
    },
    "pre_tokenizer": {
        **{"ByteLevel": 4, "Metaspace": 2, "Whitespace": 1, "WhitespaceSplit": 1, "BertPreTokenizer": 1, "Digits": 1},
        **{"Punctuation": 1, "UnicodeScripts": 1, "CharDelimiterSplit": 1, "Split": 1},
    },
    "post_processor": {"ByteLevel": 1, "BertProcessing": 1, "RobertaProcessing": 1, "TemplateProcessing": 1},
    "decoder": {
        **{"ByteLevel": 1, "ByteFallback": 3, "Fuse": 1, "Metaspace": 1, "WordPiece": 2, "BPEDecoder": 1, "CTC": 1},
        **{"Strip": 1, "Replace": 1},
    },
}
"""Component -> most characters that it makes of one character or token; the pattern of a Replace adds a factor."""
CHILDREN = {
    "normalizer": "normalizers",
    "pre_tokenizer": "pretokenizers",
    "post_processor": "processors",
    "decoder": "decoders",
}

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE, _SPACES = r"[^\r\n\p{L}\p{N}]?", r"\s*[\r\n]+|\s+(?!\S)|\s+"


def _cased(ending: str) -> str:
    return f"{_BEFORE}{_UPPER}*{_LOWER}+{ending}|{_BEFORE}{_UPPER}+{_LOWER}*{ending}"


PATTERNS = frozenset(
    {
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",  # GPT-2
        rf"{_CONTRACTIONS}|{_BEFORE}\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}",  # Qwen 2
        rf"{_CONTRACTIONS}|{_BEFORE}\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}",  # Llama 3
        rf"{_cased(_CONTRACTIONS + '?')}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}",  # GPT-4o
        rf"{_cased('')}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}",  # Mistral's newer ones
    }
)
"""Patterns of well-known tokenizers; they take linear time."""
ONE_ATOM = re.compile(r"(?:\\[pP]\{\w+\}|\\[dswnrt]|\[[^\[\]\\]+\]|[\w ▁])(?:[+*]|\{\d{1,3}(?:,\d{0,3})?\})?")
"""A pattern of one kind of character, repeated or not, takes linear time, too; two kinds could take quadratic time."""


class Unbounded(Exception):
    """A part of a tokenizer has no known bound; the text names the part."""


def why_unbounded(values: Any) -> str | None:
    """Names the part of a parsed tokenizer.json that has no known bound; None if all parts are bounded."""
    try:
        if not strict_json.is_object(values) or not values.keys() <= KEYS | {"model"}:
            raise Unbounded(f"fields {short(sorted(values))}" if strict_json.is_object(values) else "its text")
        for place in GROWTH:
            _check_chain(place, values.get(place))
        _check_model(values.get("model"))
        for token in _list(values.get("added_tokens", [])):
            _check_text("an added token", token.get("content") if strict_json.is_object(token) else None)
    except Unbounded as reason:
        return str(reason)
    return None


def _check_chain(place: str, component: Any) -> None:
    """Bounds the number of components, and the characters that all of them together make of one."""
    growth = 1
    for index, part in enumerate(_parts(place, component)):
        kind = part.get("type")
        if index >= MAX_PARTS or not isinstance(kind, str) or kind not in GROWTH[place]:
            raise Unbounded(f"{place} {short(kind)}")
        if "pattern" in part:
            growth *= _growth_of_pattern(place, part)
        growth *= GROWTH[place][kind]
        for name in ("prepend", "replacement", "prefix", "suffix"):
            if name in part:
                _check_text(f"{place}.{name}", part[name])
        if kind == "Strip" and place == "decoder" and not all(_is_small(part.get(key)) for key in ("start", "stop")):
            raise Unbounded(f"{place} {kind}")
        if kind == "TemplateProcessing":
            _check_template(part)
    if growth > MAX_GROWTH:
        raise Unbounded(f"{place} that makes up to {growth} characters of one")


def _parts(place: str, component: Any) -> Iterator[dict[str, Any]]:
    if component is None:
        return
    if not strict_json.is_object(component):
        raise Unbounded(f"{place} {short(component)}")
    if component.get("type") != "Sequence":
        yield component
        return
    for inner in _list(component.get(CHILDREN[place])):
        yield from _parts(place, inner if inner is not None else 0)


def _growth_of_pattern(place: str, part: dict[str, Any]) -> int:
    """Returns the factor by which a pattern's replacement grows the text; 1 for a Split, which replaces nothing.

    The pattern must be plain text, a known pattern, or one kind of character.
    """
    pattern, content = part["pattern"], part.get("content", "")
    kind, text = next(iter(pattern.items())) if strict_json.is_object(pattern) and len(pattern) == 1 else ("", None)
    known = isinstance(text, str) and (kind == "String" or text in PATTERNS or ONE_ATOM.fullmatch(text))
    if not known or not text or not isinstance(content, str) or (kind == "Regex" and text[-1] == "*" and content):
        raise Unbounded(f"{place} with the pattern {short(pattern)}")
    return max(1, -(-len(content) // (len(text) if kind == "String" else 1)))


def _check_template(part: dict[str, Any]) -> None:
    """Requires that a template has the prompt at most once, and few special tokens."""
    special, num_ids, num_prompts = part.get("special_tokens"), 0, 0
    for piece in _list(part.get("single")):
        name = piece["SpecialToken"].get("id") if strict_json.is_object(piece) and "SpecialToken" in piece else None
        num_prompts += name is None
        if name is not None:
            token = special.get(name) if strict_json.is_object(special) and isinstance(name, str) else None
            num_ids += len(_list(token.get("ids") if strict_json.is_object(token) else None))
        if num_ids > MAX_TEMPLATE_IDS or num_prompts > 1:
            raise Unbounded(f"a template of more than one prompt or {MAX_TEMPLATE_IDS} special tokens")


def _check_model(value: Any) -> None:
    model = value if strict_json.is_object(value) else {}
    kind = model.get("type")
    if kind == "WordPiece" and not _is_small(model.get("max_input_chars_per_word")):  # quadratic in a word's length
        raise Unbounded("model WordPiece with words of any length")
    if kind == "Unigram":
        for piece in _list(model.get("vocab")):
            _check_text("a piece of the vocabulary", piece[0] if strict_json.is_array(piece) and piece else None)
    if kind == "BPE":
        for name in ("continuing_subword_prefix", "end_of_word_suffix"):
            _check_text(f"model.{name}", model.get(name) or "")
    if kind not in ("BPE", "Unigram", "WordLevel", "WordPiece"):
        raise Unbounded(f"model {short(kind)}")


def _list(value: Any) -> list[Any]:
    if not strict_json.is_array(value):
        raise Unbounded(f"{short(value)} where a list belongs")
    return value


def _is_small(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_TEXT


def _check_text(place: str, text: Any) -> None:
    if not isinstance(text, str) or len(text) > MAX_TEXT:
        raise Unbounded(f"{place} {short(text)}")
