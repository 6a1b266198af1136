"""Device reads: right bytes, checked pages, one more try, and an honest word on the page cache."""

import errno
import logging
import os
import shutil

import numpy as np
import pytest

from runtime import _native
from runtime._extents import Extents
from runtime.artifact.errors import DeviceError
from runtime.artifact.reader import Artifact, open_artifact
from runtime.flash import direct, simulated
from schemas.device import flash_seconds
from schemas.errors import CorruptPageError

PAGE = 4096


def extents(*pages_and_counts):
    numbers = np.array(pages_and_counts, np.int64) * PAGE
    return Extents(numbers[:, 0], numbers[:, 1])


def expected(built, reads):
    image = np.fromfile(built.path / "flash.img", np.uint8)
    parts = [image[start : start + length] for start, length in zip(reads.offsets, reads.lengths, strict=True)]
    return np.concatenate(parts)


@pytest.fixture
def damaged(relu_artifact, tmp_path):
    """A copy of the artifact that a test may damage."""
    return shutil.copytree(relu_artifact.path, tmp_path / "copy")


def flip(path, offset):
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def test_extents_land_one_after_another(relu_artifact):
    reads, buffer = extents((40, 3), (0, 1), (17, 2)), _native.aligned_buffer(6 * PAGE)
    flash = direct.Flash(open_artifact(relu_artifact.path), queue_depth=4)
    seconds = flash.submit(reads, buffer).finish()
    assert seconds > 0
    assert (buffer == expected(relu_artifact, reads)).all()


def test_a_flipped_bit_is_found_and_placed(relu_artifact, damaged):
    section = relu_artifact.manifest.flash.sections[7]
    offset = section.offset_bytes + 5 * PAGE + 77
    flip(damaged / "flash.img", offset)
    flash = direct.Flash(open_artifact(damaged), 4)
    page = offset // PAGE
    with pytest.raises(CorruptPageError, match=rf"flash.img: page {page} at byte .*layer 7, family up_down.*checksum"):
        flash.submit(extents((page - 2, 4)), _native.aligned_buffer(4 * PAGE)).finish()
    flash.submit(extents((page + 1, 2)), _native.aligned_buffer(2 * PAGE)).finish()  # its neighbours are whole


class Failing:
    """Reads that end with a bad page or an error, whatever the device says."""

    def __init__(self, failure):
        self.failure = failure

    def wait(self, count):
        return False

    def finish(self):
        if isinstance(self.failure, OSError):
            raise self.failure
        return self.failure


@pytest.mark.parametrize("failure", [3, OSError(errno.EIO, "Input/output error")])
@pytest.mark.parametrize("ask", [lambda ticket: ticket.finish(), lambda ticket: ticket.wait(1)])
def test_one_failure_is_read_again(relu_artifact, monkeypatch, failure, ask):
    real, calls = _native.start_reads, []

    def flaky(*arguments):
        calls.append(arguments)
        return real(*arguments) if len(calls) > 1 else Failing(failure)

    flash = direct.Flash(open_artifact(relu_artifact.path), 4)
    monkeypatch.setattr(direct._native, "start_reads", flaky)
    reads, buffer = extents((2, 2)), _native.aligned_buffer(2 * PAGE)
    ask(flash.submit(reads, buffer))
    assert len(calls) == 2
    assert (buffer == expected(relu_artifact, reads)).all()


def test_a_second_failure_is_told_and_giving_up_is_not(relu_artifact, monkeypatch):
    flash = direct.Flash(open_artifact(relu_artifact.path), 4)
    error = OSError(errno.EIO, "Input/output error")
    monkeypatch.setattr(direct._native, "start_reads", lambda *arguments: Failing(error))
    ticket = flash.submit(extents((2, 2)), _native.aligned_buffer(2 * PAGE))
    with pytest.raises(DeviceError, match=r"flash.img: a read is failing \(Input/output error\)"):
        ticket.wait(1)
    ticket.abandon()


def test_a_file_cut_short_while_open_is_an_error(damaged):
    flash = direct.Flash(open_artifact(damaged), 4)
    os.truncate(damaged / "flash.img", 10 * PAGE)
    with pytest.raises(DeviceError, match=r"flash.img: a read is failing \(.*truncated"):
        flash.submit(extents((9, 4)), _native.aligned_buffer(4 * PAGE)).finish()


def test_a_file_system_without_direct_reads_is_reported(relu_artifact, monkeypatch, caplog):
    real = Artifact.open

    def refuse(self, name, flags=0):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(self, name, flags)

    monkeypatch.setattr(Artifact, "open", refuse)
    with caplog.at_level(logging.WARNING, "coldpress"):
        flash = direct.Flash(open_artifact(relu_artifact.path), 4)
    assert not flash.direct
    assert "refuses O_DIRECT" in caplog.text
    reads, buffer = extents((3, 1), (30, 5)), _native.aligned_buffer(6 * PAGE)
    flash.submit(reads, buffer).finish()
    assert (buffer == expected(relu_artifact, reads)).all()


def test_the_descriptor_goes_with_the_flash(relu_artifact):
    artifact = open_artifact(relu_artifact.path)
    before = len(os.listdir("/proc/self/fd"))
    flash = direct.Flash(artifact, 4)
    assert len(os.listdir("/proc/self/fd")) == before + 1
    del flash
    assert len(os.listdir("/proc/self/fd")) == before


def test_simulated_reads_take_the_profiles_time_and_leave_the_buffer(relu_artifact):
    artifact = open_artifact(relu_artifact.path)
    profile = artifact.manifest.device.flash
    flash, buffer = simulated.Flash(artifact, 32), np.full(6 * PAGE, 7, np.uint8)
    assert flash.submit(extents((0, 1), (9, 5)), buffer).finish() == flash_seconds(profile, 2, 6 * PAGE)
    assert (buffer == 7).all()
    assert not flash.moves_data
    # 64 reads take two waves of 32 with the device's own queue, 64 of them one at a time
    many = Extents(np.arange(64) * PAGE, np.full(64, PAGE))
    assert simulated.Flash(artifact, 1).submit(many, buffer).finish() == pytest.approx(64 * profile.latency_s.value)


def test_simulated_reads_can_carry_real_bytes(relu_artifact):
    artifact = open_artifact(relu_artifact.path)
    flash = simulated.Flash(artifact, 32, data=direct.Flash(artifact, 4))
    reads, buffer = extents((1, 2)), _native.aligned_buffer(2 * PAGE)
    assert flash.submit(reads, buffer).finish() == flash_seconds(artifact.manifest.device.flash, 1, 2 * PAGE)
    assert (buffer == expected(relu_artifact, reads)).all()
