"""Builds the same artifacts with two checkouts and prints their differences.

    python -m tools.same OLD NEW --data FOLDER [--models NAME ...] [--methods NAME ...] [--config KEY=VALUE ...]

Both checkouts build every model in FOLDER with every method, each with its own environment (`.venv`) and Snakefile. Two
artifacts are the same if all their files but manifest, model card and provenance have the same bytes, and if greedy
text has the same tokens, reads, bytes read, hits, misses and evictions. A method must be refused by both checkouts or
by none; the words may differ. If no case was built by both, nothing was compared, and the exit code is 1.

The jobs of a build run in processes forked from one that has imported the heavy libraries: importing them again in
every job would take most of the time. The commands are those that the rules print.
"""

import argparse
import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from coldpress.compiler.pipeline import STAGES

METHODS = (
    "dense",
    "relu",
    "predictor",
    "topk",
    "threshold",
    "cats",
    "gate",
    "up",
    "glu",
    "dip",
    "dip_ca",
    "flash",
    "wina",
)
WITHOUT_DENSITY = ("dense", "relu", "predictor")
"""Methods that take no density."""
SETTINGS = {
    "device": "pixel6",
    "dram_budget": "85%",
    "calibration_tokens": 2048,
    "evaluation_tokens": 512,
    "context_length": 128,
    "preflight": "off",
    "max_ppl_ratio": "off",
    "min_top1_agreement": "off",
}
"""Settings of a build that takes minutes. The quality gates are off, since only equality counts."""
APART = ("manifest.json", "README.md", "provenance/")
"""Files that may name the code that made an artifact."""
PROMPT_TOKENS, NEW_TOKENS = 8, 24
COUNTED = ("reads", "bytes_read", "hits", "misses", "evictions")
SERVER = """
import json, os, runpy, sys, traceback
for name in ("torch", "transformers", "numpy", "scipy", "sklearn", "pyarrow", "datasets"):
    try: __import__(name)
    except ImportError: pass
print("ready", flush=True)
for line in sys.stdin:
    job = json.loads(line)
    child = os.fork()
    if not child:
        code = 1
        try:
            os.environ.update(job["environment"]); os.chdir(job["folder"])
            for number, name in ((1, job["stdout"]), (2, job["stderr"])):
                os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), number)
            sys.argv = [job["module"], *job["arguments"]]
            runpy.run_module(job["module"], run_name="__main__", alter_sys=True)
            code = 0
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        except BaseException: traceback.print_exc()
        finally:
            sys.stdout.flush(); sys.stderr.flush(); os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@dataclass(frozen=True)
class Built:
    """The result of one checkout's build of one model with one method."""

    refusal: str
    """The sentence that ended the build; empty where there is an artifact."""
    files: Mapping[str, str]
    """Path -> sha256, without `APART`."""
    tokens: tuple[int, ...]
    counts: Mapping[str, float]
    """The run's counters by name."""


