"""Runs a method of a benchmark in another process, which isolates its memory, its caps or its imports."""

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.harness.benchmark import Benchmark, options_type
from benchmarks.harness.places import ROOT
from tests.support import warm

Run = Callable[[list[str]], int]
"""Runs a command and returns its exit code."""


def run_here(command: Sequence[str]) -> int:
    """Runs a command; stopping this process stops the command, too."""
    process = subprocess.Popen(command, cwd=ROOT)
    try:
        return process.wait()
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.wait()


def run_likewise(command: Sequence[str]) -> int:
    """Runs a command as this process was started: anew, or forked from a warm process as in the tests' smokes."""
    return warm.run(command) if warm.SERVERS in os.environ else run_here(command)


def peak_rss_bytes() -> int:
    """Returns the largest resident bytes of this process so far; a forked one inherits those of its parent."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def apart(benchmark: Benchmark[Any], method: str, *arguments: Any, run: Run = run_likewise) -> Any:
    """Returns the result of a method of `benchmark`, called with JSON-ready `arguments` in another process.

    Args:
        benchmark: Gives the module, the options and the folder, which the other process shares.
        method: The name of a method whose result is JSON-ready.
        arguments: Its arguments.
        run: Starts the command, for example under the caps of an emulated device.

    Raises:
        SystemExit: with the code of the other process if that is not zero; that process has printed the reason.
    """
    answer = benchmark.folder / f"{method}.answer.json"
    answer.unlink(missing_ok=True)
    told = {
        "module": type(benchmark).__module__,
        "options": vars(benchmark.options),
        "folder": str(benchmark.folder),
        "method": method,
        "arguments": arguments,
        "answer": str(answer),
    }
    code = run([sys.executable, "-m", "benchmarks.harness.apart", json.dumps(told, default=str)])
    if code:
        raise SystemExit(code)
    return json.loads(answer.read_text())


def _main(text: str) -> None:
    with suppress(ValueError):  # a process under caps may have no terminal to be stopped from
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    told = json.loads(text)
    plugin = import_module(told["module"]).Plugin
    kind = options_type(plugin)
    options = {name: tuple(value) if isinstance(value, list) else value for name, value in told["options"].items()}
    found = getattr(plugin(kind(**options), Path(told["folder"])), told["method"])(*told["arguments"])
    Path(told["answer"]).write_text(json.dumps(found))


if __name__ == "__main__":
    _main(sys.argv[1])
