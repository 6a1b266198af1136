"""Compares decoding of a mixture of experts with llama.cpp, which maps the same weights, under the same caps.

The checkpoint has a few layers of a published shape with planted routing (tests/support/planted_mixtures.py) and a
small vocabulary, so that nearly all of it are experts. The product builds an artifact with the dense selector for each
share of the experts' bytes in DRAM, and chooses cache, pinned units and reading ahead; routing is exact. llama.cpp maps
its GGUF export in Q4_0 (benchmarks/shared/llama_mmap.py), which takes the same bytes. Both compute the same texts
token by token, in turn, each in a process of its own under the kernel's caps of the device; memory beside the budget is
measured for llama.cpp and added to its cap. The first text fills the caches and is not counted. Texts are drawn, each
of one topic: what such a model writes by itself soon repeats one token.
"""

import os
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Benchmark, Cell, Figures, Row, Rows, gain, main, option
from benchmarks.shared import llama_mmap
from benchmarks.shared.builds import SHORT, artifact_in, build
from benchmarks.shared.emulated import OTHER_BYTES, apart_under_caps, follow
from benchmarks.shared.mixtures import WORDS, planted, share_budget_bytes
from coldpress.runtime import _native
from coldpress.runtime.generate.session import Session
from tests.support.planted_mixtures import SHAPES

FORMAT, CONTEXT_LENGTH = "int4_group32", llama_mmap.CONTEXT_LENGTH
FIRST_TOKEN, SAME_TOPIC = 3, 64
TEXTS = 4
"""Texts of a process; the first one fills the caches."""


@dataclass(frozen=True)
class Options:
    shapes: tuple[str, ...] = option(
        ("qwen3-30b-a3b",), smoke=("small-moe",), full=tuple(SHAPES), choices=tuple(SHAPES), help="published shapes"
    )
    layers: int = option(2, help="layers of the checkpoint")
    shares: tuple[float, ...] = option(
        (0.25,), full=(0.12, 0.25, 0.5, 0.75), help="shares of the experts' bytes in DRAM"
    )
    device: str = option("pixel6", help="device profile whose caps hold")
    scale: float = option(0.0, smoke=0.3, help="share of the device's rates; 0: as much as the disk gives")
    tokens: int = option(32, smoke=4, full=60, help="tokens of a text")
    rounds: int = option(3, smoke=1, full=5, help="rounds in which both decode")
    llama: bool = option(True, smoke=False, help="compare with llama.cpp")


class Plugin(Benchmark[Options]):
    keys = {
        "rows[].budget_bytes": "DRAM budget",
        "rows[].scale": "share of the device's rates",
        "rows[].token_s": "seconds of a token with the artifact, the median of rounds",
        "rows[].read_bytes": "bytes that the artifact reads per token",
        "rows[].hit_rate": "share of the used units that were in DRAM",
        "rows[].mmap_token_s?": "seconds of a token with llama.cpp, the median of rounds",
        "rows[].over_mmap?": "how many times faster the artifact is, formed in each round",
        "gain_over_mmap?": "median of over_mmap over rows",
    }
    is_timing = True
    needs_root = True
    extra = "llama: xllamacpp"
    over = {"shape": "shapes", "share": "shares"}
    full_minutes = 90

    def measure(self, cell: Cell) -> Iterator[Row]:
        shape, share, scale = cell["shape"], cell["share"], self.options.scale
        whole = artifact_in(self.once(shape, lambda: self._built(shape, "whole", "100%")))
        budget_bytes = share_budget_bytes(whole, share)
        path = artifact_in(self._built(shape, f"share-{share:g}", budget_bytes, preload="auto"))
        ours, theirs, limit_bytes = list[dict[str, float]](), list[float](), 0
        if self.options.llama:
            llama_mmap.export(path, self._file(shape))
            alone = self._mapped(shape, scale, budget_bytes + llama_mmap.UNCAPPED_BYTES)
            limit_bytes = llama_mmap.limit_bytes(budget_bytes, alone)
        for _ in range(self.options.rounds):
            asked = (self.options.device, scale, budget_bytes + OTHER_BYTES, str(path))
            found, caps = apart_under_caps(self, "decoded", *asked)
            ours.append(found)
            scale = caps.scale  # another look at the disk may find another scale
            if self.options.llama:
                theirs.append(self._mapped(shape, scale, limit_bytes)["token_s"])
        yield {
            "budget_bytes": budget_bytes,
            "scale": scale,
            **{key: statistics.median(found[key] for found in ours) for key in ("token_s", "read_bytes", "hit_rate")},
            "mmap_token_s": statistics.median(theirs) if theirs else None,
            "over_mmap": gain(theirs, [found["token_s"] for found in ours]) if theirs else None,
        }

    def figures(self, rows: Rows) -> Figures:
        gains = [row["over_mmap"]["median"] for row in rows if row["over_mmap"] is not None]
        return {"gain_over_mmap": statistics.median(gains) if gains else None}

    def decoded(self, path: str) -> dict[str, float]:
        """Decodes the texts, in a process under the caps; returns figures of a token, the first text aside."""
        _native.set_num_threads(os.cpu_count() or 1)
        first, *texts = self._texts().tolist()
        with Session(path) as session:
            follow(session, first)
            before = asdict(session.store.counters)
            seconds = [found for text in texts for found in follow(session, text)]
            after = asdict(session.store.counters)
        count = len(texts) * len(first)
        read_bytes, hits, misses = (after[name] - before[name] for name in ("read_bytes", "hits", "misses"))
        return {
            "token_s": statistics.mean(seconds),
            "read_bytes": read_bytes / count,
            "hit_rate": hits / max(1, hits + misses),
        }

    def mapped(self, file: str) -> dict[str, float]:
        """Computes the texts by llama.cpp, in a process under the caps; returns its speed and its own memory."""
        return llama_mmap.follow(Path(file), self._texts())

    def _mapped(self, shape: str, scale: float, memory_bytes: int) -> dict[str, float]:
        asked = (self.options.device, scale, memory_bytes, str(self._file(shape)))
        return apart_under_caps(self, "mapped", *asked)[0]

    def _texts(self) -> np.ndarray:
        """Returns texts, int [TEXTS, T], each of the words of one topic."""
        words = np.random.default_rng(0).integers(1, WORDS // SAME_TOPIC, (TEXTS, self.options.tokens))
        return FIRST_TOKEN + np.arange(TEXTS)[:, None] + SAME_TOPIC * words

    def _built(self, shape: str, label: str, budget: str | int, **more: Any) -> Path:
        """Builds an artifact; returns its device's build folder."""
        folder = self.folder / shape
        config: dict[str, Any] = planted(folder / "checkpoint", shape, self.options.layers)
        config |= {"device": self.options.device, "context_length": CONTEXT_LENGTH}
        config |= {**SHORT, "method": "dense", "format": FORMAT, "cache": "auto"}
        return build(folder, **config, max_ppl_ratio="off", dram_budget=budget, label=label.replace(".", "_"), **more)

    def _file(self, shape: str) -> Path:
        return self.folder / shape / "weights.gguf"


if __name__ == "__main__":
    main("moe_mmap")
