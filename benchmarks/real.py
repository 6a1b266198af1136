"""Builds real language models with the defaults, and decodes beside llama.cpp with the same file in the same memory.

Each model is a GGUF file that anyone can have (profiles/models). The product compiles it by its own rules for each
share of the file's size as DRAM budget; stages that do not depend on the budget run once. llama.cpp maps the file. Both
then compute the same text token by token, in turns, each in a process of its own under the kernel's caps of the device.
The cap on the artifact's process is the most that the kernel counted for it without a cap, which is the budget with the
interpreter, its libraries and the page cache of files. That on llama.cpp's process is the budget, which its weights
get, with all that the process keeps beside them. The first text fills caches and is not counted. Quality is the
build's own, on test text.
"""

import os
import statistics
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Benchmark, Cell, Figures, Gain, Row, Rows, gain, main, option
from benchmarks.harness.apart import apart, run_here
from benchmarks.harness.places import ROOT, data
from benchmarks.shared import llama_mmap
from benchmarks.shared.builds import artifact_in
from benchmarks.shared.emulated import apart_under_caps, follow
from benchmarks.shared.memory_group import drop_pages, memory_group
from benchmarks.shared.real_models import MODELS, SHORT, SMALL, file_of, named, stages
from coldpress.compiler.io import load_arrays, load_record
from coldpress.runtime import _native
from coldpress.runtime.generate.session import Session
from coldpress.schemas.corpus import Corpus
from coldpress.schemas.errors import ColdpressError
from coldpress.schemas.metrics import Metrics
from tests.support.pipeline import build

LEAST_BYTES = 10 * llama_mmap.SLACK_BYTES
"""Least budget at which the slack of the caps does not decide a comparison."""
TEXTS = 3
"""Texts of a process; the first one fills the caches."""
OF_THE_BUILD = {
    "method": "selector that auto chose",
    "format": "format that auto chose",
    "artifact_bytes": "bytes of the artifact's files",
    "flash_bytes_per_token": "bytes read from flash per token, by verify",
    "ppl_source": "perplexity of the model in the file on test text",
    "ppl_artifact": "perplexity of the artifact on the same text",
    "modelled_tokens_per_s": "tokens per second that the law gives for the device",
}


@dataclass(frozen=True)
class Options:
    models: tuple[str, ...] = option(MODELS, smoke=(SMALL,), choices=(*MODELS, SMALL), help="models to build")
    shares: tuple[float, ...] = option(
        (0.4, 0.6, 0.8, 1.0), smoke=(1.0,), help="DRAM budgets as shares of the file's bytes"
    )
    device: str = option("pixel6", help="device profile whose caps hold")
    scale: float = option(0.0, smoke=0.3, help="share of the device's rates; 0: as much as the disk gives")
    tokens: int = option(32, smoke=4, full=128, help="tokens of a text")
    rounds: int = option(3, smoke=1, full=5, help="rounds in which both decode")
    short: bool = option(False, smoke=True, help="calibrate and score on less text")
    demo: bool = option(True, smoke=False, help="time make demo in a fresh clone")


