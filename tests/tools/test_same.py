"""tools.same builds with both checkouts, notices a difference, and does not pass where nothing was built."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from tests.support.data import ROOT
from tests.support.models import write_model
from tools.same import Built, concluded, differences

BUILT = Built("", {"units.bin": "a", "embedding.bin": "b"}, (1, 2), {"reads": 3.0})


@pytest.mark.slow
def test_a_checkout_builds_the_same_as_itself(tmp_path):
    """The model has no ReLU: one method is built, the other one refused."""
    write_model(tmp_path / "tiny", num_hidden_layers=2)
    command = [sys.executable, "-m", "tools.same", str(ROOT), str(ROOT), "--data", str(tmp_path)]
    chosen = ["--methods", "dense", "relu", "--config", "calibration_tokens=256", "evaluation_tokens=64"]
    done = subprocess.run([*command, *chosen], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    dense, relu, last = done.stdout.splitlines()
    assert dense.split()[:3] == ["tiny", "dense", "built"]
    assert "method=relu needs a model whose MLP activation is ReLU" in relu
    assert json.loads(last) == {"cases": 2, "built": 1, "different": []}


@pytest.mark.parametrize(
    ("new", "found"),
    [
        (BUILT, []),
        (replace(BUILT, files={"units.bin": "c", "embedding.bin": "b"}), ["file units.bin"]),
        (replace(BUILT, files={"units.bin": "a"}), ["file embedding.bin"]),
        (replace(BUILT, tokens=(1, 3)), ["tokens"]),
        (replace(BUILT, counts={"reads": 4.0}), ["reads 3.0 | 4.0"]),
        (Built("error: too small", {}, (), {}), ["refused by one: built | error: too small"]),
    ],
)
def test_each_difference_is_named(new, found):
    assert differences(BUILT, new) == found


def row(state, *found):
    return {"model": "tiny", "method": "dense", "state": state, "differences": list(found)}


@pytest.mark.parametrize(
    ("rows", "code"),
    [
        ([row("built"), row("refused")], 0),
        ([row("built"), row("built", "tokens")], 1),
        ([row("refused")], 1),
        ([], 1),
    ],
)
def test_only_what_both_have_built_counts(rows, code, capsys):
    assert concluded(rows) == code
    told = capsys.readouterr()
    assert ("nothing was compared" in told.err) == (not any(case["state"] == "built" for case in rows))
    assert json.loads(told.out)["cases"] == len(rows)
