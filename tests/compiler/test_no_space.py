"""A full disk ends in one sentence and exit code 2, and leaves nothing half-written."""

import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from compiler import __main__ as command
from compiler._io import save_arrays

ROOM_BYTES = 256 << 10


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own with little room."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = shutil.which("mount")
    options = ["-t", "tmpfs", "-o", f"size={ROOM_BYTES}", "tmpfs", str(folder)]
    if not mount or subprocess.run([mount, *options], capture_output=True, check=False).returncode:
        pytest.skip("no right to mount a small file system")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_arrays_that_do_not_fit_leave_nothing(full_disk: Path) -> None:
    with pytest.raises(OSError, match="No space left") as caught:
        save_arrays(full_disk / "codes.safetensors", {"codes": np.zeros(2 * ROOM_BYTES, np.uint8)})
    assert caught.value.errno == errno.ENOSPC
    assert os.listdir(full_disk) == []


def test_a_stage_says_so_in_one_sentence(
    full_disk: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fill(_stage: str, _arguments: list[str]) -> None:
        save_arrays(full_disk / "codes.safetensors", {"codes": np.zeros(2 * ROOM_BYTES, np.uint8)})

    monkeypatch.setattr(command, "execute", fill)
    assert command.main(["order"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: no space left on the device")
    assert "codes.safetensors" in line
