"""Tries edits one after another in a copy of the checkout with its own native core.

In every process the copy comes before an installed coldpress, and Python writes no bytecode there, so that an edit
takes effect however soon it follows another.
"""

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.support.data import ROOT, find_data_folder
from tests.support.workflow import STRIP_EDITABLE
from tools.mutants.edits import NATIVE, Edit

TESTS_FAILED, INTERRUPTED, NO_TESTS = 1, 2, 5
"""Exit codes of pytest. The first two mean that the tests noticed the edit; pytest ends with the second if a module
cannot be imported."""


class ToolError(RuntimeError):
    """Raised if an edit could not be tried; the text is one sentence."""


@dataclass(frozen=True)
class Outcome:
    """The result of one run of tests."""

    passed: bool
    by: str
    """The tests that failed; `time limit` if pytest had to be killed, and the signal if it died of one."""
    seconds: float


class Tree:
    """A copy of the checkout's files, tracked or new, in `folder`."""

    def __init__(self, folder: Path, native: bool, limit_s: int, fast: bool) -> None:
        """Copies the files and, if `native`, builds the core from them.

        `limit_s` is each test's time limit; if `fast`, only the tests of `make test` run.
        """
        self._folder, self._top, self._limit_s = folder, folder / "tree", limit_s
        self._selection = ["-m", "not slow"] if fast else []
        listed = _command(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], ROOT)
        for name in filter(None, listed.split("\0")):
            if (ROOT / name).is_file() or (ROOT / name).is_symlink():
                (self._top / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, self._top / name, follow_symlinks=False)
        (folder / "strip").mkdir()
        (folder / "strip" / "sitecustomize.py").write_text(STRIP_EDITABLE)
        installed = importlib.util.find_spec("coldpress.runtime._native")
        if installed is None or installed.origin is None:
            raise ToolError("the native core is not built; run make env")
        self._core = self._top / "runtime" / Path(installed.origin).name
        if native:
            self._build()
        else:
            self._core.symlink_to(Path(installed.origin).resolve())

    @contextmanager
    def edited(self, edit: Edit) -> Iterator[None]:
        """Makes one mistake in the copy, and undoes it after the block."""
        path = self._top / edit.file
        text = path.read_text(encoding="utf-8")
        path.write_text(edit.applied(text), encoding="utf-8")
        try:
            if edit.native:
                self._build()
            yield
        finally:
            path.write_text(text, encoding="utf-8")
            if edit.native:
                self._build()

    def run(self, tests: Sequence[str], to_the_end: bool = False) -> Outcome:
        """Runs tests, up to the first that fails unless `to_the_end`.

        Raises:
            ToolError: if pytest could not run them.
        """
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rfE", "--tb=no", "--no-header"]
        command += [f"--timeout={self._limit_s}", *([] if to_the_end else ["-x"]), *self._selection, *tests]
        began, environment = time.monotonic(), self._environment()
        with subprocess.Popen(
            command,
            cwd=self._top,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                output, _ = process.communicate(timeout=None if to_the_end else self._limit_s * 3)
            except subprocess.TimeoutExpired:  # a loop in native code ignores a test's limit
                return Outcome(False, "time limit", time.monotonic() - began)
            finally:
                _end_group(process.pid)
        seconds = time.monotonic() - began
        failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
        if process.returncode not in (0, TESTS_FAILED, INTERRUPTED, NO_TESTS) and process.returncode > 0:
            raise ToolError(f"pytest ended with code {process.returncode} on {' '.join(tests)}:\n{output[-2000:]}")
        died = f"signal {-process.returncode}" if process.returncode < 0 else ""
        return Outcome(process.returncode in (0, NO_TESTS), " ".join(failed) or died, seconds)

    def _environment(self) -> dict[str, str]:
        temporary, data = self._folder / "temporary", find_data_folder()
        temporary.mkdir(exist_ok=True)
        paths = [str(self._top), str(self._folder / "strip"), os.environ.get("PYTHONPATH", "")]
        return {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTEST_DEBUG_TEMPROOT": str(temporary),
            **({"COLDPRESS_TEST_DATA": str(data)} if data else {}),
        }

    def _build(self) -> None:
        """Compiles changed sources and replaces the core by a new file: a mapped file must not be overwritten."""
        build = self._folder / "build"
        if not build.is_dir():
            if importlib.util.find_spec("nanobind") is None:
                raise ToolError("edits of the native core need nanobind to build it; pip install nanobind")
            named = [f"-DPython_EXECUTABLE={sys.executable}", "-DCMAKE_BUILD_TYPE=Release"]
            _command(["cmake", "-S", str(self._top / NATIVE), "-B", str(build), *named], ROOT)
        _command(["cmake", "--build", str(build)], ROOT)
        self._core.unlink(missing_ok=True)
        shutil.copy(build / self._core.name, self._core)


def _command(command: list[str], folder: Path) -> str:
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    except FileNotFoundError as error:
        raise ToolError(f"{command[0]} is needed and not installed") from error
    except subprocess.CalledProcessError as error:
        raise ToolError(f"{' '.join(command)} ended with code {error.returncode}:\n{error.stderr[-2000:]}") from error
    return done.stdout


def _end_group(process_id: int) -> None:
    """Kills the processes that pytest has left running, or pytest itself."""
    with suppress(ProcessLookupError):
        os.killpg(process_id, signal.SIGKILL)
