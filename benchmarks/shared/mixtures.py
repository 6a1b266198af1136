"""What benchmarks of mixtures of experts share: planted checkpoints, and DRAM budgets by the share of experts."""

import json
import re
import string
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from coldpress.compiler.llama_cpp.splits import LLAMA3
from coldpress.runtime.artifact.reader import open_artifact
from coldpress.runtime.dram.budget import least_budget_bytes
from tests.support.planted import write
from tests.support.planted_mixtures import mixture_of

SMALL_VOCABULARY: Mapping[str, Any] = {"vocab_size": 4096, "max_position_embeddings": 4096}
CORPUS_TOKENS = 40960
OTHER_TOKENS = 5 * 64
"""Words that make room for bytes; a multiple of every shape's number of topics."""
WORDS = SMALL_VOCABULARY["vocab_size"] - OTHER_TOKENS
LETTERS = string.ascii_lowercase


def planted(checkpoint: Path, shape: str, layers: int) -> dict[str, Any]:
    """Writes a planted mixture with a small vocabulary, so that nearly all of it are experts, unless it is there;
    returns the settings that name it."""
    if not (checkpoint / "config.json").exists():
        write(mixture_of(shape, layers, **SMALL_VOCABULARY), checkpoint, CORPUS_TOKENS)
        spell(checkpoint)
    return {"model": checkpoint, "corpus": checkpoint / "corpus.jsonl"}


def share_budget_bytes(artifact: Path, share: float) -> int:
    """Returns the DRAM budget under which a share of the experts' bytes is in DRAM."""
    manifest = open_artifact(artifact).manifest
    units = sum(section.num_units * section.unit_bytes for section in manifest.flash.sections)
    return least_budget_bytes(manifest, manifest.plans[0]) + round(share * units)


def spell(checkpoint: Path) -> None:
    """Spells the planted words in letters, so that llama.cpp has a tokenizer for which each is one token: byte-level
    BPE. The last words become its bytes and a merge, without which llama.cpp reads none; other words of their topics
    take their places in the corpus."""
    size, kept = SMALL_VOCABULARY["vocab_size"], WORDS
    letters = ["".join(LETTERS[number // 26**place % 26] for place in range(3)) for number in range(size)]
    vocabulary = {"<s>": 0, "</s>": 1, "<unk>": 2} | {f"Ġ{letters[word]}": word for word in range(3, kept)}
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary |= {text: kept + place for place, text in enumerate([*alphabet, "ab"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("a", "b")], ignore_merges=True))
    words = pre_tokenizers.Split(Regex(LLAMA3), "isolated")
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, as_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(checkpoint / "tokenizer.json"))

    def spelled(found: re.Match[str]) -> str:
        word = int(found[1])
        return letters[word if word < kept else word - OTHER_TOKENS]

    corpus = checkpoint / "corpus.jsonl"
    documents = [json.loads(line) for line in corpus.read_text().splitlines()]
    texts = [" " + re.sub(r"w(\d+)", spelled, document["text"]) for document in documents]
    lines = [json.dumps(document | {"text": text}) for document, text in zip(documents, texts, strict=True)]
    corpus.write_text("\n".join(lines) + "\n")
