"""Fixtures: a copy of the checkout that tests may edit, and one tiny build that they share.

Everything here runs snakemake as a user would, in another process; `Server` forks it and its jobs. Each worker of
pytest-xdist has a copy of both, since a test may edit the checkout or continue the build. tests/conftest.py imports the
fixtures.
"""

import contextlib
import fcntl
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.support.data import ROOT
from tests.support.imatrices import write_llama
from tests.support.models import write_corpus, write_model
from tests.support.warm import CLIENT

NUM_LAYERS = 4
IMATRIX = "tiny.imatrix"
"""Name of an importance matrix beside the model."""
COPIED = ("Snakefile", "rules", "profiles", "coldpress", "compiler", "runtime", "schemas")
SERVER = Path(__file__).with_name("snakemake_server.py")
# An editable install puts its finder before PYTHONPATH; the copy must come first in these tests.
STRIP_EDITABLE = "import sys\nsys.meta_path[:] = [f for f in sys.meta_path if 'ScikitBuild' not in type(f).__name__]\n"


class Server:
    """Runs snakemake in processes forked from one that has imported it and the checkout (snakemake_server.py), and the
    jobs of builds in processes forked from one that has imported the stages (warm_server.py).

    While the checkout differs from what those processes have imported, each run and each job has a fresh interpreter.
    """

    def __init__(self, tree: Path) -> None:
        self._tree = tree
        self._imported = _times(tree)
        self._snakemake: subprocess.Popen[str] | None = None
        self._jobs: subprocess.Popen[str] | None = None
        self._commands = tempfile.TemporaryDirectory()
        self._socket = f"coldpress-{os.getpid()}-{self._commands.name}"
        client = Path(self._commands.name, "python")
        client.write_text(CLIENT.format(python=sys.executable, name=self._socket))
        client.chmod(0o755)
        client.with_name("coldpress").symlink_to(Path(sys.executable).with_name("coldpress"))

    def run(self, arguments: list[str], folder: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
        """Runs snakemake in `folder` to its end."""
        if _times(self._tree) != self._imported:
            command = [sys.executable, "-m", "snakemake", *arguments]
            return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        with tempfile.TemporaryDirectory() as scratch:
            outputs = {name: f"{scratch}/{name}" for name in ("stdout", "stderr")}
            for path in outputs.values():
                Path(path).touch()
            request = {"arguments": arguments, "folder": str(folder), "environment": environment, **outputs}
            code = self._ask(request, "--dry-run" not in arguments)
            stdout, stderr = (Path(path).read_text(encoding="utf-8") for path in outputs.values())
        return subprocess.CompletedProcess(arguments, code, stdout, stderr)

    def _ask(self, request: dict[str, object], has_jobs: bool) -> int:
        """Returns the exit code of a run; if the test is interrupted while it waits, the servers are stopped."""
        try:
            if self._snakemake is None:
                self._snakemake = self._started(str(SERVER), str(self._tree))
            python = self.python() if has_jobs else sys.executable
            return int(_answer(self._snakemake, json.dumps(request | {"python": python})))
        except BaseException:
            self.stop()
            raise

    def python(self) -> str:
        """Returns the program that snakemake uses as Python: it asks the process with the stages to run a job.

        The installed commands lie beside it, as beside any Python.
        """
        if self._jobs is None:
            self._jobs = self._started("-m", "tests.support.warm_server", self._socket)
            _answer(self._jobs)
        return f"{self._commands.name}/python"

    def _started(self, *command: str) -> subprocess.Popen[str]:
        """Starts a Python with the checkout, in a new process group of this session, so that jobs can join a group."""
        paths = os.pathsep.join(map(str, (self._tree.parent / "strip", self._tree, ROOT)))
        return subprocess.Popen(
            [sys.executable, "-P", *command],
            env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            process_group=0,
        )

    def stop(self) -> None:
        """Ends the servers and a run that they have forked; they start again when needed."""
        for process in filter(None, (self._snakemake, self._jobs)):
            with process, contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        self._snakemake = self._jobs = None

    def close(self) -> None:
        """Ends the servers and removes their commands."""
        self.stop()
        self._commands.cleanup()


def _answer(server: subprocess.Popen[str], *request: str) -> str:
    """Sends a request, if there is one, and returns the server's next line."""
    assert server.stdin is not None
    assert server.stdout is not None
    for line in request:
        print(line, file=server.stdin, flush=True)
    return server.stdout.readline()


@dataclass(frozen=True)
class Workflow:
    """A checkout, and a folder for builds."""

    tree: Path
    folder: Path
    server: Server
    config: dict[str, object] = field(default_factory=dict)

    def at(self, folder: Path, **config: object) -> "Workflow":
        """Returns the same checkout and configuration for another folder; `config` adds and replaces keys."""
        folder.mkdir(parents=True, exist_ok=True)
        return Workflow(self.tree, folder, self.server, {**self.config, **config})

    def arguments(self, *arguments: str, cores: int = 2, **config: object) -> list[str]:
        """Returns the arguments of snakemake."""
        pairs = [f"{key}={value}" for key, value in {**self.config, **config}.items()]
        told = ["-s", str(self.tree / "Snakefile"), "--cores", str(cores), *arguments]
        return [*told, "--config", *pairs] if pairs else told

    def command(self, *arguments: str, cores: int = 2, **config: object) -> list[str]:
        """Returns the command line of a build, for a test that starts it itself."""
        return [sys.executable, "-m", "snakemake", *self.arguments(*arguments, cores=cores, **config)]

    def environment(self) -> dict[str, str]:
        paths = [str(self.tree.parent / "strip"), os.environ.get("PYTHONPATH", "")]
        return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "HF_HUB_OFFLINE": "1"}

    def run(self, *arguments: str, cores: int = 2, **config: object) -> subprocess.CompletedProcess[str]:
        told = self.arguments(*arguments, cores=cores, **config)
        return self.server.run(told, self.folder, self.environment())

    def build(self, cores: int = 2, **config: object) -> str:
        """Builds, and returns standard output, to which snakemake itself writes nothing."""
        done = self.run(cores=cores, **config)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
        return done.stdout

    def planned(self, **config: object) -> dict[str, int]:
        """Returns how often each rule would run now."""
        done = self.run("--dry-run", **config)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
        table = re.search(r"^job +count\n[- ]+\n(.*?)^total", done.stdout + done.stderr, re.MULTILINE | re.DOTALL)
        return {rule: int(count) for rule, count in map(str.split, table[1].splitlines())} if table else {}

    @property
    def imatrix(self) -> Path:
        """An importance matrix of the model; a build uses it only if `imatrix` names it."""
        return Path(str(self.config["model"])).parent / IMATRIX

    @property
    def model(self) -> Path:
        """The folder in which snakemake works."""
        return self.folder / "build" / "tiny"

    @property
    def device(self) -> Path:
        return self.model / "pixel6"

    @property
    def artifact(self) -> Path:
        return self.device / "tiny-pixel6.coldpress"

    def identity(self) -> str:
        """Returns the published artifact's sha256, as its record states it."""
        return json.loads((self.device / "publish.json").read_text())["manifest_sha256"]


