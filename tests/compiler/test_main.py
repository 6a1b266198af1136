"""compiler/job.py: what a job does beside running its stage; `python -m coldpress.compiler` without what it needs."""

import argparse
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from coldpress.cli.main import main as front_door
from coldpress.compiler import __main__, job
from coldpress.compiler.__main__ import main
from coldpress.compiler.io import Workspace, load_arrays
from coldpress.compiler.job import execute
from coldpress.compiler.stages import tokenize
from coldpress.runtime.cli.command_line import flag
from coldpress.schemas.corpus import Corpus
from coldpress.schemas.errors import ColdpressError
from coldpress.schemas.model import Model
from tests.support.models import write_model


def test_a_job_removes_what_a_killed_one_left_half_written(tmp_path: Path) -> None:
    """Only its own: other jobs write into the same folder at the same time."""
    model = write_model(tmp_path / "tiny", num_hidden_layers=1)
    build = tmp_path / "build"
    mine = [build / ".ingest.json.41.tmp", build / "ingest" / ".000.safetensors.41.tmp"]
    others = [build / ".tokenize.json.42.tmp", build / "tokenize" / ".test.safetensors.42.tmp"]
    for path in mine + others:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"half")
    execute("ingest", ["--model", str(model), "--output", str(build / "ingest.json")])
    assert (build / "ingest.json").is_file()
    assert [path.exists() for path in mine] == [False, False]
    assert all(path.exists() for path in others)


def test_a_compiler_that_is_not_installed_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_model(tmp_path / "tiny", num_hidden_layers=1)
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert main(["ingest", "--model", str(model), "--output", str(tmp_path / "ingest.json")]) == 2
    found = capsys.readouterr().err.splitlines()[-1]
    assert found.startswith("error: the compiler needs transformers, which is not installed; pip install")
    assert "[compiler]" in found


@pytest.mark.parametrize(
    ("stage", "flags", "field", "value"),
    [
        ("tokenize", ["--corpus-field", "null"], "corpus_field", "null"),
        ("tokenize", ["--corpus-field", '"text"'], "corpus_field", '"text"'),
        ("tokenize", ["--corpus", "7"], "corpus", "7"),
        ("tokenize", ["--calibration-tokens", "512"], "calibration_tokens", 512),
        ("importance", ["--imatrix", "null"], "imatrix", "null"),
        ("allocate", ["--options", '{"attention": true}'], "options", {"attention": True}),
        ("allocate", ["--density", "null"], "density", None),
    ],
)
def test_a_text_is_read_as_json_only_where_the_field_takes_no_text(
    stage: str, flags: list[str], field: str, value: object
) -> None:
    kind = job.config_of(stage)
    parser = argparse.ArgumentParser()
    for name in kind.model_fields:
        parser.add_argument(flag(name))
    assert job._settings_of(kind, parser.parse_args(flags))[field] == value


def test_what_a_stage_keeps_hangs_on_what_is_in_its_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A record of another content under the same name is other input."""
    seen: list[str] = []

    def run(config: tokenize.TokenizeConfig, model: Model, work: Workspace) -> Corpus:
        seen.append(work.fingerprint)
        raise ColdpressError("enough")

    monkeypatch.setattr(tokenize, "run", run)
    for seed in (0, 0, 1):
        model = write_model(tmp_path / "tiny", num_hidden_layers=1, seed=seed)
        execute("ingest", ["--model", str(model), "--output", str(tmp_path / "ingest.json")])
        with pytest.raises(ColdpressError, match="enough"):
            execute("tokenize", ["--model", str(tmp_path / "ingest.json"), "--output", str(tmp_path / "tokenize.json")])
    assert seen[0] == seen[1] != seen[2]


def test_arrays_of_other_inputs_are_made_again(tmp_path: Path) -> None:
    def value(fingerprint: str, made: float) -> float:
        file = Workspace(tmp_path, fingerprint).once("a", lambda: {"x": np.full(1, made)})
        return float(load_arrays(file, "x")["x"][0])

    assert [value("one", 1), value("one", 2), value("other", 3), value("one", 4)] == [1, 1, 3, 4]


def test_a_stage_that_gets_no_memory_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise MemoryError("Cannot allocate memory (os error 12)")

    monkeypatch.setattr(__main__, "execute", refuse)
    assert main(["layout"]) == 2
    assert capsys.readouterr().err == (
        "error: layout was given no more memory (Cannot allocate memory (os error 12)); free some, then build again\n"
    )


def test_a_stage_that_gets_no_thread_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever pool it is: the system refuses the thread, as under a limit on processes or without memory for it."""

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("can't start new thread")

    def work(*_: object) -> None:
        with ThreadPoolExecutor(2) as pool:
            pool.submit(print)

    monkeypatch.setattr(threading, "_start_new_thread", refuse)
    monkeypatch.setattr(threading, "_start_joinable_thread", refuse, raising=False)  # its name from Python 3.13 on
    monkeypatch.setattr(__main__, "execute", work)
    assert main(["package"]) == 2
    assert capsys.readouterr().err == (
        "error: package may not start another thread; allow more processes and threads (ulimit -u), or free some "
        "memory, then build again\n"
    )


def test_other_errors_of_the_runtime_are_defects(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(*_: object) -> None:
        raise RuntimeError("of our own")

    monkeypatch.setattr(__main__, "execute", work)
    with pytest.raises(RuntimeError, match="of our own"):
        main(["package"])


@pytest.mark.parametrize(
    ("entry", "arguments", "sentence"),
    [
        (main, ["layout", "--nope"], "required: --model, --sparsity"),
        (main, ["tokenize"], "required: "),
        (front_door, ["device", "resolve"], "missing argument 'DEVICE'"),
        (front_door, ["device", "fly"], "no such command 'fly'"),
    ],
)
def test_a_wrong_command_line_is_one_sentence(
    capsys: pytest.CaptureFixture[str], entry: Callable[[list[str]], int], arguments: list[str], sentence: str
) -> None:
    try:
        code: object = entry(arguments)
    except SystemExit as ended:  # argparse, for a stage
        code = ended.code
    assert code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert sentence in line
    assert line.endswith("--help`")
