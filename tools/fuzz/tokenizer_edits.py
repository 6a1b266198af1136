"""Makes well-formed edits of tokenizer.json: components that explode, backtrack, fail or contradict each other.

The names are those of the `tokenizers` package's format.
"""

import json
import random
from pathlib import Path
from typing import Any

from tools.fuzz.file_edits import files
from tools.fuzz.json_edits import Unfit, dump, edit_text, edit_value, strange

SLOW_PATTERNS = (
    "(a+)+$",
    "(w|w)*$",
    "(.*)*x",
    "(?:(\\w+)\\s*)+$",
    "(",
    "[",
    "\\",
    "",
    "a{1,100000}",
    "(?=w)*",
    "\\p{X}",
)


def _replace(pattern: Any, content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def _doubling(count: int) -> dict[str, Any]:
    return {"type": "Sequence", "normalizers": [_replace({"String": "w"}, "ww")] * count}


def normalizer(chance: random.Random) -> Any:
    """Returns a random normalizer, which changes a prompt first."""
    return chance.choice(
        (
            _doubling(chance.choice((3, 10, 20, 40))),
            _replace({"Regex": chance.choice(SLOW_PATTERNS)}, "b" * chance.choice((0, 1, 1000))),
            _replace({"String": ""}, "x" * chance.choice((1, 100_000))),
            {"type": "Prepend", "prepend": "x" * chance.choice((0, 1, 1 << 20))},
            {"type": "Sequence", "normalizers": [{"type": "NFKD"}] * chance.choice((0, 2, 1000))},
            {"type": "Precompiled", "precompiled_charsmap": chance.choice(("", "AAAA", "/////w==", "x" * 1000))},
            {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "strip_accents": None}
            | {"lowercase": True},
            {"type": "Nothing"},
            _nested("Sequence", "normalizers", {"type": "NFC"}, chance.choice((3, 200))),
        )
    )


def pre_tokenizer(chance: random.Random) -> Any:
    """Returns a random pre-tokenizer, which cuts text into words."""
    pattern = {"Regex": chance.choice(SLOW_PATTERNS)}
    behavior = chance.choice(("Removed", "Isolated", "MergedWithPrevious", "Nothing"))
    return chance.choice(
        (
            {"type": "Split", "pattern": pattern, "behavior": behavior, "invert": chance.random() < 0.5},
            {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
            {"type": "Metaspace", "replacement": chance.choice(("▁", "", "xx")), "prepend_scheme": "always"}
            | {"split": True},
            {"type": "Digits", "individual_digits": True},
            {"type": "Punctuation", "behavior": behavior},
            {"type": "Sequence", "pretokenizers": [{"type": "Whitespace"}] * chance.choice((0, 1, 1000))},
            _nested("Sequence", "pretokenizers", {"type": "Whitespace"}, chance.choice((3, 200))),
            None,
        )
    )


def post_processor(chance: random.Random) -> Any:
    """Returns a random post-processor, which adds ids around a prompt's."""
    ids = [chance.choice((0, 1, 95, 96, 2**31, 2**32 - 1))] * chance.choice((1, 100, 100_000))
    special = {"id": "<s>", "ids": ids, "tokens": ["<s>"] * len(ids)}
    token, text = {"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    single = [token] * chance.choice((1, 2, 1000)) + [text] * chance.choice((0, 1, 2))
    return chance.choice(
        (
            {
                "type": "TemplateProcessing",
                "single": single,
                "pair": [*single, text],
                "special_tokens": {"<s>": special},
            },
            {"type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": {}},
            {"type": "BertProcessing", "sep": ["w1", chance.choice((1, 2**32 - 1))], "cls": ["w0", 0]},
            {"type": "RobertaProcessing", "sep": ["w1", 1], "cls": ["w0", 0], "trim_offsets": True}
            | {"add_prefix_space": True},
            {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        )
    )


def decoder(chance: random.Random) -> Any:
    """Returns a random decoder, which turns ids into text."""
    return chance.choice(
        (
            {"type": "Sequence", "decoders": [_replace({"String": "w"}, "ww")] * chance.choice((5, 20, 40))},
            _replace({"Regex": chance.choice(SLOW_PATTERNS)}, "x"),
            _replace({"String": "w"}, chance.choice(("\x1b[2J", "\a", "\u202e", "y" * 100_000, ""))),
            {"type": "Strip", "content": chance.choice(("w", "xx", "")), "start": 2**31, "stop": chance.choice((0, 9))},
            {"type": "CTC", "pad_token": "w1", "word_delimiter_token": "|", "cleanup": True},
            {"type": "WordPiece", "prefix": "", "cleanup": True},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            {"type": "BPEDecoder", "suffix": "w"},
            {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True},
            _nested("Sequence", "decoders", {"type": "Fuse"}, chance.choice((3, 200))),
        )
    )


def model(chance: random.Random) -> Any:
    """Returns a random model, which turns words into ids."""
    words = {f"w{number}": number for number in range(chance.choice((0, 1, 96, 500)))}
    scores = [[word, chance.choice((-1.0, 0.0, 1e308, -1e308))] for word in words]
    merges = chance.choice(([], ["w 1"], [["w", "1"]], [["x", "y"]], ["w  1"], [["w", "1"]] * 1000))
    return chance.choice(
        (
            {"type": "WordLevel", "vocab": words, "unk_token": chance.choice(("w0", "absent"))},
            {"type": "WordPiece", "vocab": words, "unk_token": "w0", "continuing_subword_prefix": "##"}
            | {"max_input_chars_per_word": chance.choice((0, 100, 2**40))},
            {
                "type": "BPE",
                "vocab": words,
                "merges": merges,
                "dropout": chance.choice((None, 0.5, 2.0)),
                "fuse_unk": True,
            }
            | {"unk_token": chance.choice((None, "absent")), "byte_fallback": True, "ignore_merges": False},
            {"type": "Unigram", "vocab": scores, "unk_id": chance.choice((None, 0, 10**6)), "byte_fallback": False},
            {"type": "WordLevel", "vocab": {"w1": 2**32 - 1, "w2": 2**31, "w0": 0}, "unk_token": "w0"},
            {"type": "WordLevel", "vocab": {"w1": 1, "w2": 1, "w0": 0}, "unk_token": "w0"},
        )
    )


def added_tokens(chance: random.Random) -> Any:
    """Returns random tokens beside the model's."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), chance.random() < 0.5)
    content = chance.choice(("", "w1", "<s>", " ", "\x1b[2J", "x" * 100_000, "\0"))
    token = {"id": chance.choice((0, 1, 95, 96, 10**6, 2**32 - 1, -1)), "content": content, **flags}
    return [token] * chance.choice((1, 2, 5000))


def truncation(chance: random.Random) -> Any:
    """Returns a random limit of a prompt's length."""
    return {
        "direction": "Right",
        "max_length": chance.choice((0, 1, 2**40)),
        "stride": chance.choice((0, 5, 2**40)),
    } | {"strategy": "LongestFirst"}


def padding(chance: random.Random) -> Any:
    """Returns random padding of a prompt."""
    return {
        "strategy": {"Fixed": chance.choice((8, 10**7, 2**40))},
        "direction": "Left",
        "pad_to_multiple_of": None,
    } | {
        "pad_id": chance.choice((0, 2**32 - 1)),
        "pad_type_id": 0,
        "pad_token": "w0",
    }


PARTS = {
    **{"normalizer": normalizer, "pre_tokenizer": pre_tokenizer, "post_processor": post_processor, "decoder": decoder},
    **{"model": model, "added_tokens": added_tokens, "truncation": truncation, "padding": padding},
}


def _nested(kind: str, key: str, inner: Any, depth: int) -> Any:
    for _ in range(depth):
        inner = {"type": kind, key: [inner]}
    return inner


def _tokenizer(folder: Path) -> tuple[Path, dict[str, Any]]:
    found = [path for path in files(folder) if path.name == "tokenizer.json"]
    try:
        value = json.loads(found[0].read_bytes())
    except (IndexError, OSError, ValueError, RecursionError) as error:
        raise Unfit from error
    if not isinstance(value, dict):
        raise Unfit
    return found[0], value


def component(folder: Path, chance: random.Random) -> str:
    """Replaces a component by another one of a valid kind."""
    path, value = _tokenizer(folder)
    part = chance.choice(sorted(PARTS))
    value[part] = PARTS[part](chance)
    path.write_bytes(dump(value))
    return f"{path.name}: {part} is {json.dumps(value[part])[:100]}"


def value_inside(folder: Path, chance: random.Random) -> str:
    """Edits a random value, key or entry."""
    path, value = _tokenizer(folder)
    done = edit_value(value, chance)
    path.write_bytes(dump(value))
    return f"{path.name}: {done}"


def vocabulary(folder: Path, chance: random.Random) -> str:
    """Renames a word or changes its id."""
    path, value = _tokenizer(folder)
    try:
        vocab: dict[str, Any] = value["model"]["vocab"]
        word = chance.choice(sorted(vocab))
    except (KeyError, TypeError, IndexError) as error:
        raise Unfit from error
    new = chance.choice(("", " ", "\x1b[31m", "\u202e", "\0", "x" * 100_000, "<0x0A>", "\ud800", word + " "))
    if chance.random() < 0.5:
        vocab[new] = vocab.pop(word)
        done = f"{word!r} is called {new[:40]!r}"
    else:
        vocab[word] = chance.choice((0, -1, 96, 10**6, 2**31, 2**32 - 1, 2**32, strange(chance)))
        done = f"the id of {word!r} is {str(vocab[word])[:40]}"
    path.write_bytes(dump(value))
    return f"{path.name}: {done}"


def text(folder: Path, chance: random.Random) -> str:
    """Edits the text of one of the tokenizer's files."""
    path, _ = _tokenizer(folder)
    path = chance.choice([other for other in files(path.parent) if other.suffix == ".json"])
    changed, done = edit_text(path.read_bytes(), chance)
    path.write_bytes(changed)
    return f"{path.name}: {done}"
