"""compiler/workflow/progress.py: one line per step while all is well, every line once something fails."""

from itertools import count

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


def short(text: str) -> list[str]:
    return list(shorten(text.splitlines(), iter(map(float, count()))))


def test_one_line_per_step() -> None:
    lines = short(RUN)
    assert len(lines) == 3
    assert lines[0].split() == ["[", "1/3]", "order", "0-2", "0.0", "s"]
    assert lines[1].split()[2] == "device"
    assert lines[2].split()[1:3] == ["3/3]", "all"]


def test_the_ending_of_a_build_is_shown() -> None:
    ending = ["", "tiny on pixel6: dense, fp16", "", "  artifact  x"]
    assert short(RUN + "Elapsed time: 0:01:13\n" + "\n".join(ending))[3:] == ending


def test_all_is_shown_from_the_first_error_on() -> None:
    failure = "Error in rule order:\n    message: None\nLogfile x:\nerror: it broke\n"
    assert short("rule order:\n    jobid: 5\n" + failure) == failure.splitlines()


def test_a_run_that_never_started_is_shown_whole() -> None:
    text = "usage: snakemake\nsomething odd\n"
    assert short(text) == text.splitlines()


def test_nothing_to_do() -> None:
    said = "Nothing to be done (all requested files are present and up to date).\neverything is up to date\n\nx\n"
    assert short("Building DAG of jobs...\n" + said) == ["everything is up to date", "", "x"]
