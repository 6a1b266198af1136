"""Measures what an int8 KV cache costs and gains: perplexity of real models, and attention's time over long contexts.

Quality is measured as in benchmarks/activations.py: everything in DRAM, so that only the cache differs; test tokens
scored one by one; each block in every format in turn. Times are of one query position of 7B heads
(32 heads of 128 over 8 or 32 key heads). 256 MB are streamed between calls, so that keys and values come from memory,
as they do between layers.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.activations import built, scored
from benchmarks.harness import Benchmark, Cell, Row, gain, interleaved, main, option, spread
from benchmarks.shared.real_models import MODELS, SMALL
from coldpress.runtime import _native
from coldpress.runtime.dram.kv_cache import KV_CACHE_FORMATS
from coldpress.runtime.kernels import attention
from coldpress.runtime.quantization import int8_group32

HEADS, HEAD_DIM = 32, 128
STREAM_BYTES = 256 << 20


def quality(model: str, num_tokens: int, folder: Path) -> list[Row]:
    """Returns a row for each format of the cache."""
    return scored(*built(model, folder, num_tokens), "kv_cache", KV_CACHE_FORMATS)[0]


@dataclass(frozen=True)
class Options:
    models: tuple[str, ...] = option(
        MODELS[:1], smoke=(SMALL,), full=MODELS, choices=(*MODELS, SMALL), help="quality: models to score"
    )
    tokens: int = option(1024, smoke=512, help="quality: most test tokens to run")
    positions: tuple[int, ...] = option((512, 1024, 2048, 4096), smoke=(64,), help="attention: length of the context")
    rounds: int = option(15, smoke=2, help="attention: timed rounds")


class Plugin(Benchmark[Options]):
    keys = {
        "rows[].part": "quality or attention",
        "rows[].kv_cache?": "quality: format of keys and values",
        "rows[].tokens?": "quality: test tokens that were run, in blocks of 256",
        "rows[].ppl?": "quality: perplexity on the test text",
        "rows[].over_fp16?": "quality: perplexity over that with an fp16 cache",
        "rows[].over_fp16_error?": "quality: standard error over blocks of the logarithm of over_fp16",
        "rows[].key_heads?": "attention: number of key heads",
        "rows[].fp16_s?": "attention: seconds of one query position with an fp16 cache",
        "rows[].int8_s?": "attention: seconds of one query position with an int8 cache",
        "rows[].speedup?": "attention: fp16_s over int8_s, taken in each round",
    }
    is_timing = True
    needs_data = True
    over = (
        {"part": ("quality",), "model": "models"},
        {"part": ("attention",), "key_heads": (8, 32), "positions": "positions"},
    )
    full_minutes = 8

    def measure(self, cell: Cell) -> Iterator[Row]:
        """Yields a row per format of a model, or one row of times."""
        if cell["part"] == "quality":
            yield from quality(cell["model"], self.options.tokens, self.folder / cell["model"])
            return
        words = self.once("stream", lambda: np.ones(STREAM_BYTES // 8, np.uint64))
        works = attention_works(cell["key_heads"], cell["positions"])
        found = interleaved(works, self.options.rounds, before=lambda: _native.read_through(words))
        seconds = {f"{name}_s": spread(samples) for name, samples in found.items()}
        yield seconds | {"speedup": gain(found["fp16"], found["int8"])}


def attention_works(key_heads: int, positions: int) -> dict[str, Callable[[], object]]:
    """Returns the calls of attention for one query over `positions`, with keys and values in each format."""
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


if __name__ == "__main__":
    main("kv_cache")
