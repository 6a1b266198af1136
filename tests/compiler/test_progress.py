"""compiler/workflow/progress.py: one line per step, then the summary or the error, and the build's exit code."""

import subprocess
import sys
from itertools import count

import pytest

from coldpress.compiler import python_api
from coldpress.compiler.workflow.progress import shorten

RUN = """Building DAG of jobs...
rule order:
    output: build/x/order/000-002.json
    jobid: 5
    wildcards: chunk=000-002
Finished jobid: 5 (Rule: order)
1 of 3 steps (33%) done
localrule device:
    jobid: 2
Finished jobid: 2 (Rule: device)
2 of 3 steps (67%) done
localrule all:
    jobid: 0
Finished jobid: 0 (Rule: all)
3 of 3 steps (100%) done
Complete log(s): x.log
"""


REFUSED = """Building DAG of jobs...
localrule device:
    jobid: 2
Finished jobid: 2 (Rule: device)
1 of 3 steps (33%) done
localrule preflight:
    jobid: 1
RuleException:
CalledProcessError in file "rules/preflight.smk", line 26:
Command 'python -m coldpress.compiler preflight' returned non-zero exit status 2.
Error in rule preflight:
    message: None
    jobid: 1
Logfile pixel6/logs/preflight.log:
================
error: a DRAM budget of 1,000 bytes was asked for, 2,000 are needed; raise dram_budget
================
Finished jobid: 3 (Rule: ingest)
2 of 3 steps (67%) done
Exiting because a job execution failed. Look above for error messages
note: x.coldpress is of an earlier build and was left as it is, with its report
error: a DRAM budget of 1,000 bytes was asked for, 2,000 are needed; raise dram_budget
"""
"""As snakemake prints it, shortened."""


def ran(text: str) -> tuple[list[str], int]:
    """The lines, and the exit code."""
    lines = shorten(text.splitlines(), iter(map(float, count())))
    found: list[str] = []
    while True:
        try:
            found.append(next(lines))
        except StopIteration as ended:
            return found, ended.value


def short(text: str) -> list[str]:
    return ran(text)[0]


def test_one_line_per_step() -> None:
    lines = short(RUN)
    assert len(lines) == 3
    assert lines[0].split() == ["[", "1/3]", "order,", "layers", "0-2", "0.0", "s"]
    assert lines[1].split()[2] == "device"
    assert lines[2].split()[1:3] == ["3/3]", "done"]


def test_the_ending_of_a_build_is_shown() -> None:
    ending = ["", "tiny on pixel6: dense, fp16", "", "  artifact  x"]
    assert short(RUN + "Elapsed time: 0:01:13\n" + "\n".join(ending))[3:] == ending


def test_a_refused_build_says_its_sentence_once() -> None:
    """Beside one line per step, with those that finished after the failure, and the notes."""
    lines, code = ran(REFUSED)
    assert [line.split() for line in lines[:3]] == [
        ["[", "1/3]", "device", "0.0", "s"],
        ["preflight", "failed"],
        ["[", "2/3]", "ingest", "1.0", "s"],
    ]
    assert lines[3:] == REFUSED.splitlines()[-2:]
    assert code == 2


def test_a_refused_configuration_is_one_sentence() -> None:
    text = "Using workflow specific profile x\nerror: model folder /nope does not exist\n"
    assert ran(text) == (["error: model folder /nope does not exist"], 2)


@pytest.mark.parametrize(
    "ending",
    [
        "error: order ended without a sentence of its own: it was killed, or there is a bug; its log is x.log",
        "error: no job began, or none could write its log; snakemake's own output says why",
        "Exiting because a job execution failed. Look above for error messages",
    ],
)
def test_a_crash_shows_everything_from_the_first_error_on(ending: str) -> None:
    """A sentence inside the log of the job does not explain it."""
    failure = f"Error in rule order:\nLogfile x:\nerror: it broke\nKeyError: 3\n{ending}\n"
    lines, code = ran("rule order:\n    jobid: 5\n" + failure)
    assert lines[0].split() == ["order", "failed"]
    assert lines[1:] == failure.splitlines()
    assert code == 1


def test_a_step_that_succeeds_at_the_second_attempt_is_no_error() -> None:
    first, last = RUN.split("localrule all:")
    lines, code = ran(f"{first}Error in rule order:\nTrying to restart job 5.\nlocalrule all:{last}")
    assert [line.split()[-1] for line in lines] == ["s", "s", "failed", "s"]
    assert code == 0


def test_an_error_behind_the_last_step_is_one() -> None:
    assert ran(RUN + "error: metrics.json is of another artifact\n")[1] == 2


def test_a_run_that_never_started_is_shown_whole() -> None:
    text = "usage: snakemake\nsomething odd\n"
    assert ran(text) == (text.splitlines(), 1)


def test_a_run_that_was_killed_is_no_success() -> None:
    lines, code = ran("".join(RUN.splitlines(keepends=True)[:-6]))
    assert lines[0].split()[-2:] == ["0.0", "s"]
    assert code == 1


def test_a_dry_run_is_shown_whole() -> None:
    text = "Building DAG of jobs...\nThis was a dry-run (flag -n).\nThe order of jobs is not that of their run.\n"
    assert ran(text) == (text.splitlines(), 0)


@pytest.mark.parametrize(("text", "code"), [(RUN, 0), (REFUSED, 2), ("", 1)])
def test_the_exit_code_is_the_builds(text: str, code: int) -> None:
    """In a pipe without `pipefail`, as in a plain sh."""
    command = [sys.executable, "-m", "coldpress.compiler.workflow.progress"]
    assert subprocess.run(command, input=text, text=True, capture_output=True, check=False).returncode == code


def test_nothing_to_do() -> None:
    said = "Nothing to be done (all requested files are present and up to date).\neverything is up to date\n\nx\n"
    assert short("Building DAG of jobs...\n" + said) == ["everything is up to date", "", "x"]


def test_a_build_from_python_tells_the_seconds_since_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*_: object) -> subprocess.Popen[str]:
        code = f"import time; time.sleep(0.2); print({RUN!r})"
        return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)

    monkeypatch.setattr(python_api, "started", started)
    told: list[str] = []
    python_api.build("relu-demo", "pixel6", progress=told.append)
    steps = [line for line in told if line.startswith("[")]
    assert [float(line.split()[-2]) >= 0.2 for line in steps] == [True] * 3
