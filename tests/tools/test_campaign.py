"""A few hundred mutants of artifacts and a few of checkpoints, the same ones every time; ten thousand are for a person
to start (CONTRIBUTING.md)."""

import json
import subprocess
import sys

import pytest

from tests.support.data import ROOT


def figures(*arguments):
    """The last line, with all that failed where something did. Each command is forked from the campaign's process,
    which is quicker the less has been imported there."""
    command = [sys.executable, "-m", "tools.fuzz", *arguments, "--jobs", "2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_mutants_of_artifacts_end_in_a_result_or_in_one_sentence():
    found = figures("--mutants", "250", "--seed", "11")
    assert list(found) == ["fine", "refused", "untidy", "traceback", "crash", "hang", "over_2_gb"]
    assert 5 * 250 < sum(found.values()) < 6 * 250  # one base has no prompts at once
    assert list(found.values())[2:] == [0] * 5
    assert min(found["fine"], found["refused"]) > 50  # neither all whole nor all beyond recognition


@pytest.mark.slow
def test_mutants_of_checkpoints_end_in_a_result_or_in_one_sentence():
    found = figures("--checkpoints", "6", "--seed", "11")
    assert list(found.values())[2:] == [0] * 5
    assert min(found["fine"], found["refused"]) > 0
