"""Measures the share of a build's time that `verify` takes, and compares its passes of many tokens with single tokens.

Snakemake builds planted checkpoints with this repository's rules on two cores and the default number of calibration
tokens; every job notes its seconds (benchmarks/compile.py). `verify` decodes as much of the default test text as its
own rule takes for the whole shape.

Processor seconds, which a busy machine changes less than time, are extrapolated to all layers: each stage on the line
of least squares through its builds, since `verify` pays for the head, imports and the sample once, whatever the layers.
From builds of one size, all seconds are scaled with the layers. A stage's time is its processor seconds over the cores
that it used in the largest build; stages of one job for each chunk of layers count by half, since two run at a time.
Errors of the shares follow from the noise, if the lines are straight; `--full` extrapolates nothing.

Then the last artifact decodes the beginning of the test text twice: one token after the other, and in passes as
`verify` does. `--smoke` builds a small model, and forks its jobs from a process that has imported the libraries.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import log_softmax, rel_entr

from benchmarks.compile import CORES, IN_CHUNKS, SHARED, Stage, built, measure_disk, stages
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
        (1, 4), smoke=(1,), full=(22,), help="layers of each build, at most those that are extrapolated to"
    )
    tokens: int = option(DEFAULTS.calibration_tokens, smoke=256, help="calibration tokens")
    method: str = option("topk", help="selector; one that sees what is in DRAM decodes no tokens together")
    compared: int = option(128, smoke=32, full=512, help="tokens that are decoded both ways")
    warm: bool = option(False, smoke=True, help="fork the jobs, without imports in the time, and score on less text")


class Plugin(Benchmark[Options]):
    keys = {
        "rows[].layers": "layers of each build",
        "rows[].test_tokens": "tokens that verify decoded in each build",
        "rows[].stages_s": "seconds of all jobs of each build, summed",
        "rows[].stages_cpu_s": "processor seconds of all jobs of each build, summed",
        "rows[].verify_s": "seconds of verify in each build",
        "rows[].verify_cpu_s": "processor seconds of verify in each build",
        "rows[].share": "share of the last build's seconds that verify takes",
        "rows[].share_cpu": "share of the last build's processor seconds that verify takes",
        "rows[].whole_layers": "layers that are extrapolated to",
        "rows[].noise?": "relative standard deviation of a stage's processor seconds; null for one build",
        "rows[].stages_whole_s": "seconds of a build of whole_layers, extrapolated",
        "rows[].verify_whole_s": "seconds of verify in a build of whole_layers, extrapolated",
        "rows[].share_whole": "verify_whole_s over stages_whole_s",
        "rows[].share_whole_error?": "standard error of share_whole, from the noise; null for one build",
        "rows[].share_cpu_whole": "share of the processor seconds of whole_layers that verify takes, extrapolated",
        "rows[].share_cpu_whole_error?": "standard error of share_cpu_whole, from the noise; null for one build",
        "rows[].one_by_one_s": "seconds for the compared tokens, one after the other",
        "rows[].in_passes_s": "seconds for the compared tokens in passes of many",
        "rows[].largest_nll_change": "largest relative difference of a block's nats between the two ways",
        "rows[].largest_kld": "largest KL divergence of a token's distribution between the two ways, nats",
        "worst_share": "largest share_whole of all rows",
        "worst_share_error?": "standard error of worst_share; null for one build",
    }
    is_timing = True
    over = {"shape": "shapes"}
    full_minutes = 22

    def measure(self, cell: Cell) -> Iterator[Row]:
        shape, whole = cell["shape"], WHOLE_LAYERS[cell["shape"]]
        layers = [min(count, whole) for count in self.options.layers]
        most = 2 if shape == "small" else DEFAULTS.evaluation_tokens // DEFAULTS.block_tokens
        blocks = min(most, num_measured(VerifyConfig(), DEFAULTS.block_tokens, PARAMETERS[shape]))
        test_tokens = blocks * DEFAULTS.block_tokens
        builds = [self._build(f"{shape}-{number}", shape, count, test_tokens) for number, count in enumerate(layers)]
        found = [stages_of for _, stages_of in builds]
        yield {
            "layers": layers,
            "test_tokens": test_tokens,
            "stages_s": [sum(stage.wall_s for stage in each.values()) for each in found],
            "stages_cpu_s": [sum(stage.cpu_s for stage in each.values()) for each in found],
            "verify_s": [each["verify"].wall_s for each in found],
            "verify_cpu_s": [each["verify"].cpu_s for each in found],
            "share": found[-1]["verify"].wall_s / sum(stage.wall_s for stage in found[-1].values()),
            "share_cpu": found[-1]["verify"].cpu_s / sum(stage.cpu_s for stage in found[-1].values()),
            "whole_layers": whole,
            **of_whole(layers, found, whole),
            **self._both_ways(builds[-1][0]),
        }

    def _build(self, name: str, shape: str, layers: int, test_tokens: int) -> tuple[Path, Mapping[str, Stage]]:
        """Builds a shape with `layers` layers in folder `name`; returns the device's build folder and the costs of its
        stages."""
        options, folder = self.options, self.folder / name
        evaluation_tokens = max(test_tokens, 512 if options.warm else DEFAULTS.evaluation_tokens)
        config: dict[str, Any] = {"device": "pixel6", "calibration_tokens": options.tokens, "method": options.method}
        config |= {"evaluation_tokens": evaluation_tokens, "test_tokens": test_tokens}
        config["dram_budget"] = "95%" if options.warm else "80%"
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
        worst = max(rows, key=lambda row: row["share_whole"])
        return {"worst_share": worst["share_whole"], "worst_share_error": worst["share_whole_error"]}


def of_whole(layers: Sequence[int], builds: Sequence[Mapping[str, Stage]], whole: int) -> Row:
    """Returns the figures of `whole` layers, extrapolated from builds of `layers` layers, the largest one last."""
    cpu_s = {name: np.array([each[name].cpu_s for each in builds]) for name in builds[-1]}
    noise, weights = noise_of(layers, cpu_s), weights_of(layers, whole)
    # a stage cannot take less time for more layers: where it did, other work on the machine had its turn
    whole_cpu_s = {name: max(float(weights @ found), float(found.mean())) for name, found in cpu_s.items()}
    error_s = {name: (noise or 0.0) * float(np.linalg.norm(weights * found)) for name, found in cpu_s.items()}
    per_cpu_s = {name: seconds_per_cpu_s(name, stage) for name, stage in builds[-1].items()}
    time_s, time_error_s = ({name: each[name] * per_cpu_s[name] for name in each} for each in (whole_cpu_s, error_s))
    return {
        "noise": noise,
        "stages_whole_s": sum(time_s.values()),
        "verify_whole_s": time_s["verify"],
        "share_whole": share_of_verify(time_s),
        "share_whole_error": None if noise is None else share_error(time_s, time_error_s),
        "share_cpu_whole": share_of_verify(whole_cpu_s),
        "share_cpu_whole_error": None if noise is None else share_error(whole_cpu_s, error_s),
    }


def weights_of(layers: Sequence[int], whole: int) -> np.ndarray:
    """Returns the weights of builds whose weighted seconds are those of `whole` layers, float64 [num_builds]: on the
    line of least squares, or from builds of one size in proportion to their layers."""
    counts = np.array(layers, np.float64)
    if len(set(layers)) == 1:
        return whole / counts / len(counts)
    off = counts - counts.mean()
    return 1 / len(counts) + (whole - counts.mean()) * off / (off @ off)


def noise_of(layers: Sequence[int], cpu_s: Mapping[str, np.ndarray]) -> float | None:
    """Returns the relative standard deviation of a stage's processor seconds from build to build, pooled over stages;
    None if nothing was measured twice.

    Args:
        layers: Layers of each build.
        cpu_s: By stage, float64 [num_builds].
    """
    squares, freedom = 0.0, 0
    for name, found in cpu_s.items():
        same = name in SHARED or len(set(layers)) == 1
        expected = found.mean() if same else np.array([weights_of(layers, count) @ found for count in layers])
        squares += float(((found - expected) ** 2).sum()) / found.mean() ** 2
        freedom += len(found) - (1 if same else 2)
    return (squares / freedom) ** 0.5 if freedom else None


def seconds_per_cpu_s(name: str, stage: Stage) -> float:
    """Returns the seconds of a build for a processor second of a stage."""
    return stage.wall_s / stage.cpu_s / (CORES if name in IN_CHUNKS else 1)


def share_error(seconds: Mapping[str, float], errors_s: Mapping[str, float]) -> float:
    """Returns the standard error of `share_of_verify` if the stages' errors are independent."""
    verify, others = seconds["verify"], sum(seconds.values()) - seconds["verify"]
    of_others = sum(error**2 for name, error in errors_s.items() if name != "verify") ** 0.5
    return ((others * errors_s["verify"]) ** 2 + (verify * of_others) ** 2) ** 0.5 / (verify + others) ** 2


def share_of_verify(seconds: Mapping[str, float]) -> float:
    """Returns verify's share of all stages' seconds."""
    return seconds["verify"] / sum(seconds.values())


if __name__ == "__main__":
    main("verify")
