"""The artifact in llama.cpp: the same greedy tokens from its GGUF export, the same prompts' tokens, and both speeds.

`python -m benchmarks.llama_cpp [--models prose7m …] [--formats fp16 …]`, with the extra `llama`. Each model is
compiled with the dense selector and `export=gguf`, so that both engines compute with the same values. Continuations are
greedy, up to 48 tokens behind the first 16 of test blocks, or to the end of text; in fp16 all are expected to be equal,
while in other formats down matrices are rounded once more (README) and llama.cpp rounds activations, too. Both run on
one thread, in turns; a ratio above 1 says that ours is faster. A mixture of experts has a tokenizer that llama.cpp does
not take, and is asked for token ids as a library, without texts. What cannot be exported is a row with the refusal.

The last line is {model: {format: {continuations, equal, first_difference, texts, texts_equal, speed_ratio, rounded}}},
or {model: {refused}}.
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.end_to_end import MODELS, settings
from benchmarks.shared.llama import LlamaCpp, llama_extra
from benchmarks.shared.report import finish, show
from coldpress.compiler.io import load_arrays, load_record
from coldpress.runtime.generate.session import Session
from coldpress.runtime.text.tokenizer import TextCodec
from coldpress.schemas.corpus import Corpus
from coldpress.schemas.export import Export
from coldpress.schemas.model import ModelSpec
from tests.support.llama_library import LlamaLibrary
from tests.support.models import documents
from tests.support.pipeline import build

PROMPT_TOKENS, NEW_TOKENS, PROMPTS, ROUNDS = 16, 48, 12, 3
MIXTURE = "tinystories-mixtral-8x"
TEXTS = (" two  spaces\n\n\tand lines ", 'He said: "Don\'t!" 1234 times.', "naïve 日本 🙂", *documents(20))


class TokenIds:
    """As `LlamaCpp`, of a file without a tokenizer."""

    def __init__(self, file: str, context_length: int, spec: ModelSpec) -> None:
        """Loads it."""
        self._library, self._ends = LlamaLibrary(file, context_length, spec.vocab_size), spec.eos_token_ids

    def generate(self, prompt: Sequence[int], num_tokens: int) -> tuple[list[int], float]:
        """(greedy continuation, tokens per second, the prompt's time included)."""
        started_s = time.perf_counter()
        found = self._library.generate(prompt, num_tokens, self._ends)
        return found, len(found) / (time.perf_counter() - started_s)


def ours(session: Session, prompt: Sequence[int]) -> tuple[list[int], float]:
    """As `LlamaCpp.generate`."""
    done = session.generate(prompt, NEW_TOKENS)
    return list(done.token_ids), done.metrics.num_tokens / max(done.metrics.decode_s, 1e-9)


def first_difference(found: Sequence[int], expected: Sequence[int]) -> int | None:
    """The first place in which two continuations differ; None where they are equal."""
    pairs = [a == b for a, b in zip(found, expected, strict=False)]
    return None if list(found) == list(expected) else (pairs.index(False) if False in pairs else len(pairs))


def measure(top: Path) -> dict[str, Any]:
    """Compares the artifact in a build folder with its export."""
    exported = load_record(top / "export.json", Export)
    blocks = load_arrays(load_record(top.parent / "tokenize.json", Corpus).split("test").arrays)["tokens"]
    prompts = [block[:PROMPT_TOKENS].tolist() for block in blocks[:PROMPTS]]
    (artifact,) = top.glob("*.coldpress")
    session = Session(artifact)
    spec, context_length = session.artifact.manifest.model, session.plan.context_length
    ends, texts_equal = spec.eos_token_ids, None
    if spec.is_mixture:
        engine = TokenIds(exported.file, context_length, spec)
    else:
        engine, codec = LlamaCpp(exported.file, context_length), TextCodec(session.artifact)
        texts_equal = sum(engine.tokenize(text) == codec.encode(text) for text in TEXTS)
    pairs = [(engine.generate(prompt, NEW_TOKENS)[0], ours(session, prompt)[0]) for prompt in prompts]
    texts = [[[token for token in ids if token not in ends] for ids in pair] for pair in pairs]
    differences = [first_difference(found, expected) for found, expected in texts]
    speeds = [
        (ours(session, prompt)[1], engine.generate(prompt, NEW_TOKENS)[1]) for _ in range(ROUNDS) for prompt in prompts
    ]
    places = [place for place in differences if place is not None]
    return {
        "continuations": len(prompts),
        "equal": differences.count(None),
        "first_difference": min(places, default=None),
        "texts": 0 if texts_equal is None else len(TEXTS),
        "texts_equal": texts_equal,
        "speed_ratio": float(np.median([mine / theirs for mine, theirs in speeds])),
        "rounded": len(exported.rounded),
    }


def compile_and_measure(model: str, arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The figures of a model by format, or the sentence with which it was refused."""
    found = {}
    for name in arguments.formats:
        config = {"method": "dense", "format": name, "label": name, "export": "gguf"}
        config |= {"gguf_tokenizer": False} if model == MIXTURE else {}
        try:
            top = build(folder, **settings(model, arguments.device) | config)
        except RuntimeError as error:
            refused = [line for line in str(error).splitlines() if "export" in line and "error: " in line]
            if not refused:
                raise
            return {"refused": refused[-1].partition("error: ")[2]}
        found[name] = measure(top)
        print(model, name, json.dumps(found[name]), flush=True)
    return found


def main() -> None:
    """Prints the table and the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="pixel6")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS), metavar="MODEL")
    parser.add_argument("--formats", nargs="+", default=["fp16", "int8_group32", "int4_group32"], metavar="FORMAT")
    arguments = parser.parse_args()
    llama_extra()  # before minutes of work
    os.environ["OMP_NUM_THREADS"] = "1"
    figures: dict[str, dict[str, Any]] = {}
    for model in arguments.models:
        with tempfile.TemporaryDirectory(dir=".") as folder:
            figures[model] = compile_and_measure(model, arguments, Path(folder))
        print(model, json.dumps(figures[model]), flush=True)
    rows = [(model, name, row) for model, found in figures.items() for name, row in found.items() if name != "refused"]
    columns = list(rows[0][2]) if rows else []
    show(
        "ours and llama.cpp", ["model", "format", *columns], ([model, name, *row.values()] for model, name, row in rows)
    )
    finish(figures)


if __name__ == "__main__":
    main()
