"""compiler/job.py: what a job does beside running its stage."""

from pathlib import Path

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
