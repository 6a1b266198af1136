"""What a finished build gave, on one screen: `python -m compiler.workflow.summary build/<model>/<device>`.

Generates a little text with the artifact, in a process of its own as a user would, and prints it with the figures of
metrics.json and the paths of artifact and report.
"""

import argparse
import json
import subprocess
import sys
import textwrap
from pathlib import Path

from compiler._io import load_record
from runtime.quantities import show_bytes
from schemas.errors import ColdpressError
from schemas.metrics import Metrics
from schemas.package import Package

PROMPT = "The for statement is used to"
NUM_TOKENS = 48
TEMPERATURE, SEED = "0.6", "7"
"""Greedily, a model of four million parameters soon repeats itself."""


def generate(artifact: Path, prompt: str, num_tokens: int) -> str:
    """Text that the runtime continues `prompt` with, sampled with a fixed seed.

    Raises:
        ColdpressError: with the runtime's own sentence, if it refuses.
    """
    command = [sys.executable, "-m", "runtime", "generate", str(artifact), "--prompt", prompt]
    command += ["--max-new-tokens", str(num_tokens), "--temperature", TEMPERATURE, "--seed", SEED, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ColdpressError(done.stderr.strip().removeprefix("error: ") or f"generate ended with {done.returncode}")
    return json.loads(done.stdout)["text"]


def rows(metrics: Metrics) -> list[tuple[str, str]]:
    """The short table: what is measured, and its value."""
    return [
        ("artifact", show_bytes(metrics.artifact_bytes)),
        (
            "in DRAM / budget",
            f"{show_bytes(metrics.resident_bytes)} always resident / {show_bytes(metrics.budget_bytes)}",
        ),
        (
            "read from flash",
            f"{show_bytes(metrics.flash_bytes_per_token)} in {metrics.reads_per_token:.1f} reads per token",
        ),
        ("cache hit rate", f"{metrics.hit_rate:.1%}"),
        ("perplexity", f"{metrics.ppl_source:.2f} source, {metrics.ppl_artifact:.2f} artifact"),
        ("speed here", f"{metrics.tokens_per_s:.0f} tokens/s"),
        (f"on {metrics.device}", f"{metrics.modelled_tokens_per_s:.0f} tokens/s, simulated"),
        ("dense, same DRAM", dense(metrics)),
    ]


def dense(metrics: Metrics) -> str:
    """What a dense run in the same DRAM does, and how this artifact compares."""
    if metrics.dense is None or metrics.gain_over_dense is None:
        return "does not fit: its buffers alone exceed the budget"
    run, gain = metrics.dense, metrics.gain_over_dense
    figures = f"{run.tokens_per_s:.0f} tokens/s, {show_bytes(run.flash_bytes_per_token)} in {run.reads_per_token} reads"
    if metrics.method == "dense":
        return f"{figures} per token; this artifact is dense"
    pays = "" if gain >= 1 else ": sparsity does not pay here, build with method=dense"
    return f"{figures} per token, perplexity {metrics.ppl_dense:.2f}; this artifact is {gain:.2f} times as fast{pays}"


def show(folder: Path, prompt: str) -> str:
    """The whole screen for a device's build folder."""
    metrics = load_record(folder / "metrics.json", Metrics)
    package = load_record(folder / "publish.json", Package)
    text = generate(Path(package.folder), prompt, NUM_TOKENS)
    table = "\n".join(f"  {name:18s}{value}" for name, value in rows(metrics))
    title = f"{metrics.model} on {metrics.device}: {metrics.method}, {metrics.format}"
    return (
        f"\n{title}\n\n{textwrap.indent(prompt + text, '  ')}\n\n{table}\n\n"
        f"  {'artifact':18s}{_shown(Path(package.folder))}\n  {'report':18s}{_shown(folder / 'report.html')}"
    )


def _shown(path: Path) -> Path:
    absolute = path.resolve()
    return absolute.relative_to(Path.cwd()) if absolute.is_relative_to(Path.cwd()) else absolute


def main(argv: list[str] | None = None) -> int:
    """Entry point; bad input ends in one sentence and exit code 2."""
    parser = argparse.ArgumentParser(prog="python -m compiler.workflow.summary", description=__doc__)
    parser.add_argument("folder", type=Path, help="build/<model>/<device>")
    parser.add_argument("--prompt", default=PROMPT, help=f"default: {PROMPT}")
    arguments = parser.parse_args(argv)
    try:
        print(show(arguments.folder, arguments.prompt))
    except ColdpressError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
