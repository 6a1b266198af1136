"""Vocabularies of the two tokenizers that GGUF has, trained on texts without splitting them.

So tokens cross every border at which a tokenizer may split, and a wrong split gives other ids.
"""

import functools
import json
from typing import Any

import numpy as np
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

from tests.support.hard_texts import HARD_TEXTS
from tests.support.models import documents

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
"""GGUF's types of tokens."""
NUM_MERGES = 1500
SPACE = "▁"


@functools.cache
def _trained(as_bytes: bool) -> tuple[list[str], list[tuple[str, str]]]:
    """Returns (characters, merges by rank)."""
    tokenizer = Tokenizer(models.BPE())
    if as_bytes:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    else:
        tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet()) if as_bytes else []
    texts = [*HARD_TEXTS, *HARD_TEXTS, *documents(20)] if as_bytes else documents(40)
    size = NUM_MERGES + (len(alphabet) or len(set("".join(texts))) + 1)
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False, max_token_length=12)
    tokenizer.train_from_iterator(texts, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    merges = [(left, right) for left, right in model["merges"]]
    made = {left + right for left, right in merges}
    return [text for text in sorted(model["vocab"], key=model["vocab"].__getitem__) if text not in made], merges


def of_bytes(pre: str, special: tuple[str, ...]) -> dict[str, Any]:
    """Returns the arguments of `with_vocabulary` for a `gpt2` tokenizer that splits by `pre`; the last special token
    is one that users define."""
    characters, merges = _trained(as_bytes=True)
    tokens = list(dict.fromkeys([*characters, *(left + right for left, right in merges)]))
    types = [NORMAL] * len(tokens) + [CONTROL] * (len(special) - 1) + [USER_DEFINED]
    keys = {"bos_token_id": len(tokens), "eos_token_id": len(tokens) + 1, "merges": [" ".join(pair) for pair in merges]}
    return {"tokens": [*tokens, *special], "types": types, "model": "gpt2", "pre": pre, **keys}


def of_characters(special: tuple[str, ...], **keys: Any) -> dict[str, Any]:
    """Returns the same for a `llama` tokenizer, whose ids begin as Llama 2's: unknown, begin, end, bytes."""
    characters, merges = _trained(as_bytes=False)
    first = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    made = list(dict.fromkeys(left + right for left, right in merges))
    tokens = [*first, *made, *characters, *special]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * (len(made) + len(characters))]
    types += [CONTROL] * (len(special) - 1) + [USER_DEFINED]
    scores = np.zeros(len(tokens), np.float32)
    scores[len(first) :] = -np.arange(len(tokens) - len(first))
    ids = {"unknown_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return {"tokens": tokens, "types": types, "model": "llama", "pre": "default", "scores": scores, **ids, **keys}
