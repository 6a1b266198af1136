"""What a build shows of the jobs that run: their rules, seconds, and the last line of each one's log."""

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from coldpress.compiler import steps
from coldpress.compiler.steps import Steps
from coldpress.compiler.workflow.progress import Running, told_now_and_then

BEGUN = """Building in {folder}
rule verify:
    input: package.json
    log: pixel6/logs/verify.log
    jobid: 7
    benchmark: x.tsv
localrule device:
    jobid: 2
"""


def running_after(text: str) -> Running:
    running = Running()
    for line in text.splitlines():
        running.see(line, 10.0)
    return running


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "pixel6" / "logs" / "verify.log"
    path.parent.mkdir(parents=True)
    return path


def test_each_job_is_shown_with_what_it_says(tmp_path: Path, log: Path) -> None:
    running = running_after(BEGUN.format(folder=tmp_path))
    assert running.status(12.0) == "verify, 2 s\ndevice, 2 s"
    log.write_text("verify: began\nverify: 5 of 9 blocks, about 3 minutes left\n")
    assert running.status(70.0) == "verify, 60 s: 5 of 9 blocks, about 3 minutes left\ndevice, 60 s"


def test_a_pipe_is_told_how_far_a_long_step_is(tmp_path: Path, log: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Once for each line that is new, and nothing of what else a log says."""
    running = running_after(BEGUN.format(folder=tmp_path))
    with told_now_and_then(running, every_s=0.01):
        for done in (5, 6):
            line = f"verify: {done} of 9 blocks, about 3 minutes left"
            log.write_text(f"{line}\nverify: perplexity 12.1\n")
            said = ""
            while line not in said:
                said += capfd.readouterr().out
        log.unlink()
    assert said.count("verify") == 1
    assert "perplexity" not in said + capfd.readouterr().out


@pytest.mark.parametrize("ending", ["Finished jobid: 7 (Rule: verify)", "Error in rule verify:\n    jobid: 7"])
def test_what_has_ended_is_not_shown(tmp_path: Path, ending: str) -> None:
    assert running_after(f"{BEGUN.format(folder=tmp_path)}{ending}").status(11.0) == "device, 1 s"


def test_a_terminal_shows_running_jobs_and_the_lines_stay(tmp_path: Path, log: Path) -> None:
    """And the exit code is the build's."""
    log.write_text("verify: 5 of 9 blocks\n")
    text = BEGUN.format(folder=tmp_path) + "Finished jobid: 7 (Rule: verify)\n1 of 2 steps (50%) done\n"
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "coldpress.compiler.workflow.progress"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=theirs, text=True) as job:
        os.close(theirs)
        assert job.stdin is not None
        job.stdin.write(text)
        job.stdin.close()
        shown = b""
        while True:
            try:
                piece = os.read(ours, 1 << 12)
            except OSError:  # the terminal is closed
                break
            if not piece:
                break
            shown += piece
    os.close(ours)
    assert job.returncode == 1, "the build did not end"
    assert b"[  1/2] verify" in shown
    assert b"device, 0 s" in shown


def test_steps_say_how_long_the_rest_takes(caplog: pytest.LogCaptureFixture) -> None:
    """Now and then, never for the last one, and not for stages that take no time."""
    times = iter([0.0, 1.0, 60.0, 61.0, 600.0, 700.0])
    told = Steps("verify", 10, "blocks", clock=lambda: next(times))
    with caplog.at_level("INFO"):
        for count in (1, 1, 1, 2, 5):
            told.add(count)
    assert [record.message for record in caplog.records] == [
        "verify: 2 of 10 blocks, about 4 minutes left",
        "verify: 5 of 10 blocks, about 10 minutes left",
    ]
    assert steps._words(59.6) == "60 s"
    assert steps._words(7200) == "2.0 hours"
