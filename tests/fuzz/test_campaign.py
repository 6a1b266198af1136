"""Five hundred mutants of artifacts and a few of checkpoints, the same ones every time; ten thousand are for a person
to start (CONTRIBUTING.md)."""

import json

import pytest

from tests.fuzz.__main__ import main


def figures(capsys, *arguments):
    """The last line, with all that failed where something did."""
    code = main([*arguments, "--jobs", "2"])
    printed = capsys.readouterr()
    assert code == 0, printed.out + printed.err
    return json.loads(printed.out.splitlines()[-1])


@pytest.mark.slow
def test_mutants_of_artifacts_end_in_a_result_or_in_one_sentence(capsys):
    found = figures(capsys, "--mutants", "500", "--seed", "11")
    assert list(found) == ["fine", "refused", "untidy", "traceback", "crash", "hang", "over_2_gb"]
    assert 5 * 500 < sum(found.values()) < 6 * 500  # one base has no prompts at once
    assert list(found.values())[2:] == [0] * 5
    assert min(found["fine"], found["refused"]) > 100  # neither all whole nor all beyond recognition


@pytest.mark.slow
def test_mutants_of_checkpoints_end_in_a_result_or_in_one_sentence(capsys):
    found = figures(capsys, "--checkpoints", "6", "--seed", "11")
    assert list(found.values())[2:] == [0] * 5
    assert min(found["fine"], found["refused"]) > 0
