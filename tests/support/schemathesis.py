"""Property-based tests of a server from its own description, by the command of schemathesis."""

import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from shutil import which

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "unsupported_method",
)


@dataclass(frozen=True)
class Tested:
    """What schemathesis found."""

    num_operations: int
    num_requests: int
    failures: tuple[str, ...]
    """The kind of each failure, and the operations that have it."""


def schemathesis_run(url: str, folder: Path, phases: Sequence[str], most: int) -> Tested:
    """Sends at most `most` random requests to each operation in each of `phases`, among them `coverage`, which tries
    the bounds of every field; the same ones each time."""
    report = folder / "schemathesis.json"
    command = [which("schemathesis") or "schemathesis", "run", f"{url}/openapi.json", "--seed", "1"]
    command += ["--max-examples", str(most), "--phases", ",".join(phases), "--checks", ",".join(CHECKS)]
    command += ["--continue-on-failure", "--no-color", "--report-json-path", str(report)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=900)
    assert report.is_file(), done.stdout + done.stderr
    found = json.loads(report.read_text())
    assert found["complete"], found["stop_reason"]
    failures = tuple(f"{one['title']}: {', '.join(one['operations'])}" for one in found["failures"])
    assert (done.returncode == 0) == (not failures), done.stdout
    return Tested(found["operations"]["tested"], found["test_cases"]["generated"], failures)
