"""What an int8 KV cache costs and gains: perplexity of real models, and attention's time over long contexts.

Quality as in benchmarks/activations.py: weights in fp16 with everything in DRAM, so that only the cache differs; test
tokens scored one by one, in turns over blocks. Time is that of one query position of 7B heads (32 heads of 128 over 8
or 32 key heads), with 256 MB streamed between calls, so that keys and values come from memory, as they do between
layers; and of rounding one token's keys and values of a layer, 8 key heads.
"""

import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.activations import CONTEXT_LENGTH, MODELS, everything, folder_of_data, token_blocks
from benchmarks.harness.benchmark import Benchmark, Cell, Row, option
from benchmarks.harness.command import main
from benchmarks.harness.timing import gain, spread
from coldpress.compiler.block_statistics import standard_error
from coldpress.runtime import _native
from coldpress.runtime.generate.session import Session
from coldpress.runtime.kernels import attention
from coldpress.runtime.kernels.encode import encode_heads, reference_encode_heads
from coldpress.runtime.plan.kv_cache import KV_CACHE_FORMATS
from coldpress.runtime.quantization import int8_group32
from tests.support.artifacts import Recipe, build_artifact
from tests.support.hf import load_hf, roles_of, spec_of

HEADS, HEAD_DIM = 32, 128
STREAM_BYTES = 256 << 20


def quality(model: str, num_tokens: int, folder: Path) -> list[dict[str, Any]]:
    """A row for each format of the cache."""
    loaded = load_hf(folder_of_data() / "models" / model)
    spec, blocks = spec_of(loaded.config), token_blocks(model, num_tokens)
    recipe = Recipe(spec=spec, method="dense", format="fp16", context_length=CONTEXT_LENGTH)
    path = build_artifact(folder / "a.coldpress", recipe, roles_of(loaded, spec)).path
    budget = everything(path)
    sessions = {kind: Session(path, dram_budget_bytes=budget, kv_cache=kind) for kind in KV_CACHE_FORMATS}
    nll: dict[str, list[float]] = {kind: [] for kind in KV_CACHE_FORMATS}
    for block in blocks:
        for kind, session in sessions.items():
            nll[kind] += session.perplexity(block[None], sparse=True).block_nll
    rows = []
    for kind in KV_CACHE_FORMATS:
        more = np.array(nll[kind]) - np.array(nll["fp16"])
        figures = {"ppl": math.exp(np.mean(nll[kind])), "over_fp16": math.exp(more.mean())}
        rows.append({"kv_cache": kind, "tokens": blocks.size, **figures})
        rows[-1]["over_fp16_error"] = standard_error(more)
    return rows


@dataclass(frozen=True)
class Options:
    """What is scored and timed."""

    models: tuple[str, ...] = option(("prose7m",), choices=MODELS, help="real models, with heads of 32 values or more")
    tokens: int = option(4096, smoke=256, help="test tokens, at most")
    positions: tuple[int, ...] = option((512, 1024, 2048, 4096), smoke=(64,), help="positions of the context")
    rounds: int = option(15, smoke=2, help="rounds of the timings")


class Plugin(Benchmark[Options]):
    """Scores models and times attention in both formats."""

    keys = {
        "rows[].part": "quality, attention or encode",
        "rows[].model?": "quality: real model",
        "rows[].kv_cache?": "quality: format of the cache",
        "rows[].tokens?": "quality: tokens that were scored",
        "rows[].ppl?": "quality: perplexity",
        "rows[].over_fp16?": "quality: perplexity over that of fp16",
        "rows[].over_fp16_error?": "quality: standard error of its logarithm over blocks",
        "rows[].key_heads?": "attention: key heads",
        "rows[].positions?": "attention: positions of the context",
        "rows[].fp16_s?": "attention: seconds of a query position with fp16",
        "rows[].int8_s?": "attention: seconds with int8",
        "rows[].speedup?": "attention: fp16's seconds over int8's, formed in each round",
        "rows[].native_s?": "encode: seconds of rounding a token's keys and values in the core",
        "rows[].numpy_s?": "encode: seconds of the numpy reference",
    }
    is_timing = True
    needs_data = True
    full_minutes = 8

    def cells(self) -> Iterator[Cell]:
        """A cell per model, and per context and number of key heads."""
        for model in self.options.models:
            yield {"part": "quality", "model": model}
        for key_heads, positions in itertools.product((8, 32), self.options.positions):
            yield {"part": "attention", "key_heads": key_heads, "positions": positions}
        yield {"part": "encode"}

    def measure(self, cell: Cell) -> Iterator[Row]:
        """A row per format of a model, or one row of times."""
        if cell["part"] == "quality":
            yield from quality(cell["model"], self.options.tokens, self.folder / cell["model"])
            return
        words = self.once("stream", lambda: np.ones(STREAM_BYTES // 8, np.uint64))
        works = attention_works(cell["key_heads"], cell["positions"]) if cell["part"] == "attention" else encode_works()
        found = rounds_s(works, words, self.options.rounds)
        yield {f"{name}_s": spread(samples) for name, samples in found.items()} | (
            {"speedup": gain(found["fp16"], found["int8"])} if cell["part"] == "attention" else {}
        )


def rounds_s(works: Mapping[str, Callable[[], object]], words: np.ndarray, rounds: int) -> dict[str, list[float]]:
    """Seconds of each work in every round; its operands are in no cache."""
    found: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            _native.read_through(words)
            start_s = time.perf_counter()
            work()
            found[name].append(time.perf_counter() - start_s)
    return found


def attention_works(key_heads: int, positions: int) -> dict[str, Callable[[], object]]:
    """One query position over so many, with keys and values in each format."""
    random = np.random.default_rng(positions)
    query = random.standard_normal((HEADS, HEAD_DIM)).astype(np.float32)
    floats = [random.standard_normal((positions, key_heads, HEAD_DIM)).astype(np.float32) for _ in "kv"]
    halves = [values.astype(np.float16) for values in floats]
    codes = [
        int8_group32.Plugin().encode(values.reshape(-1, HEAD_DIM)).reshape(positions, key_heads, -1)
        for values in floats
    ]
    return {
        name: lambda kept=kept: attention.attend(query, kept[0], kept[1], positions)
        for name, kept in (("fp16", halves), ("int8", codes))
    }


def encode_works() -> dict[str, Callable[[], object]]:
    """Rounding keys and values of one token of a layer."""
    token = np.random.default_rng(0).standard_normal((2, 8, HEAD_DIM)).astype(np.float32)
    codes = np.empty((2, 8, int8_group32.Plugin().nbytes(HEAD_DIM)), np.uint8)
    return {
        name: lambda encode=encode: encode(token, codes)
        for name, encode in (("native", encode_heads), ("numpy", reference_encode_heads))
    }


if __name__ == "__main__":
    main("kv_cache")