class Plugin(Benchmark[Options]):
    keys = {
        "rows[].file_bytes": "bytes of the GGUF file",
        "rows[].budget_bytes": "DRAM budget: the share of the file's bytes",
        "rows[].refused?": "why there is no such build; such a row has no other figure",
        **{f"rows[].{name}?": meaning for name, meaning in OF_THE_BUILD.items()},
        "rows[].stages.*.seconds?": "seconds of a stage's jobs in this build, summed",
        "rows[].stages.*.cpu_s?": "their processor seconds",
        "rows[].stages.*.peak_rss_bytes?": "largest memory of such a job",
        "rows[].limit_bytes?": "cap on the memory of the artifact's process",
        "rows[].llama_limit_bytes?": "cap on that of llama.cpp's: the budget, and what it keeps beside the weights",
        "rows[].scale?": "share of the device's rates",
        "rows[].tokens_per_s?": "tokens per second of the artifact under the caps, the median of rounds",
        "rows[].read_bytes?": "bytes that the artifact reads per token",
        "rows[].llama_tokens_per_s?": "tokens per second of llama.cpp under the device's caps, the median of rounds; "
        "0: it was killed at the cap on memory",
        "rows[].over_llama?": "how many times faster the artifact is, formed in each round",
        "over_llama.*.median?": "median of over_llama at a share, over models whose budget is at least ten times the "
        "slack of a cap",
        "over_llama.*.worst?": "least of over_llama at a share, over the same models",
        "choice_seconds.*": "seconds of explore and allocate together, by model, in the first build",
        "demo_seconds?": "seconds of make demo in a fresh clone",
    }
    is_timing = True
    needs_data = True
    needs_root = True
    extra = "llama: xllamacpp"
    over = {"model": "models", "share": "shares"}
    full_minutes = 90

    def measure(self, cell: Cell) -> Iterator[Row]:
        file = self.once(cell["model"], lambda: file_of(cell["model"], self.folder))
        size_bytes = file.stat().st_size
        row: Row = {"file_bytes": size_bytes, "budget_bytes": int(cell["share"] * size_bytes)}
        started = time.time()
        try:
            device = self._built(cell["model"], file, row["budget_bytes"])
        except RuntimeError as error:
            yield row | {"refused": str(error).strip().splitlines()[-1]}
            return
        metrics = load_record(device / "metrics.json", Metrics)
        row |= {name: getattr(metrics, name) for name in OF_THE_BUILD}
        yield row | {"stages": stages(device, started)} | self._beside_llama(device, file, row["budget_bytes"])

    def _built(self, model: str, file: Path, budget_bytes: int) -> Path:
        """Builds an artifact; returns its device's build folder."""
        config: dict[str, Any] = {"model": file, "device": self.options.device}
        config |= {"corpus": data() / "corpora" / "wikitext-2", "context_length": 512, "dram_budget": budget_bytes}
        return build(self.folder / model, **config, **(SHORT if self.options.short else {}))

    def _beside_llama(self, device: Path, file: Path, budget_bytes: int) -> dict[str, Any]:
        """Returns both engines' speed with the same DRAM for weights."""
        path, texts = artifact_in(device), self._texts(device)
        drop_pages(path)
        with memory_group() as group:
            group.begin()
            apart(self, "decoded", str(path), texts, run=lambda argv: run_here([*group.words, *argv]))
            limit_bytes = group.peak_bytes + llama_mmap.SLACK_BYTES
        llama_limit_bytes = llama_mmap.limit_bytes(budget_bytes, apart(self, "mapped", str(file), texts))
        ours, theirs, scale = list[dict[str, float]](), list[float](), self.options.scale
        for _ in range(self.options.rounds):
            found, caps = self._capped("decoded", scale, limit_bytes, str(path), texts)
            scale = caps.scale  # another look at the disk may find another scale
            ours.append(found)
            with suppress(ColdpressError):  # killed at the cap on memory
                theirs.append(self._capped("mapped", scale, llama_limit_bytes, str(file), texts)[0]["token_s"])
        token_s = [found["token_s"] for found in ours]
        row = {
            "limit_bytes": limit_bytes,
            "llama_limit_bytes": llama_limit_bytes,
            "scale": scale,
            "tokens_per_s": 1 / statistics.median(token_s),
            "read_bytes": statistics.median(found["read_bytes"] for found in ours),
        }
        if len(theirs) < len(ours):
            return row | {"llama_tokens_per_s": 0.0}
        over: Gain = gain(theirs, token_s)
        return row | {"llama_tokens_per_s": 1 / statistics.median(theirs), "over_llama": over}

    def _capped(self, method: str, scale: float, memory_bytes: int, *arguments: Any) -> Any:
        return apart_under_caps(self, method, self.options.device, scale, memory_bytes, *arguments)

    def _texts(self, device: Path) -> list[list[int]]:
        """Returns the beginnings of blocks of test text, int [TEXTS, T]."""
        corpus = load_record(device.parent / "tokenize.json", Corpus)
        blocks = load_arrays(corpus.split("test").arrays, "tokens")["tokens"]
        return blocks[np.linspace(0, len(blocks) - 1, TEXTS).astype(int), : self.options.tokens].tolist()

    def decoded(self, path: str, texts: Sequence[Sequence[int]]) -> dict[str, float]:
        """Decodes the texts, in a process under the caps; returns figures of a token, the first text aside."""
        _native.set_num_threads(os.cpu_count() or 1)
        with Session(path) as session:
            follow(session, texts[0])
            before = asdict(session.store.counters)
            seconds = [found for text in texts[1:] for found in follow(session, text)]
            read_bytes = asdict(session.store.counters)["read_bytes"] - before["read_bytes"]
        return {"token_s": statistics.mean(seconds), "read_bytes": read_bytes / sum(map(len, texts[1:]))}

    def mapped(self, file: str, texts: Sequence[Sequence[int]]) -> dict[str, float]:
        """Computes the texts by llama.cpp, in a process under the caps."""
        return llama_mmap.follow(Path(file), np.array(texts))

    def figures(self, rows: Rows) -> Figures:
        found_at = {
            f"{share:.0%}": [
                row["over_llama"]["median"]
                for row in rows
                if row["share"] == share and "over_llama" in row and row["budget_bytes"] >= LEAST_BYTES
            ]
            for share in self.options.shares
        }
        first = {named(row["model"]): row["stages"] for row in reversed(rows) if "stages" in row}
        chosen = ("explore", "allocate")
        return {
            "over_llama": {
                share: {"median": statistics.median(found), "worst": min(found)}
                for share, found in found_at.items()
                if found
            },
            "choice_seconds": {
                model: sum(stages[name]["seconds"] for name in chosen if name in stages)
                for model, stages in first.items()
            },
            "demo_seconds": self._demo_seconds() if self.options.demo else None,
        }

    def _demo_seconds(self) -> float:
        """Returns the seconds of `make demo` in a fresh clone."""
        clone = self.folder / "clone"
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
        started = time.perf_counter()
        subprocess.run(["make", "demo"], cwd=clone, check=True, stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL)
        return time.perf_counter() - started


if __name__ == "__main__":
    main("real")
