"""A full disk, or whatever else the system refuses, ends in one sentence and exit code 2; nothing is half-written."""

import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from coldpress.compiler import __main__ as command
from coldpress.compiler.io import replacing, save_arrays
from coldpress.compiler.workflow.around_snakemake import _room
from coldpress.compiler.workflow.last_words import exit_code, no_room

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
    assert line.startswith("error: ")
    assert "codes.safetensors: No space left on device (order stopped there)" in line


def test_a_build_that_ends_without_a_sentence_says_that_its_disk_is_full(
    full_disk: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its log, or snakemake's own record, did not fit; the build is refused, and has no bug."""
    line = f"error: {full_disk}: No space left on device; free some room or choose another build_dir, then build again"
    assert (no_room(full_disk), no_room(tmp_path), exit_code(line)) == (line, None, 2)
    with pytest.raises(SystemExit) as ended, _room(full_disk):
        raise RuntimeError("Error recording metadata for finished job")
    assert (ended.value.code, capsys.readouterr().err) == (2, f"{line}\n")
    with pytest.raises(RuntimeError, match="another"), _room(tmp_path):
        raise RuntimeError("another")
    assert not os.listdir(full_disk)


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.EXDEV, errno.ENOLCK, errno.EROFS])
@pytest.mark.parametrize("named", [True, False, 7])
def test_whatever_the_system_refuses_is_told_in_one_sentence(
    number: int, named: bool | int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A descriptor has no name, or is one: then the folder of the stage's record is told."""
    file = tmp_path / "codes.safetensors"

    def refuse(_stage: str, _arguments: list[str]) -> None:
        raise OSError(number, os.strerror(number), *([str(file) if named is True else named] if named else []))

    monkeypatch.setattr(command, "execute", refuse)
    assert command.main(["order", "--output", str(tmp_path / "order.json")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        f"error: {file if named is True else f'a file in {tmp_path}'}: {os.strerror(number)} (order stopped"
    )


def test_a_refused_sync_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """fsync knows a descriptor only."""

    def refuse(_descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match="Input/output error") as caught:
        save_arrays(tmp_path / "codes.safetensors", {"codes": np.zeros(8, np.uint8)})
    assert caught.value.filename == str(tmp_path / "codes.safetensors")
    assert os.listdir(tmp_path) == []


def test_a_folder_that_may_not_be_written_names_the_file_and_not_its_temporary_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Path.open

    def refuse(path: Path, *arguments: object, **named: object) -> object:
        if path.name.endswith(".tmp"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return real(path, *arguments, **named)  # type: ignore[arg-type, call-overload]

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(PermissionError) as caught, replacing(tmp_path / "phone.yaml") as temporary:
        temporary.open("w")
    assert caught.value.filename == str(tmp_path / "phone.yaml")
