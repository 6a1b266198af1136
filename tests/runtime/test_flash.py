"""Device reads: right bytes, checked pages, one more try, and an honest word on the page cache."""

import errno
import logging
import os
import shutil
import signal
import subprocess
import sys
import warnings

import numpy as np
import pytest

from coldpress.runtime import _native
from coldpress.runtime.artifact.errors import DeviceError
from coldpress.runtime.artifact.reader import Artifact, open_artifact
from coldpress.runtime.extents import Extents
from coldpress.runtime.flash import direct, io_uring, serial, simulated
from coldpress.schemas.device import flash_seconds
from coldpress.schemas.errors import CorruptPageError
from tests.support.artifacts import open_descriptors
from tests.support.data import ROOT

PAGE = 4096


@pytest.fixture(params=[direct, io_uring], ids=["direct", "io_uring"])
def device(request):
    """A file of runtime/flash that reads flash.img."""
    if request.param is io_uring and _native.ring_error():
        pytest.skip(f"the kernel refuses io_uring ({os.strerror(_native.ring_error())})")
    return request.param


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


def test_extents_land_one_after_another(device, relu_artifact):
    reads, buffer = extents((40, 3), (0, 1), (17, 2)), _native.aligned_buffer(6 * PAGE)
    flash = device.Plugin(open_artifact(relu_artifact.path), queue_depth=4)
    seconds = flash.submit(reads, buffer).finish()
    assert seconds > 0
    assert (buffer == expected(relu_artifact, reads)).all()


def test_a_flipped_bit_is_found_and_placed(device, relu_artifact, damaged):
    section = relu_artifact.manifest.flash.sections[7]
    offset = section.offset_bytes + 5 * PAGE + 77
    flip(damaged / "flash.img", offset)
    flash = device.Plugin(open_artifact(damaged), 4)
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
def test_one_failure_is_read_again(device, relu_artifact, monkeypatch, failure, ask):
    real, calls = device.Plugin.start_reads, []

    def flaky(*arguments):
        calls.append(arguments)
        return real(*arguments) if len(calls) > 1 else Failing(failure)

    flash = device.Plugin(open_artifact(relu_artifact.path), 4)
    monkeypatch.setattr(device.Plugin, "start_reads", staticmethod(flaky))
    reads, buffer = extents((2, 2)), _native.aligned_buffer(2 * PAGE)
    ask(flash.submit(reads, buffer))
    assert len(calls) == 2
    assert (buffer == expected(relu_artifact, reads)).all()


def test_a_second_failure_is_told_and_giving_up_is_not(device, relu_artifact, monkeypatch):
    flash = device.Plugin(open_artifact(relu_artifact.path), 4)
    error = OSError(errno.EIO, "Input/output error")
    monkeypatch.setattr(device.Plugin, "start_reads", staticmethod(lambda *arguments: Failing(error)))
    ticket = flash.submit(extents((2, 2)), _native.aligned_buffer(2 * PAGE))
    with pytest.raises(DeviceError, match=r"flash.img: a read is failing \(Input/output error\)"):
        ticket.wait(1)
    ticket.abandon()


def test_what_is_given_up_in_flight_leaves_the_next_reads_alone(device, relu_artifact):
    flash, reads = device.Plugin(open_artifact(relu_artifact.path), 2), extents((0, 40), (60, 40), (120, 40))
    buffer = _native.aligned_buffer(reads.num_bytes)
    for _ in range(20):
        flash.submit(reads, buffer).abandon()
        buffer[:] = 0  # which a read that went on would undo
        assert not buffer.any()
        first, second = (
            flash.submit(reads, buffer),
            flash.submit(extents((7, 1)), other := _native.aligned_buffer(PAGE)),
        )
        second.finish()
        first.finish()
        assert (buffer == expected(relu_artifact, reads)).all()
        assert (other == expected(relu_artifact, extents((7, 1)))).all()


