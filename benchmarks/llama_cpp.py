"""Runs the artifact's GGUF export in llama.cpp: equal greedy tokens, equal tokens of prompts, and both speeds.

Each model is compiled with the dense selector and `export=gguf`, so that both engines compute with the same values.
Continuations are greedy and follow the first tokens of test blocks, to the given length or the end of text. In fp16 all
should be equal; in other formats down matrices are rounded once more (README), and llama.cpp rounds activations, too.
Both run on one thread, in turns; a ratio above 1 says that ours is faster. A model that cannot be exported gets a row
with the refusal. The jobs of a build are forked from a process that has imported the libraries.

Real models have their files' own codes (format `own`): the export should have the file's tensors byte by byte, and our
greedy tokens should be the likeliest ones of transformers' own model of the file, in float32.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.harness import Benchmark, Cell, Gain, Row, gain, main, option
from benchmarks.harness.places import data
from benchmarks.shared.builds import MODELS as ALL_MODELS
from benchmarks.shared.builds import build, settings
from benchmarks.shared.llama import LlamaCpp
from benchmarks.shared.real_models import MODELS as REAL_MODELS
from benchmarks.shared.real_models import SHORT, file_of
from coldpress.compiler.io import load_arrays, load_record
from coldpress.runtime.generate.session import Session
from coldpress.runtime.text.tokenizer import TextCodec
from coldpress.schemas.corpus import Corpus
from coldpress.schemas.errors import ColdpressError
from coldpress.schemas.package import Exported
from tests.support.hf import load_hf
from tests.support.models import documents

FORMATS = ("fp16", "int8_group32", "int4_group32")
OWN = "own"
"""The format of real models: their files' codes."""
PROMPT_TOKENS = 16
FEW = 2
"""Prompts whose decoding is timed for a real model."""
MODELS = tuple(name for name in ALL_MODELS if name != "tinystories-mixtral-8x")
"""All models but the mixture, whose tokenizer llama.cpp refuses; tests/compiler/test_export.py has one."""
TEXTS = (" two  spaces\n\n\tand lines ", 'He said: "Don\'t!" 1234 times.', "naïve 日本 🙂", *documents(20))


@dataclass(frozen=True)
class Options:
    models: tuple[str, ...] = option(
        ("stories260k", "prose7m"), smoke=("stories260k",), full=MODELS, choices=MODELS, help="models to export"
    )
    real: tuple[str, ...] = option(REAL_MODELS[:2], smoke=(), full=REAL_MODELS, choices=REAL_MODELS, help="real models")
    formats: tuple[str, ...] = option(FORMATS, smoke=FORMATS[:1], choices=FORMATS, help="formats of the weights")
    prompts: int = option(20, smoke=2, help="number of continuations")
    new_tokens: int = option(64, smoke=16, help="most tokens of a continuation")
    rounds: int = option(5, smoke=2, help="timed rounds")
    device: str = option("pixel6", help="device profile")
    short: bool = option(False, smoke=True, help="calibrate and score on less text")


