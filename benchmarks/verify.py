"""The share of a build's time that `verify` takes, and whether its passes of many tokens give what one by one gives.

Planted checkpoints are built by snakemake with this repository's rules on two cores; every job notes what it took
(benchmarks/compile.py). As much test text is decoded as `verify` takes for the whole shape by its own rule. The share
is of the sum of the stages' seconds, and once more of their processor seconds, which a busy machine changes less. A
build of a few layers is extrapolated to all of the shape's: stages that benchmarks/compile.py counts once stay as they
are, the others grow with the layers. All of `verify`, its head too, is scaled by the layers, so that its share is an
upper bound.

Then the finished artifact decodes the beginning of the test text twice, one token after the other in one run, and in
passes as `verify` does: seconds of each, and the largest differences of blocks' nats and of tokens' distributions.

`--smoke` builds a small model, and forks its jobs from a process that has imported the libraries.
"""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import log_softmax, rel_entr

from benchmarks.compile import CONTEXT_LENGTH, SHARED, built, measure_disk, stages
from benchmarks.harness import Benchmark, Cell, Figures, Row, Rows, main, option
from benchmarks.shared.builds import artifact_in
from coldpress.compiler.io import load_arrays, load_record
from coldpress.compiler.stages.verify import VerifyConfig, num_measured
from coldpress.runtime.decoder.decoder import PREFILL_CHUNK_TOKENS
from coldpress.runtime.generate.session import Session
from coldpress.schemas.corpus import Corpus

PARAMETERS = {"tinyllama-1.1b": 1_100_000_000, "mistral-7b": 7_241_000_000, "small": 12_000_000}
WHOLE_LAYERS = {"tinyllama-1.1b": 22, "mistral-7b": 4, "small": 12}
"""Layers that are extrapolated to: all of the 1.1B, four of the 7B."""


@dataclass(frozen=True)
class Options:
    shapes: tuple[str, ...] = option(
        ("tinyllama-1.1b", "mistral-7b"), smoke=("small",), choices=PARAMETERS, help="shapes of the models"
    )
    layers: int = option(1, smoke=2, full=22, help="layers that are built, at most those that are extrapolated to")
    tokens: int = option(1024, smoke=512, full=8192, help="calibration tokens")
    method: str = option("topk", help="selector; one that sees what is in DRAM decodes no tokens together")
    compared: int = option(128, smoke=64, full=512, help="tokens that are decoded both ways")
    warm: bool = option(False, smoke=True, help="fork the jobs, without imports in the time, and score on less text")


class Plugin(Benchmark[Options]):
    keys = {
        "rows[].layers": "layers that were built",
        "rows[].test_tokens": "tokens that verify decoded",
        "rows[].stages_s": "seconds of all jobs of the build, summed",
        "rows[].verify_s": "those of verify",
        "rows[].share": "verify's share of them",
        "rows[].share_whole": "the same for whole_layers, extrapolated",
        "rows[].share_cpu": "verify's share of the processor seconds",
        "rows[].share_cpu_whole": "the same for whole_layers, extrapolated",
        "rows[].whole_layers": "layers that are extrapolated to",
        "rows[].one_by_one_s": "seconds of the compared tokens, one after the other",
        "rows[].in_passes_s": "the same tokens in passes",
        "rows[].largest_nll_change": "the largest relative difference of a block's nats between both ways",
        "rows[].largest_kld": "the largest divergence of a token's distribution between both ways, nats",
        "worst_share": "the largest share_whole",
    }
    is_timing = True
    over = {"shape": "shapes"}
    full_minutes = 90

    def measure(self, cell: Cell) -> Iterator[Row]:
        options, shape = self.options, cell["shape"]
        layers = min(options.layers, WHOLE_LAYERS[shape])
        folder = self.folder / shape
        blocks = num_measured(VerifyConfig(), CONTEXT_LENGTH, PARAMETERS[shape]) if shape != "small" else 2
        num_tokens = blocks * CONTEXT_LENGTH
        config: dict[str, Any] = {"device": "pixel6", "calibration_tokens": options.tokens, "method": options.method}
        config |= {"evaluation_tokens": max(512, num_tokens), "test_tokens": num_tokens}
        config |= {"dram_budget": "95%" if options.warm else "80%"}
        text = 4 * options.tokens + 4 * num_tokens + 40960
        target, _ = built(folder, shape, layers, text, options.warm, **config)
        found = stages(folder, measure_disk(folder, 32 << 20))
        wall_s, cpu_s = ({name: getattr(stage, kind) for name, stage in found.items()} for kind in ("wall_s", "cpu_s"))
        factor = WHOLE_LAYERS[shape] / layers
        yield {
            "layers": layers,
            "test_tokens": num_tokens,
            "stages_s": sum(wall_s.values()),
            "verify_s": wall_s["verify"],
            "share": share_of_verify(wall_s, 1),
            "share_whole": share_of_verify(wall_s, factor),
            "share_cpu": share_of_verify(cpu_s, 1),
            "share_cpu_whole": share_of_verify(cpu_s, factor),
            "whole_layers": WHOLE_LAYERS[shape],
            **self._both_ways(target),
        }

    def _both_ways(self, target: Path) -> dict[str, float]:
        """Decodes the first test block one token after the other, and in passes."""
        corpus = load_record(target.parent / "tokenize.json", Corpus)
        block = load_arrays(corpus.split("test").arrays, "tokens")["tokens"][:1, : self.options.compared]
        seconds, nll, logits = [], [], []
        for tokens_per_pass in (1, PREFILL_CHUNK_TOKENS):
            rows: list[np.ndarray] = []
            with Session(artifact_in(target)) as session:
                start_s = time.perf_counter()
                found = session.perplexity(block, sparse=True, tokens_per_pass=tokens_per_pass, on_logits=rows.append)
                seconds.append(time.perf_counter() - start_s)
            nll.append(found.block_nll[0])
            logits.append(log_softmax(np.concatenate(rows).astype(np.float64), axis=1))
        kld = rel_entr(np.exp(logits[0]), np.exp(logits[1])).sum(axis=1)
        return {
            "one_by_one_s": seconds[0],
            "in_passes_s": seconds[1],
            "largest_nll_change": abs(nll[1] / nll[0] - 1),
            "largest_kld": float(kld.max()),
        }

    def figures(self, rows: Rows) -> Figures:
        return {"worst_share": max(row["share_whole"] for row in rows)}


def share_of_verify(seconds: Mapping[str, float], factor: float) -> float:
    """Returns verify's share of all stages' seconds, where a model has `factor` times as many layers."""
    whole = {name: each * (1 if name in SHARED else factor) for name, each in seconds.items()}
    return whole["verify"] / sum(whole.values())


if __name__ == "__main__":
    main("verify")
