"""compiler/job.py: what a job does beside running its stage; `python -m compiler` without what it needs."""

import sys
from pathlib import Path

import pytest

from compiler.__main__ import main
from compiler.job import execute
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
