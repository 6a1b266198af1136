"""compiler/lock.py: one build at a time, no build beside a job of an earlier one, and nothing outlives a
process."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

import pytest

from coldpress.compiler import lock
from coldpress.compiler.lock import BUILD_VARIABLE, build_locks, job_lock
from coldpress.schemas.errors import ColdpressError
from tests.support.data import ROOT

HOLDER = """
import sys, time
from pathlib import Path
from coldpress.compiler.lock import build_locks, job_lock
with build_locks([Path(sys.argv[1])]) if sys.argv[2] == "build" else job_lock(Path(sys.argv[1]), sys.argv[2]):
    print("held", flush=True)
    time.sleep(600)
"""
SINCE = r"since \d{4}-\d\d-\d\d \d\d:\d\d:\d\d"


@contextmanager
def holder(folder: Path, what: str) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the lock of a build, or that of a job of the stage `what`; killed at the end."""
    command = [sys.executable, "-c", HOLDER, str(folder), what]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "held\n"
            yield process
        finally:
            process.kill()


def test_a_second_build_is_refused_and_told_whose_the_first_is(tmp_path: Path) -> None:
    with holder(tmp_path / "tiny", "build") as first:
        pattern = rf"another build of tiny runs, process {first.pid}, {SINCE}; wait for it or name another build_dir$"
        with pytest.raises(ColdpressError, match=pattern), build_locks([tmp_path / "tiny"]):
            pytest.fail("both hold it")
        with build_locks([tmp_path / "other"]):
            pass
    with build_locks([tmp_path / "tiny"]):
        pass


def test_a_lock_ends_with_its_block_and_leaves_only_text(tmp_path: Path) -> None:
    for _ in range(2):
        with build_locks([tmp_path]):
            pass
        assert BUILD_VARIABLE not in os.environ, "else a job of a later build in this process would be refused"
    assert (tmp_path / lock.LOCK_FILE).read_text().count("\n") == 1


def test_no_build_begins_beside_a_job_of_one_that_was_killed(tmp_path: Path) -> None:
    with holder(tmp_path / "tiny", "ingest"):
        pass  # it ended, and is named in the file like the one that runs
    with holder(tmp_path / "tiny", "calibrate") as job:
        pattern = rf"a job of an earlier build of tiny still runs, calibrate, process {job.pid}, {SINCE}; wait for it"
        with pytest.raises(ColdpressError, match=pattern), build_locks([tmp_path / "tiny"]):
            pytest.fail("it began")
    with build_locks([tmp_path / "tiny"]):
        pass


def test_jobs_of_one_build_run_together(tmp_path: Path) -> None:
    with build_locks([tmp_path]), job_lock(tmp_path, "predict"), holder(tmp_path, "predict"):
        pass


def test_a_job_that_comes_late_finds_that_another_build_has_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that waited in a cluster's queue while its build was killed."""
    with build_locks([tmp_path]):
        earlier = os.environ[BUILD_VARIABLE]
    monkeypatch.setenv(BUILD_VARIABLE, earlier.replace('"build"', '"earlier"'))
    with (
        pytest.raises(ColdpressError, match="job order belongs to a build that has ended"),
        job_lock(tmp_path, "order"),
    ):
        pytest.fail("it runs")


@pytest.mark.parametrize("name", ["file", "file/below"])
def test_a_folder_that_cannot_be_is_refused_in_a_sentence(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(ColdpressError, match=r"^cannot build in .*: (File exists|Not a directory), at .*; name another"),
        build_locks([tmp_path / name]),
    ):
        pytest.fail("it is there")


def test_a_job_that_a_new_build_overtakes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next build begins, and lets jobs in, while the job is about to take its lock."""
    with build_locks([tmp_path]):
        own = os.environ[BUILD_VARIABLE]
    locked = lock._locked
    with ExitStack() as held:

        def overtaken(file: IO[str], kind: int) -> bool:
            monkeypatch.setattr(lock, "_locked", locked)
            held.enter_context(build_locks([tmp_path]))
            monkeypatch.setenv(BUILD_VARIABLE, own)
            return locked(file, kind)

        monkeypatch.setattr(lock, "_locked", overtaken)
        with pytest.raises(ColdpressError, match="a newer build owns this folder now"), job_lock(tmp_path, "calibrate"):
            pytest.fail("it runs inside the new build")
