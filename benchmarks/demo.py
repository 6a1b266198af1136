"""Produces the texts that pages show of the demo: the build's last screen, a Python example, a token's costs.

The screen is that of the build that `make demo` starts. The example of docs/how-to/session.md runs on the artifact of
the ReLU model, and `coldpress generate` gives the table of a token. Python's documentation is the text, so another
version of Python gives another identity and slightly other figures.
"""

import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import chdir
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from benchmarks.harness import Benchmark, Cell, Figures, Row, Rows, Table, main, option
from benchmarks.harness.inputs import PYTHON
from benchmarks.harness.places import ROOT
from benchmarks.shared.builds import SHORT, build
from coldpress.compiler.io import load_record
from coldpress.compiler.run_command import PROGRAM
from coldpress.compiler.workflow.ending import show
from coldpress.schemas.errors import ColdpressError
from coldpress.schemas.metrics import Metrics

RELU = "relu-demo"
ARTIFACT = "build/relu-demo/pixel6/relu-demo-pixel6.coldpress"
SESSION = "docs/how-to/session.md"
"""The page whose example prints figures."""
GENERATE = ("-m", "coldpress", "generate", ARTIFACT, "--prompt", "Dictionary displays")
TOKEN = re.compile(r"^.*: p5, median, p95 .*$", re.MULTILINE)
PLAIN = ("method", "format", "artifact_bytes", "resident_bytes", "budget_bytes", "flash_bytes_per_token")
RATES = ("reads_per_token", "hit_rate", "ppl_artifact", "ppl_source", "tokens_per_s", "modelled_tokens_per_s")


@dataclass(frozen=True)
class Options:
    model: str = option("demo", smoke=RELU, choices=("demo", RELU), help="profile whose build gives the screen")
    short: bool = option(False, smoke=True, help="calibrate and score on less text")


class Plugin(Benchmark[Options]):
    keys = {
        "screen": "last screen of the build",
        "session": "output of the example in docs/how-to/session.md",
        "token": "lines of coldpress generate about the costs of a token",
        "python": "version of Python, whose documentation is the text",
        **{f"rows[].{name}": "figure of this name in the build's metrics.json" for name in (*PLAIN, *RATES)},
        "rows[].gain_over_dense": "simulated tokens per second over those of a dense build in the same DRAM",
        **{f"rows[].{name}": f"the same text as {name} of the last line" for name in ("screen", "session", "token")},
    }
    is_timing = True
    full_minutes = 1

    def measure(self, cell: Cell) -> Iterator[Row]:
        short = self._short() if self.options.short else {}
        device = build(self.folder, model=RELU, device="pixel6", **short)
        if self.options.model != RELU:
            device = build(self.folder / "shown", model=self.options.model, device="pixel6")
        metrics = load_record(device / "metrics.json", Metrics)
        (code,) = PYTHON.findall((ROOT / SESSION).read_text(encoding="utf-8"))
        yield {
            **{name: getattr(metrics, name) for name in (*PLAIN, *RATES, "gain_over_dense")},
            "screen": self._screen(device),
            "session": self._said("-c", code),
            "token": "\n".join(TOKEN.findall(self._said(*GENERATE))),
        }

    def _short(self) -> dict[str, Any]:
        """Returns settings for a short build on the topics of `help`: neither parsing all docstrings nor a search."""
        corpus = self.folder / "topics.txt"
        corpus.write_text("\n\n".join(topics[name] for name in sorted(topics)), encoding="utf-8")
        chosen = {"method": "relu", "format": "fp16", "cache": "lfu"}
        return {**SHORT, "block_tokens": 64, "corpus": corpus, **chosen}

    def _screen(self, device: Path) -> str:
        """Returns the screen that `make demo` shows when called from the checkout without an active environment."""
        with chdir(device.parents[2]):
            text = show(device).replace(f"{sys.prefix}/bin/", "")
        return re.sub(rf"(^  |\| ){PROGRAM} ", rf"\1.venv/bin/{PROGRAM} ", text, flags=re.MULTILINE).strip()

    def _said(self, *arguments: str) -> str:
        """Returns what Python prints when called from the folder of the build."""
        done = subprocess.run([sys.executable, *arguments], cwd=self.folder, capture_output=True, text=True)
        if done.returncode:
            raise ColdpressError(f"{' '.join(arguments)} ended with code {done.returncode}: {done.stderr[-2000:]}")
        return done.stdout.strip()

    def figures(self, rows: Rows) -> Figures:
        return {name: rows[0][name] for name in ("screen", "session", "token")} | {"python": platform.python_version()}

    def tables(self, rows: Rows, figures: Figures) -> Iterator[Table]:
        for name in ("screen", "session", "token"):
            yield Table(name, [""], [[line] for line in rows[0][name].splitlines()])


if __name__ == "__main__":
    main("demo")
