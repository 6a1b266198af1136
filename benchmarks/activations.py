"""Measures what rounding the inputs of products costs in perplexity and gains in speed, by activation format.

Each model's weights are rounded to nearest and packed with the dense selector; the run keeps the whole model in DRAM.
Test tokens are scored one by one, as in decoding, with float32, 16-bit and 8-bit activations on one thread. Each block
is scored in every format in turn.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Benchmark, Cell, Row, gain, main, option, spread
from benchmarks.harness.places import data
from benchmarks.shared.cases import BLOCK_TOKENS, CORPORA, blocks_of
from coldpress.compiler.block_statistics import standard_error
from coldpress.runtime import _native
from coldpress.runtime.artifact.reader import open_artifact
from coldpress.runtime.dram.budget import choose_plan, fixed_bytes
from coldpress.runtime.generate.session import Session
from coldpress.runtime.kernels.activations import ACTIVATIONS
from tests.support.artifacts import Recipe, build_artifact
from tests.support.hf import load_hf, roles_of, spec_of

MODELS = ("prose7m", "stories260k", "tinystories656k")


def token_blocks(model: str, num_tokens: int) -> np.ndarray:
    """Returns the model's test text as token ids, int [blocks, BLOCK_TOKENS]."""
    return blocks_of(data() / "models" / model, data() / "corpora" / CORPORA[model])["test"][
        : num_tokens // BLOCK_TOKENS
    ]


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
        ("prose7m",), smoke=("stories260k",), full=MODELS, choices=MODELS, help="real models to score"
    )
    formats: tuple[str, ...] = option(("int4_group32", "int8_group32"), smoke=("int4_group32",), help="weight formats")
    tokens: int = option(4096, smoke=512, help="most test tokens to run; each block of 256 is one round of the timing")


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
    over = {"model": "models", "format": "formats"}
    full_minutes = 10

    def measure(self, cell: Cell) -> Iterator[Row]:
        """Yields a row per activation format."""
        _native.set_num_threads(1)
        loaded = load_hf(data() / "models" / cell["model"])
        spec = spec_of(loaded.config)
        recipe = Recipe(spec=spec, method="dense", format=cell["format"], context_length=BLOCK_TOKENS)
        path = build_artifact(self.folder / "-".join(cell.values()), recipe, roles_of(loaded, spec)).path
        rows, seconds = scored(path, token_blocks(cell["model"], self.options.tokens), "activations", ACTIVATIONS)
        for row in rows:
            token_s = seconds[row["activations"]]
            yield row | {"token_s": spread(token_s), "speedup": gain(seconds["fp32"], token_s)}


if __name__ == "__main__":
    main("activations")