def test_a_forked_child_reads_too(device, relu_artifact):
    """The threads of the native core are not there any more."""
    flash, reads = device.Plugin(open_artifact(relu_artifact.path), 4), extents((3, 2), (30, 5))
    buffer, wanted = _native.aligned_buffer(reads.num_bytes), expected(relu_artifact, reads)
    flash.submit(reads, buffer).finish()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the child of a process with threads may not do much, which it does not
        child = os.fork()
    if child == 0:
        buffer[:] = 0
        signal.alarm(5)
        flash.submit(reads, buffer).finish()
        os._exit(0 if (buffer == wanted).all() else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_reads_that_a_forked_child_inherits_are_refused(device, tmp_path):
    """Its parent's threads wait for them, not its own."""
    data = np.zeros((1 << 26), np.uint8)
    (tmp_path / "image").write_bytes(data.tobytes())
    start = _native.start_ring_reads if device is io_uring else _native.start_reads
    with (tmp_path / "image").open("rb") as opened, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        places, lengths = np.array([0], np.uint64), np.array([data.size], np.uint64)
        sums = _native.crc32c_pages(data, PAGE)
        reads = start(opened.fileno(), places, lengths, _native.aligned_buffer(data.size), places, PAGE, sums, 4)
        child = os.fork()
        if child == 0:
            signal.alarm(5)
            told = []
            try:
                reads.finish()
            except OSError as error:
                told.append(error.errno)
            del reads
            os._exit(0 if told == [errno.ECANCELED] else 1)
        assert reads.finish() == -1
    assert os.waitpid(child, 0)[1] == 0


NO_RING = """
import ctypes, struct, sys
steps = (0x20, 0, 0, 0), (0x15, 0, 1, int(sys.argv.pop(1))), (0x06, 0, 0, 0x50001), (0x06, 0, 0, 0x7FFF0000)
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(steps), ctypes.addressof(code)))
libc = ctypes.CDLL(None)
assert libc.prctl(38, 1, 0, 0, 0) == libc.prctl(22, 2, program, 0, 0) == 0
from coldpress.cli.main import main
sys.exit(main(sys.argv[1:]))
"""
"""coldpress behind a filter such as containers have: a system call, io_uring_setup (425) or io_uring_enter (426), gives
EPERM."""


def test_a_kernel_that_refuses_io_uring_is_told_in_a_sentence(relu_artifact):
    command = [
        sys.executable,
        "-c",
        NO_RING,
        "425",
        "generate",
        relu_artifact.path,
        "--prompt-ids",
        "1",
        "--max-new-tokens",
        "2",
    ]
    done = subprocess.run([*command, "--flash", "io_uring"], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 2
    assert done.stderr == (
        "error: flash io_uring: the kernel refuses it (Operation not permitted), expected Linux 5.6 or newer without a "
        "filter or a sysctl against it; take --flash direct\n"
    )
    assert subprocess.run(command, capture_output=True, cwd=ROOT, check=False).returncode == 0


def test_a_kernel_that_refuses_reads_of_an_io_uring_is_told_in_a_sentence(relu_artifact):
    """It aborted the process."""
    if _native.ring_error():
        pytest.skip(f"the kernel refuses io_uring ({os.strerror(_native.ring_error())})")
    generate = ["generate", relu_artifact.path, "--prompt-ids", "1", "--max-new-tokens", "2", "--flash", "io_uring"]
    command = [sys.executable, "-c", NO_RING, "426", *generate]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 2, done.stderr
    assert "Operation not permitted in the read at byte" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_file_cut_short_while_open_is_an_error(device, damaged):
    flash = device.Plugin(open_artifact(damaged), 4)
    os.truncate(damaged / "flash.img", 10 * PAGE)
    with pytest.raises(DeviceError, match=r"flash.img: a read is failing \(.*truncated"):
        flash.submit(extents((9, 4)), _native.aligned_buffer(4 * PAGE)).finish()


def test_a_file_system_without_direct_reads_is_reported(device, relu_artifact, monkeypatch, caplog):
    real = Artifact.open

    def refuse(self, name, flags=0):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(self, name, flags)

    monkeypatch.setattr(Artifact, "open", refuse)
    with caplog.at_level(logging.WARNING, "coldpress"):
        flash = device.Plugin(open_artifact(relu_artifact.path), 4)
    assert not flash.direct
    assert "refuses O_DIRECT" in caplog.text
    reads, buffer = extents((3, 1), (30, 5)), _native.aligned_buffer(6 * PAGE)
    flash.submit(reads, buffer).finish()
    assert (buffer == expected(relu_artifact, reads)).all()


def test_the_descriptor_goes_with_the_flash(device, relu_artifact):
    artifact = open_artifact(relu_artifact.path)
    before = open_descriptors(relu_artifact.path, collect=True)
    flash = device.Plugin(artifact, 4)
    assert open_descriptors(relu_artifact.path) == before + 1
    del flash
    assert open_descriptors(relu_artifact.path) == before


def test_serial_reads_are_over_when_they_are_asked_for(relu_artifact, damaged):
    reads = extents((1, 300), (370, 3))
    for _ in range(20):
        buffer = _native.aligned_buffer(reads.num_bytes)
        ticket = serial.Plugin(open_artifact(relu_artifact.path), 4).submit(reads, buffer)
        assert (buffer == expected(relu_artifact, reads)).all()  # without any wait
        assert ticket.finish() > 0
    flip(damaged / "flash.img", 5 * PAGE)
    with pytest.raises(CorruptPageError):
        serial.Plugin(open_artifact(damaged), 4).submit(extents((5, 1)), _native.aligned_buffer(PAGE))


def test_simulated_reads_take_the_profiles_time_and_leave_the_buffer(relu_artifact):
    artifact = open_artifact(relu_artifact.path)
    profile = artifact.manifest.device.flash
    flash, buffer = simulated.Plugin(artifact, 32), np.full(6 * PAGE, 7, np.uint8)
    assert flash.submit(extents((0, 1), (9, 5)), buffer).finish() == flash_seconds(profile, 2, 6 * PAGE)
    assert (buffer == 7).all()
    assert not flash.moves_data
    # 64 reads take two waves of 32 with the device's own queue, 64 of them one at a time
    many = Extents(np.arange(64) * PAGE, np.full(64, PAGE))
    assert simulated.Plugin(artifact, 1).submit(many, buffer).finish() == pytest.approx(64 * profile.latency_s.value)


def test_simulated_reads_can_carry_real_bytes(relu_artifact):
    artifact = open_artifact(relu_artifact.path)
    flash = simulated.Plugin(artifact, 32, data=direct.Plugin(artifact, 4))
    reads, buffer = extents((1, 2)), _native.aligned_buffer(2 * PAGE)
    assert flash.submit(reads, buffer).finish() == flash_seconds(artifact.manifest.device.flash, 1, 2 * PAGE)
    assert (buffer == expected(relu_artifact, reads)).all()
