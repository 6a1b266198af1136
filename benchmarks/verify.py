"""Measures the share of a build's time that `verify` takes, and compares its passes of many tokens with single tokens.

Snakemake builds planted checkpoints with this repository's rules on two cores and the default number of calibration
tokens; every job notes its seconds (benchmarks/compile.py). `verify` decodes as much of the default test text as its
own rule takes for the whole shape. The share is of the sum of the stages' seconds, and once more of their processor
seconds, which a busy machine changes less. A straight line through two builds of few layers gives each stage's seconds
for all layers, since `verify` pays for the head, imports and the sample once, whatever the layers. From a single build,
all seconds are scaled with the layers.

Then the last artifact decodes the beginning of the test text twice, one token after the other in one run, and in passes
as `verify` does. The row has the seconds of each, and the largest differences of blocks' nats and of tokens'
distributions.

`--smoke` builds a small model, and forks its jobs from a process that has imported the libraries.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import log_softmax, rel_entr

from benchmarks.compile import Stage, built, measure_disk, stages
from benchmarks.harness import Benchmark, Cell, Figures, Row, Rows, main, option
from benchmarks.shared.builds import artifact_in
from coldpress.compiler.io import load_arrays, load_record
from coldpress.compiler.stages.tokenize import TokenizeConfig
from coldpress.compiler.stages.verify import VerifyConfig, num_measured
from coldpress.runtime.decoder.decoder import PREFILL_CHUNK_TOKENS
from coldpress.runtime.generate.session import Session
from coldpress.schemas.corpus import Corpus

DEFAULTS = TokenizeConfig(corpus="corpus.jsonl")
PARAMETERS = {"tinyllama-1.1b": 1_100_000_000, "mistral-7b": 7_241_000_000, "small": 12_000_000}
WHOLE_LAYERS = {"tinyllama-1.1b": 22, "mistral-7b": 4, "small": 2}
"""Shape -> layers to extrapolate to: all of the 1.1B, four of the 7B."""


@dataclass(frozen=True)
class Options:
    shapes: tuple[str, ...] = option(
        ("tinyllama-1.1b",),
        smoke=("small",),
        full=("tinyllama-1.1b", "mistral-7b"),
        choices=PARAMETERS,
        help="shape of the model",
    )
    layers: tuple[int, ...] = option(
        (1, 2), smoke=(2,), full=(22,), help="layers of each build, at most those that are extrapolated to"
    )
    tokens: int = option(DEFAULTS.calibration_tokens, smoke=512, help="calibration tokens")
    method: str = option("topk", help="selector; one that sees what is in DRAM decodes no tokens together")
    compared: int = option(128, smoke=64, full=512, help="tokens that are decoded both ways")
    warm: bool = option(False, smoke=True, help="fork the jobs, without imports in the time, and score on less text")


class Plugin(Benchmark[Options]):
    keys = {
        "rows[].layers": "layers of each build",
        "rows[].test_tokens": "tokens that verify decoded",
        "rows[].stages_s": "seconds of all jobs of each build, summed",
        "rows[].verify_s": "those of verify",
        "rows[].stages_whole_s": "seconds of all jobs for whole_layers, extrapolated",
        "rows[].share": "verify's share of the last build's seconds",
        "rows[].share_whole": "the same for whole_layers, extrapolated",
        "rows[].share_cpu": "verify's share of the last build's processor seconds",
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
        shape, whole = cell["shape"], WHOLE_LAYERS[cell["shape"]]
        layers = sorted({min(count, whole) for count in self.options.layers})
        blocks = 2
        if shape != "small":
            most = DEFAULTS.evaluation_tokens // DEFAULTS.block_tokens
            blocks = min(most, num_measured(VerifyConfig(), DEFAULTS.block_tokens, PARAMETERS[shape]))
        builds = [self._build(shape, count, blocks * DEFAULTS.block_tokens) for count in layers]
        wall_s, cpu_s = (
            [{name: getattr(stage, kind) for name, stage in found.items()} for _, found in builds]
            for kind in ("wall_s", "cpu_s")
        )
        whole_s, whole_cpu_s = (extrapolated(layers, each, whole) for each in (wall_s, cpu_s))
        yield {
            "layers": layers,
            "test_tokens": blocks * DEFAULTS.block_tokens,
            "stages_s": [sum(each.values()) for each in wall_s],
            "verify_s": [each["verify"] for each in wall_s],
            "stages_whole_s": sum(whole_s.values()),
            "share": share_of_verify(wall_s[-1]),
            "share_whole": share_of_verify(whole_s),
            "share_cpu": share_of_verify(cpu_s[-1]),
            "share_cpu_whole": share_of_verify(whole_cpu_s),
            "whole_layers": whole,
            **self._both_ways(builds[-1][0]),
        }

    def _build(self, shape: str, layers: int, test_tokens: int) -> tuple[Path, Mapping[str, Stage]]:
        """Builds a shape with `layers` layers; returns the device's build folder and the seconds of its stages."""
        options, folder = self.options, self.folder / f"{shape}-{layers}"
        evaluation_tokens = max(test_tokens, 512 if options.warm else DEFAULTS.evaluation_tokens)
        config: dict[str, Any] = {"device": "pixel6", "calibration_tokens": options.tokens, "method": options.method}
        config |= {"evaluation_tokens": evaluation_tokens, "test_tokens": test_tokens}
        config |= {"dram_budget": "95%" if options.warm else "80%"}
        text = 4 * options.tokens + 4 * evaluation_tokens + 40960
        target, _ = built(folder, shape, layers, text, options.warm, **config)
        return target, stages(folder, measure_disk(folder, 32 << 20))

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


def extrapolated(layers: Sequence[int], builds: Sequence[Mapping[str, float]], whole: int) -> dict[str, float]:
    """Returns the seconds of each stage for `whole` layers: on the straight line through the builds with the fewest and
    the most layers, or from a single build in proportion to its layers."""
    if len(layers) == 1:
        return {name: seconds * whole / layers[0] for name, seconds in builds[0].items()}
    steps = (whole - layers[-1]) / (layers[-1] - layers[0])
    # a stage cannot take less time for more layers: where it did, other work on the machine had its turn
    return {name: most + steps * max(0.0, most - builds[0][name]) for name, most in builds[-1].items()}


def share_of_verify(seconds: Mapping[str, float]) -> float:
    """Returns verify's share of all stages' seconds."""
    return seconds["verify"] / sum(seconds.values())


if __name__ == "__main__":
    main("verify")
