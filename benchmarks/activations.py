"""Measures what rounding the inputs of products costs real models in perplexity and gains in speed.

Each model is built dense from its file, with the file's own codes (`prose7m` of the smoke run in int4), and runs with
all of it in DRAM. Test tokens are scored one by one, as in decoding, with float32, 16-bit and 8-bit activations. Each
block is scored in every format in turn.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Benchmark, Cell, Row, gain, main, option, spread
from benchmarks.harness.places import data
from benchmarks.shared.cases import BLOCK_TOKENS, blocks_of
from benchmarks.shared.real_models import MODELS, SHORT, SMALL, file_of
from coldpress.compiler.block_statistics import standard_error
from coldpress.runtime.artifact.reader import open_artifact
from coldpress.runtime.dram.budget import choose_plan, fixed_bytes
from coldpress.runtime.generate.session import Session
from coldpress.runtime.kernels.activations import ACTIVATIONS
from tests.support.warm import build


def built(model: str, folder: Path, num_tokens: int) -> tuple[Path, np.ndarray]:
    """Builds a dense artifact of a model's file, and returns it with test text, int [blocks, BLOCK_TOKENS]."""
    corpus = data() / "corpora" / "wikitext-2"
    config: dict[str, Any] = SHORT | ({"format": "int4_group32"} if model == SMALL else {})
    config |= {"model": file_of(model, folder, build), "corpus": corpus, "dram_budget": "100%"}
    (path,) = build(folder, "--until", "publish", context_length=BLOCK_TOKENS, **config).glob("*.coldpress")
    return path, blocks_of(path / "tokenizer", corpus)["test"][: num_tokens // BLOCK_TOKENS]


def scored(path: Path, blocks: np.ndarray, key: str, kinds: Sequence[str]) -> tuple[list[Row], dict[str, list[float]]]:
    """Returns a row for each of `kinds`, the values of the session's `key`, and the seconds of a token in each block.
    All kinds are compared with the first one."""
    nll: dict[str, list[float]] = {kind: [] for kind in kinds}
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    sessions: dict[str, Session] = {}
    for kind in kinds:
        asked: dict[str, Any] = {key: kind, "dram_budget_bytes": everything(path)}
        sessions[kind] = Session(path, **asked)
    for block in blocks:
        for kind, session in sessions.items():
            found = session.perplexity(block[None], sparse=True)
            nll[kind] += found.block_nll
            seconds[kind].append(found.metrics.decode_s / found.metrics.num_tokens)
    rows: list[Row] = []
    for kind in kinds:
        more, over = np.array(nll[kind]) - np.array(nll[kinds[0]]), f"over_{kinds[0]}"
        figures = {"ppl": math.exp(np.mean(nll[kind])), over: math.exp(more.mean())}
        rows.append({key: kind, "tokens": blocks.size, **figures, f"{over}_error": standard_error(more)})
    return rows, seconds


def everything(path: Path) -> int:
    """Returns the DRAM budget, in bytes, with which no unit is read twice."""
    manifest = open_artifact(path).manifest
    return fixed_bytes(manifest, choose_plan(manifest)) + manifest.flash.size_bytes


@dataclass(frozen=True)
class Options:
    models: tuple[str, ...] = option(
        MODELS[:2], smoke=(SMALL,), full=MODELS, choices=(*MODELS, SMALL), help="models to score"
    )
    tokens: int = option(1024, smoke=512, help="most test tokens to run; each block of 256 is one round of the timing")


class Plugin(Benchmark[Options]):
    keys = {
        "rows[].activations": "format to which the inputs of products are rounded",
        "rows[].tokens": "test tokens that were run, in blocks of 256",
        "rows[].ppl": "perplexity on the test text",
        "rows[].over_fp32": "perplexity over that with fp32 activations",
        "rows[].over_fp32_error": "standard error over blocks of the logarithm of over_fp32",
        "rows[].token_s": "seconds per decoded token, over the blocks",
        "rows[].speedup": "seconds per token with fp32 activations over those with this format, taken in each block",
    }
    is_timing = True
    needs_data = True
    over = {"model": "models"}
    full_minutes = 30

    def measure(self, cell: Cell) -> Iterator[Row]:
        """Yields a row per activation format."""
        path, blocks = built(cell["model"], self.folder / cell["model"], self.options.tokens)
        rows, seconds = scored(path, blocks, "activations", ACTIVATIONS)
        for row in rows:
            token_s = seconds[row["activations"]]
            yield row | {"token_s": spread(token_s), "speedup": gain(seconds["fp32"], token_s)}


if __name__ == "__main__":
    main("activations")
