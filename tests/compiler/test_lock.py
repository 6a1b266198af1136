"""compiler/workflow/lock.py: one holder at a time, and a killed holder leaves nothing behind."""

import subprocess
import sys
from pathlib import Path

import pytest

from compiler.workflow.lock import hold
from schemas.errors import ColdpressError
from tests.support.data import ROOT

HOLDER = (
    "import sys, time; from pathlib import Path; from compiler.workflow.lock import hold; "
    "file = hold(Path(sys.argv[1]))"
)


def test_the_second_holder_is_refused(tmp_path: Path) -> None:
    with hold(tmp_path / "build"), pytest.raises(ColdpressError, match="another build runs"):
        hold(tmp_path / "build")
    hold(tmp_path / "build").close()


def test_a_killed_holder_leaves_no_lock(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDER + "; print('held', flush=True); time.sleep(60)", str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        with pytest.raises(ColdpressError):
            hold(tmp_path)
        process.kill()
    hold(tmp_path).close()