class Plugin(Benchmark[Options]):
    keys = {
        "rows[].refused?": "why the model could not be exported; such a row has no other figure",
        "rows[].continuations?": "number of continuations that were compared",
        "rows[].equal?": "continuations whose tokens are equal in both engines",
        "rows[].first_difference?": "first place at which any continuation differs; null where all are equal",
        "rows[].texts?": "number of texts that were tokenized by both engines",
        "rows[].texts_equal?": "texts whose tokens are equal in both engines",
        "rows[].speed_ratio?": "our tokens per second over llama.cpp's, taken in each round",
        "rows[].rounded?": "number of tensors that the export rounds once more",
        "rows[].tensors?": "real: tensors of the file",
        "rows[].tensors_equal?": "real: tensors whose type and bytes are the same in the export",
        "rows[].likeliest?": "real: continuations whose tokens are all the likeliest of transformers' model",
    }
    is_timing = True
    needs_data = True
    extra = "llama: xllamacpp"
    over = ({"model": "models", "format": "formats"}, {"model": "real", "format": (OWN,)})
    full_minutes = 60

    def measure(self, cell: Cell) -> Iterator[Row]:
        os.environ["OMP_NUM_THREADS"] = "1"
        model, form = cell["model"], cell["format"]
        if form == OWN:
            yield self._of_file(file_of(model, self.folder / model, build), self.folder / model)
            return
        config: dict[str, Any] = settings(model, self.options.device, self.options.short)
        config |= {"method": "dense", "format": form, "label": form, "export": "gguf"}
        try:
            top = build(self.folder / model, **config)
        except ColdpressError as error:
            if "export" not in str(error):
                raise
            yield {"refused": str(error)}
            return
        yield self._compared(top, self.options.prompts)[0]

    def _of_file(self, file: Path, folder: Path) -> Row:
        """Compares a real model's dense artifact with its file: with llama.cpp, and with transformers."""
        config: dict[str, Any] = SHORT | {"model": file, "corpus": data() / "corpora" / "wikitext-2"}
        config["evaluation_tokens"] = 512
        top = build(folder, export="gguf", dram_budget="100%", device=self.options.device, **config)
        row, texts = self._compared(top, FEW)
        equal, total = equal_tensors(file, Path(load_record(top / "export.json", Exported).file))
        found = {"tensors": total, "tensors_equal": equal, "likeliest": num_likeliest(file, texts)}
        return row | found

    def _compared(self, top: Path, num_timed: int) -> tuple[Row, list[tuple[list[int], list[int]]]]:
        """Compares the artifact in a build folder with its export; returns prompts and our continuations, too."""
        exported, count = load_record(top / "export.json", Exported), self.options.new_tokens
        blocks = load_arrays(load_record(top.parent / "tokenize.json", Corpus).split("test").arrays)["tokens"]
        pieces = blocks[:, : blocks.shape[1] // PROMPT_TOKENS * PROMPT_TOKENS].reshape(-1, PROMPT_TOKENS)
        step = max(1, len(pieces) // self.options.prompts)
        prompts = [piece.tolist() for piece in pieces[::step][: self.options.prompts]]
        (artifact,) = top.glob("*.coldpress")
        with Session(artifact) as session:
            ends = session.artifact.manifest.model.eos_token_ids
            engine, codec = LlamaCpp(exported.file, session.plan.context_length), TextCodec(session.artifact)
            texts_equal = sum(engine.tokenize(text) == codec.encode(text) for text in TEXTS)
            pairs = [(engine.generate(prompt, count)[0], ours(session, prompt, count)[0]) for prompt in prompts]
            ratio = speed_ratio(session, engine, prompts[:num_timed], count, self.options.rounds)
        texts = [[[token for token in ids if token not in ends] for ids in pair] for pair in pairs]
        differences = [first_difference(found, expected) for found, expected in texts]
        row: Row = {
            "continuations": len(prompts),
            "equal": differences.count(None),
            "first_difference": min((place for place in differences if place is not None), default=None),
            "texts": len(TEXTS),
            "texts_equal": texts_equal,
            "speed_ratio": ratio,
            "rounded": len(exported.rounded),
        }
        return row, [(prompt, mine) for prompt, (_, mine) in zip(prompts, pairs, strict=True)]


def equal_tensors(file: Path, exported: Path) -> tuple[int, int]:
    """Returns (tensors of a GGUF file that another has in the same type and bytes, all tensors)."""
    from gguf import GGUFReader

    there = {one.name: one for one in GGUFReader(exported).tensors}
    mine = [(one, there.get(one.name)) for one in GGUFReader(file).tensors]
    same = (
        other is not None and one.tensor_type == other.tensor_type and np.array_equal(one.data, other.data)
        for one, other in mine
    )
    return sum(same), len(mine)


def num_likeliest(file: Path, texts: Sequence[tuple[Sequence[int], Sequence[int]]]) -> int:
    """Returns how many continuations have only tokens that transformers' model of a file finds the likeliest."""
    import torch

    model, found = load_hf(file), 0
    for prompt, continuation in texts:
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *continuation]])).logits[0]
        likeliest = logits[len(prompt) - 1 : -1].argmax(dim=-1).tolist()
        found += likeliest == list(continuation)
    return found


def ours(session: Session, prompt: Sequence[int], num_tokens: int) -> tuple[list[int], float]:
    """Decodes with our runtime; see `LlamaCpp.generate`."""
    done = session.generate(prompt, num_tokens)
    return list(done.token_ids), done.metrics.num_tokens / max(done.metrics.decode_s, 1e-9)


def first_difference(found: Sequence[int], expected: Sequence[int]) -> int | None:
    """Returns the first place at which two continuations differ; None if they are equal."""
    pairs = [a == b for a, b in zip(found, expected, strict=False)]
    return None if list(found) == list(expected) else (pairs.index(False) if False in pairs else len(pairs))


def speed_ratio(
    session: Session, engine: LlamaCpp, prompts: Sequence[Sequence[int]], num_tokens: int, rounds: int
) -> Gain:
    """Returns how many times faster ours decodes; in every round both take each prompt in turn."""
    ours_s, theirs_s = list[float](), list[float]()
    for _ in range(rounds):
        pairs = [(ours(session, one, num_tokens)[1], engine.generate(one, num_tokens)[1]) for one in prompts]
        ours_s.append(1 / median(mine for mine, _ in pairs))
        theirs_s.append(1 / median(theirs for _, theirs in pairs))
    return gain(theirs_s, ours_s)


if __name__ == "__main__":
    main("llama_cpp")
