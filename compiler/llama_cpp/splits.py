"""Splits of texts by llama.cpp's byte-level tokenizers before merging, by `tokenizer.ggml.pre`
(src/llama-vocab.cpp)."""

from dataclasses import dataclass

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_BEFORE, _SPACES = r"[^\r\n\p{L}\p{N}]?", r"\s*[\r\n]+|\s+(?!\S)|\s+"
DIGIT = r"\p{N}"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def _words(digits: str) -> str:
    return rf"{CONTRACTIONS}|{_BEFORE}\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"


def _cased(contractions: str, digits: str) -> str:
    """Returns GPT-4o's pattern: a word ends before a capital letter."""
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    words = rf"{_BEFORE}{upper}*{lower}+{contractions}|{_BEFORE}{upper}+{lower}*{contractions}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"


LLAMA3, QWEN2 = _words(r"\p{N}{1,3}"), _words(r"\p{N}")


@dataclass(frozen=True)
class Split:
    patterns: tuple[str, ...]
    """Expressions in order; each splits the pieces that the ones before it left."""
    keeps_words: bool = False
    """True if a whole word that is a token stays whole, whatever the merges."""
    adds_bos: bool = False
    """True if a text begins with a token where the file does not say."""


SPLITS = {
    "tekken": Split((_cased("", r"\p{N}"),), True, True),
    **dict.fromkeys(("gpt-4o", "llama4"), Split((_cased(f"{CONTRACTIONS}?", r"\p{N}{1,3}"),))),
    "falcon": Split((r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]")),
    "default": Split((r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "deepseek-coder": Split((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}")),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "lfm2"), Split((LLAMA3,), True, True)),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), Split((LLAMA3,))),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "stablelm2", "hunyuan", "solar-open"), Split((QWEN2,))),
    **dict.fromkeys(("gpt-2", "phi-2", "olmo", "mpt", "jais", "exaone4", "trillion"), Split((GPT2,))),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), Split((DIGIT, GPT2))
    ),
}
