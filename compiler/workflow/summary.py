"""What a finished build gave, on one screen: from metrics.json and publish.json of its folder.

Where the artifact is and which it is, text that it wrote, its figures with a dense run and the source beside them, and
the command that runs it. rules/common.smk has it printed at the end of every build (compiler/workflow/ending.py).
"""

import os
import sys
import textwrap
from pathlib import Path

from coldpress.compiler.block_statistics import with_error
from coldpress.compiler.io import load_record
from coldpress.compiler.run_command import PROGRAM, run_command
from coldpress.runtime.quantities import show_bytes
from coldpress.schemas.errors import ColdpressError, printable
from coldpress.schemas.metrics import Metrics
from coldpress.schemas.package import Package


def show(folder: Path) -> str:
    """The whole screen for a device's build folder.

    Raises:
        ColdpressError: if a record is missing, or they are of two artifacts.
    """
    metrics, package = load_record(folder / "metrics.json", Metrics), load_record(folder / "publish.json", Package)
    if metrics.artifact_sha256 != package.manifest_sha256:
        raise ColdpressError(
            f"{folder / 'metrics.json'} is of artifact {metrics.artifact_sha256[:12]}, what stands there is "
            f"{package.manifest_sha256[:12]}; delete the file and run the build again"
        )
    artifact = _shown(Path(package.folder))
    places = [
        ("artifact", f"{artifact}, {show_bytes(metrics.artifact_bytes)}"),
        ("identity", package.manifest_sha256),
        ("report", str(_shown(folder / "report.html"))),
    ]
    sample = metrics.sample
    lines = f"{sample.prompt}{sample.text}".split("\n") if sample else []
    text = textwrap.indent("\n".join(map(printable, lines)), "  ") + "\n\n" if lines else ""
    return (
        f"\n{metrics.model} on {metrics.device}: {metrics.method}, {metrics.format}\n\n{text}"
        f"{_table(places)}\n\n{_table(rows(metrics))}\n\n  run it\n  {run_command(_runtime(), str(artifact), sample)}"
    )


def rows(metrics: Metrics) -> list[tuple[str, str]]:
    """The short table: what is measured, and its value."""
    return [
        (
            "in DRAM / budget",
            f"{show_bytes(metrics.resident_bytes)} always resident / {show_bytes(metrics.budget_bytes)}",
        ),
        (
            "read from flash",
            f"{show_bytes(metrics.flash_bytes_per_token)} in {metrics.reads_per_token:.1f} reads per token",
        ),
        ("cache hit rate", f"{metrics.hit_rate:.1%}"),
        (
            "perplexity",
            f"{with_error(metrics.ppl_artifact, metrics.ppl_artifact_error, 2)}; of the source "
            f"{with_error(metrics.ppl_source, metrics.ppl_source_error, 2)}; ratio "
            f"{with_error(metrics.ppl_ratio, metrics.ppl_ratio_error, 4)}",
        ),
        (
            "from",
            f"{metrics.num_measured_blocks} of {metrics.num_test_blocks} blocks of test text, "
            f"{metrics.num_test_tokens:,} tokens; ± is the standard error over blocks",
        ),
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


def _runtime() -> list[str]:
    """How a user calls the runtime here: by its name where the environment is active, else by its path."""
    beside = Path(sys.executable).with_name(PROGRAM)
    if not beside.is_file():
        return [str(_shown(Path(sys.executable))), "-m", "coldpress.runtime"]
    return [PROGRAM] if os.environ.get("VIRTUAL_ENV") == sys.prefix else [str(_shown(beside))]


def _table(lines: list[tuple[str, str]]) -> str:
    return "\n".join(f"  {name:18s}{value}" for name, value in lines)


def _shown(path: Path) -> Path:
    """Relative where it lies below the present folder; links in it stay, an environment's interpreter is one."""
    absolute = path.absolute()
    return absolute.relative_to(Path.cwd()) if absolute.is_relative_to(Path.cwd()) else absolute
