"""What an int8 KV cache costs and gains: perplexity of real models, and attention's time over long contexts.

`python -m benchmarks.kv_cache [--models prose7m …] [--tokens N] [--rounds N]`. Quality as in
benchmarks/activations.py: weights in fp16 with everything in DRAM, so that the cache alone differs, test tokens
scored one by one, in turns over blocks. Time is that of one query position of 7B heads (32 heads of 128 over 8 or 32
key heads), with 256 MB streamed between calls, so that keys and values come from memory, as they do between layers.
The last line is {quality: [{model, kv_cache, ppl, over_fp16, over_fp16_error}], attention: [{positions, key_heads,
fp16_us, int8_us, int8_over_fp16}], encode_us: {native, numpy}}: what rounding a token's keys and values of a layer
takes, 8 key heads.
"""

import argparse
import math
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.activations import CONTEXT_LENGTH, MODELS, everything, folder_of_data, token_blocks
from benchmarks.shared.report import finish, show
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
POSITIONS = (512, 1024, 2048, 4096)
STREAM_BYTES = 256 << 20


def quality(model: str, num_tokens: int) -> list[dict[str, Any]]:
    """A row for each format of the cache."""
    loaded = load_hf(folder_of_data() / "models" / model)
    spec, blocks = spec_of(loaded.config), token_blocks(model, num_tokens)
    with tempfile.TemporaryDirectory(dir=".") as folder:
        recipe = Recipe(spec=spec, method="dense", format="fp16", context_length=CONTEXT_LENGTH)
        path = build_artifact(Path(folder) / "a.coldpress", recipe, roles_of(loaded, spec)).path
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
        rows.append({"model": model, "kv_cache": kind, "tokens": blocks.size, **figures})
        rows[-1]["over_fp16_error"] = standard_error(more)
    return rows


def median_s(call: Callable[[], object], words: np.ndarray, rounds: int) -> float:
    """Seconds of a call whose operands are not in any cache."""
    seconds = []
    for _ in range(rounds):
        _native.read_through(words)
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return float(np.median(seconds))


def attended(key_heads: int, positions: int, words: np.ndarray, rounds: int) -> dict[str, Any]:
    """A row: one query position over so many."""
    random = np.random.default_rng(positions)
    query = random.standard_normal((HEADS, HEAD_DIM)).astype(np.float32)
    floats = [random.standard_normal((positions, key_heads, HEAD_DIM)).astype(np.float32) for _ in "kv"]
    halves = [values.astype(np.float16) for values in floats]
    codes = [
        int8_group32.Plugin().encode(values.reshape(-1, HEAD_DIM)).reshape(positions, key_heads, -1)
        for values in floats
    ]
    fp16_s, int8_s = (
        median_s(lambda k=kept: attention.attend(query, k[0], k[1], positions), words, rounds)
        for kept in (halves, codes)
    )
    figures = {"fp16_us": 1e6 * fp16_s, "int8_us": 1e6 * int8_s, "int8_over_fp16": int8_s / fp16_s}
    return {"positions": positions, "key_heads": key_heads, **figures}


def main() -> None:
    """Prints the tables and the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["prose7m"], choices=list(MODELS), metavar="MODEL")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    words = np.ones(STREAM_BYTES // 8, np.uint64)
    times = [attended(heads, many, words, arguments.rounds) for heads in (8, 32) for many in POSITIONS]
    token = np.random.default_rng(0).standard_normal((1, 8, HEAD_DIM)).astype(np.float32)
    codes = np.empty((1, 8, int8_group32.Plugin().nbytes(HEAD_DIM)), np.uint8)
    encode_us = {
        name: 2e6 * median_s(lambda e=encode: e(token, codes), words, arguments.rounds)
        for name, encode in (("native", encode_heads), ("numpy", reference_encode_heads))
    }
    found = [row for model in arguments.models for row in quality(model, arguments.tokens)]
    show("attention of one position", list(times[0]), [list(row.values()) for row in times])
    show("perplexity", list(found[0]), [list(row.values()) for row in found])
    finish({"quality": found, "attention": times, "encode_us": encode_us})


if __name__ == "__main__":
    main()