@pytest.fixture(scope="session")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copies the checkout, with the installed native core."""
    top = tmp_path_factory.mktemp("checkout")
    for name in COPIED:
        source, target = ROOT / name, top / "tree" / name
        if source.is_dir():
            shutil.copytree(source, target, symlinks=True, ignore=shutil.ignore_patterns("*.so"))
        else:
            target.parent.mkdir(exist_ok=True)
            shutil.copy(source, target)
    native = importlib.util.find_spec("coldpress.runtime._native")
    assert native is not None
    assert native.origin is not None
    (top / "tree" / "runtime" / Path(native.origin).name).symlink_to(native.origin)
    (top / "strip").mkdir()
    (top / "strip" / "sitecustomize.py").write_text(STRIP_EDITABLE)
    return top / "tree"


@pytest.fixture(scope="session")
def server(tree: Path) -> Iterator[Server]:
    """Starts a server for the copy."""
    server = Server(tree)
    yield server
    server.close()


@pytest.fixture(scope="session")
def workflow(tree: Path, server: Server, tmp_path_factory: pytest.TempPathFactory) -> Workflow:
    """Writes a tiny ReLU model and its corpus; configures a build but does not run it."""
    top = tmp_path_factory.mktemp("inputs")
    write_model(top / "tiny", num_hidden_layers=NUM_LAYERS, relu=True, hidden_size=64, intermediate_size=160)
    write_llama(top / IMATRIX, NUM_LAYERS, 64, 160)
    config = {
        "model": top / "tiny",
        "corpus": write_corpus(top / "corpus.txt", 200),
        "dram_budget": "80%",
        "calibration_tokens": 1024,
        "evaluation_tokens": 768,
        "context_length": 64,
        "method": "predictor",
        "format": "int8_group32",
        "layers_per_job": 3,
    }
    return Workflow(tree, tmp_path_factory.mktemp("work"), server, dict(config))


@pytest.fixture(scope="session")
def built(workflow: Workflow, tmp_path_factory: pytest.TempPathFactory) -> Workflow:
    """Builds the tiny model in the worker that asks first; the others copy it, to a folder of the same depth."""
    kept = tmp_path_factory.getbasetemp().parent / "built"
    if "PYTEST_XDIST_WORKER" not in os.environ:
        workflow.build(cores=1)
        return workflow
    with kept.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if kept.exists():
            shutil.copytree(kept, workflow.folder, dirs_exist_ok=True, symlinks=True)
        else:
            workflow.build(cores=1)
            shutil.copytree(workflow.folder, kept, symlinks=True)
    return workflow


@pytest.fixture
def forked_jobs(server: Server, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forks the jobs of builds that the test itself starts, as `coldpress build` does, from the server's process."""
    folder = tmp_path_factory.mktemp("forked")
    lines = "import sys", 'if "snakemake" in sys.orig_argv:', f"    sys.executable = {server.python()!r}", ""
    (folder / "sitecustomize.py").write_text("\n".join(lines))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH")))))


@pytest.fixture
def edited(tree: Path) -> Iterator[Path]:
    """Yields the copy of the checkout, and restores it after the test."""
    times = _times(tree)
    saved = {path: path.read_bytes() for path in times}
    yield tree
    for path, time_ns in _times(tree).items():
        if path not in times:
            path.unlink()
        elif time_ns != times[path]:
            path.write_bytes(saved[path])
            os.utime(path, ns=(times[path], times[path]))


def _times(tree: Path) -> dict[Path, int]:
    """Returns the modification time of each source of a checkout, in nanoseconds."""
    below = (path for name in COPIED for path in (tree / name).rglob("*"))
    sources = [path for path in below if path.suffix in (".py", ".smk", ".cpp", ".h") and path.is_file()]
    return {path: path.stat().st_mtime_ns for path in sources}