class Checkout:
    """A checkout with its environment, and a process that forks its jobs."""

    def __init__(self, root: Path, folder: Path, settings: Mapping[str, object]) -> None:
        """Starts the process; builds have these settings and go into `folder`."""
        self.root, self.folder, self.settings = root.resolve(), folder, settings
        self.python = self.root / ".venv" / "bin" / "python"
        if not self.python.exists():
            raise SystemExit(f"error: {self.root} has no .venv; run make env there")
        folder.mkdir(parents=True)
        self._process = subprocess.Popen(
            [self.python, "-c", SERVER], cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._line()

    def _line(self) -> str:
        assert self._process.stdout
        return self._process.stdout.readline().strip()

    def close(self) -> None:
        """Ends the process."""
        self._process.communicate()

    def run(self, module: str, arguments: Sequence[str], folder: Path, output: Path, log: Path) -> int:
        """Runs a module as a program in a forked process; returns its exit code."""
        environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(self.root), "COLDPRESS_CALLED_FROM": str(self.folder)}
        job = {"module": module, "arguments": list(arguments), "folder": str(folder), "environment": environment}
        assert self._process.stdin
        self._process.stdin.write(json.dumps(job | {"stdout": str(output), "stderr": str(log)}) + "\n")
        self._process.stdin.flush()
        return int(self._line())

    def commands(self, config: Mapping[str, object]) -> tuple[list[list[str]], str]:
        """Returns the jobs of a build in an order in which they can run, and the sentence of a refusal, or ""."""
        pairs = [f"{key}={value}" for key, value in config.items()]
        command = [
            "-m",
            "snakemake",
            "-s",
            str(self.root / "Snakefile"),
            "--dry-run",
            "--printshellcmds",
            "--cores",
            "1",
        ]
        done = subprocess.run(
            [self.python, *command, "--config", *pairs],
            cwd=self.folder,
            env=os.environ | {"PATH": f"{self.python.parent}:{os.environ['PATH']}"},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            return [], last_sentence(done.stderr)
        found = re.findall(r"-m (coldpress\.compiler|coldpress) (.*?) 2> (\S+)", done.stdout + done.stderr)
        jobs = [[module, *shlex.split(arguments), log] for module, arguments, log in found]
        return sorted(jobs, key=lambda job: (job[1] in STAGES, STAGES.index(job[1]) if job[1] in STAGES else 0)), ""

    def build(self, model: Path, method: str) -> Built:
        """Builds an artifact, runs it, and returns the result."""
        label = f"{method.replace('_', '-')}"
        folder = self.folder / f"{model.name}-{label}"  # the rules' paths are relative to it
        config = {**self.settings, "model": model, "method": method, "build_dir": folder, "label": label}
        config |= {} if method in WITHOUT_DENSITY else {"density": 0.8}
        commands, refusal = self.commands(config)
        if refusal:
            return Built(refusal, {}, (), {})
        for module, *arguments, log in commands:
            logged = folder / log.strip("'")
            logged.parent.mkdir(parents=True, exist_ok=True)
            (folder / arguments[arguments.index("--output") + 1]).parent.mkdir(parents=True, exist_ok=True)
            if self.run(module, arguments, folder, logged.with_suffix(".out"), logged):
                return Built(last_sentence(logged.read_text()), {}, (), {})
        (artifact,) = (folder / model.name / f"pixel6+{label}").glob("*.coldpress")
        return Built("", digests(artifact), *self.generate(artifact))

    def generate(self, artifact: Path) -> tuple[tuple[int, ...], Mapping[str, float]]:
        """Returns greedy tokens after a fixed prompt, and the run's counters."""
        text = artifact.parent / "text.json"
        prompt = ",".join(str(1 + 7 * place) for place in range(PROMPT_TOKENS))
        given = ["generate", str(artifact), "--prompt-ids", prompt, "--max-new-tokens", str(NEW_TOKENS), "--json"]
        log = text.with_suffix(".log")
        if self.run("coldpress", given, self.folder, text, log):
            raise SystemExit(f"error: {artifact} does not run: {last_sentence(log.read_text())}")
        found = json.loads(text.read_text())
        return tuple(found["token_ids"]), {name: found["metrics"][name] for name in found["metrics"] if counted(name)}


def counted(name: str) -> bool:
    """Returns whether a field of the metrics is a count of the run, not a time or speed of this machine."""
    return any(part in name for part in COUNTED)


def digests(artifact: Path) -> dict[str, str]:
    """Returns path -> sha256 of an artifact's files, without `APART`."""
    files = {path.relative_to(artifact).as_posix(): path for path in artifact.rglob("*") if path.is_file()}
    return {
        name: hashlib.sha256(path.read_bytes()).hexdigest()
        for name, path in sorted(files.items())
        if not name.startswith(APART)
    }


def last_sentence(text: str) -> str:
    """Returns the last line that begins with `error:`, else the last line."""
    lines = [line for line in text.splitlines() if line.startswith("error:")]
    return (lines or text.strip().splitlines() or ["it ended without a message"])[-1]


def differences(old: Built, new: Built) -> list[str]:
    """Returns the differences between two builds of one case, in words."""
    if old.refusal or new.refusal:
        same = bool(old.refusal) == bool(new.refusal)
        return [] if same else [f"refused by one: {old.refusal or 'built'} | {new.refusal or 'built'}"]
    names = sorted(old.files.keys() | new.files.keys())
    found = [f"file {name}" for name in names if old.files.get(name) != new.files.get(name)]
    if old.tokens != new.tokens:
        found.append("tokens")
    shared = old.counts.keys() & new.counts.keys()
    return found + [
        f"{name} {old.counts[name]} | {new.counts[name]}"
        for name in sorted(shared)
        if old.counts[name] != new.counts[name]
    ]


@contextmanager
def both(old: Path, new: Path, folder: Path, settings: Mapping[str, object]) -> Iterator[tuple[Checkout, Checkout]]:
    """Opens the two checkouts, each with a folder for its builds, and closes them after the block."""
    checkouts = Checkout(old, folder / "old", settings), Checkout(new, folder / "new", settings)
    try:
        yield checkouts
    finally:
        for checkout in checkouts:
            checkout.close()


def main() -> int:
    """Compares all cases of the command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.same", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old", type=Path, help="a checkout with its .venv")
    parser.add_argument("new", type=Path, help="another checkout with its .venv")
    parser.add_argument(
        "--data", type=Path, required=True, help="a folder of checkpoints: every folder in it is a model"
    )
    parser.add_argument("--models", nargs="*", help="names of models (default: all)")
    parser.add_argument("--methods", nargs="*", default=METHODS, help="methods (default: all)")
    parser.add_argument(
        "--config",
        nargs="*",
        default=[],
        metavar="KEY=VALUE",
        help="settings of the builds beside or instead of SETTINGS in this module",
    )
    arguments = parser.parse_args()
    settings = SETTINGS | dict(pair.split("=", 1) for pair in arguments.config)
    models = [
        path for path in sorted(arguments.data.iterdir()) if not arguments.models or path.name in arguments.models
    ]
    rows: list[dict[str, object]] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        both(arguments.old, arguments.new, Path(folder), settings) as (old, new),
    ):
        for model in models:
            for method in arguments.methods:
                built = old.build(model, method), new.build(model, method)
                found = differences(*built)
                state = "refused" if built[0].refusal or built[1].refusal else "built"
                rows.append({"model": model.name, "method": method, "state": state, "differences": found})
                told = "; ".join(found) or (built[1].refusal if state == "refused" else "the same")
                print(f"{model.name:24} {method:10} {state:8} {told}", flush=True)
    return concluded(rows)


def concluded(rows: Sequence[Mapping[str, object]]) -> int:
    """Prints the counts of cases, and those that differ; returns 1 if one differs or none was built by both."""
    different = [row for row in rows if row["differences"]]
    built_count = sum(row["state"] == "built" for row in rows)
    print(json.dumps({"cases": len(rows), "built": built_count, "different": different}))
    if not built_count:
        print("error: both checkouts built none of the cases, so nothing was compared", file=sys.stderr)
    return 1 if different or not built_count else 0


if __name__ == "__main__":
    sys.exit(main())
