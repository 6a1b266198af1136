"""An emulated device: what is capped, who may, what is said where it is impossible, and that nothing is left behind."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from coldpress.cli.main import main
from coldpress.runtime.cli import commands as command_line
from coldpress.runtime.cli import emulation
from coldpress.runtime.cli.emulation import Caps, cgroup_v1, systemd
from coldpress.runtime.cli.emulation import disk as disks
from coldpress.runtime.cli.emulation.disk import Disk, Rates, disk_of
from coldpress.runtime.device_profiles.devices import load_device
from coldpress.schemas.errors import ColdpressError
from tests.support.artifacts import small_device
from tests.support.data import ROOT

PATIENCE_S = 600.0
CAPS = Caps("test-device", 0.5, 1234, 567_000, 200_000_000)
DISK = Disk("/dev/sdx", "8:16", Path("/"))


@pytest.fixture
def capped(tmp_path):
    """A folder on a disk that this process can cap."""
    try:
        reason = cgroup_v1.why_not(disk_of(tmp_path))
    except ColdpressError as error:
        pytest.skip(str(error))
    if reason:
        pytest.skip(reason)
    return tmp_path


def run(*arguments, **options):
    command = [sys.executable, "-m", "coldpress", *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT, **pipes, **options) as process:
        stdout, stderr = process.communicate()
    return SimpleNamespace(returncode=process.returncode, stdout=stdout, stderr=stderr, pid=process.pid)


def groups(pid):
    """What the process made; other tests, and other programs, may have theirs."""
    return {path for folder in cgroup_v1.hierarchies().values() for path in folder.glob(f"coldpress-{pid}")}


TELL = """
import mmap, os, pathlib, sys, time
folders = {}
for line in open("/proc/self/cgroup"):
    _, names, path = line.strip().split(":", 2)
    folders[names] = path
for line in open("/proc/self/mounts"):
    _, folder, kind, options, *_ = line.split()
    for name, file in (("blkio", "blkio.throttle.read_iops_device"), ("memory", "memory.limit_in_bytes")):
        if kind == "cgroup" and name in options.split(","):
            print((pathlib.Path(folder) / folders[name].lstrip("/") / file).read_text().strip())
file, page = os.open(sys.argv[1], os.O_RDONLY | os.O_DIRECT), mmap.mmap(-1, 4096)
start = time.monotonic()
for place in range(0, 1 << 20, 4096):
    os.preadv(file, [page], place)
print("took", time.monotonic() - start)
sys.exit(7)
"""
"""Prints the caps of its own groups, then how long 256 reads take."""


def test_a_command_is_under_the_caps(capped):
    image = capped / "image"
    image.write_bytes(bytes(1 << 20))
    flags = ("--scale", "0.005", "--memory", "200MB", "--place", capped)
    done = run("emulate", "pixel6", *flags, "--", sys.executable, "-c", TELL, image)
    assert done.returncode == 7, done.stderr
    *caps, took = done.stdout.splitlines()
    page = os.sysconf("SC_PAGE_SIZE")
    assert sorted(caps) == sorted([f"{disk_of(capped).number} 500", str(200_000_000 // page * page)])
    assert float(took.split()[1]) > 0.3  # the kernel may give the reads of a slice at once
    assert "Google Pixel 6 on /dev/" in done.stderr
    assert "500 reads/s and 0.021 GB/s, 0.005 of the device's 100000 and 4.200" in done.stderr
    assert not groups(done.pid)


@pytest.mark.slow
def test_too_much_memory_ends_in_a_sentence(capped):
    done = run(
        "emulate", "pixel6", "--scale", "1", "--memory", "60MB", "--", sys.executable, "-c", "x = b'1' * 200_000_000"
    )
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == (
        "error: the command was killed, as the kernel does at the memory cap of 60000000 bytes; give it more with "
        "--memory, or a smaller --dram-budget"
    )
    assert not groups(done.pid)


@pytest.mark.slow
def test_a_signal_ends_the_command_and_leaves_nothing(capped):
    left = "import os, time; os.setsid(); print(os.getpid(), flush=True); time.sleep(600)"
    script = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {left!r}]); time.sleep(600)"
    command = [
        sys.executable,
        "-m",
        "coldpress",
        "emulate",
        "pixel6",
        "--scale",
        "1",
        "--",
        sys.executable,
        "-c",
        script,
    ]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        grandchild = int(process.stdout.readline())
        assert groups(process.pid)
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 128 + signal.SIGTERM
    assert not groups(process.pid)
    end = time.monotonic() + PATIENCE_S
    while Path(f"/proc/{grandchild}/stat").exists() and time.monotonic() < end:
        if Path(f"/proc/{grandchild}/stat").read_text().rpartition(") ")[2].startswith("Z"):
            break  # dead, and nobody's to collect here
        time.sleep(0.05)
    else:
        assert not Path(f"/proc/{grandchild}").exists()


READ_ON = """
import mmap, os, sys
file, page = os.open(sys.argv[1], os.O_RDONLY | os.O_DIRECT), mmap.mmap(-1, 4096)
print(os.getpid(), flush=True)
for place in range(0, 6000 * 4096, 4096):
    os.preadv(file, [page], place % (1 << 20))
"""
"""Prints its number, and then reads for a minute, under the smallest scale of pixel6, 100 reads/s."""


@pytest.mark.slow
def test_what_a_killed_emulation_left_goes_when_the_next_begins(capped):
    """Its groups and its command."""
    image = capped / "image"
    image.write_bytes(bytes(1 << 20))
    flags = ("--scale", "0.001", "--place", str(capped))
    command = [
        sys.executable,
        "-m",
        "coldpress",
        "emulate",
        "pixel6",
        *flags,
        "--",
        sys.executable,
        "-c",
        READ_ON,
    ]
    with subprocess.Popen([*command, str(image)], cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        reader = int(process.stdout.readline())
        process.kill()
        process.wait()
        assert groups(process.pid)
        assert Path(f"/proc/{reader}").exists()
        assert run("emulate", "pixel6", "--scale", "0.01", "--place", capped, "--", "true").returncode == 0
        assert not groups(process.pid)
        stat = Path(f"/proc/{reader}/stat")
        assert not stat.exists() or stat.read_text().rpartition(") ")[2].startswith("Z")


@pytest.mark.slow
def test_bench_measures_under_the_caps(capped, relu_artifact):
    done = run("bench", relu_artifact.path, "--tokens", 2, "--runs", 1, "--emulate", "pixel6", "--scale", "0.5")
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["emulated"]["reads_per_s"] == 50_000
    assert figures["runs"][0]["tokens_per_s"] > 0


# Without a disk to cap


def fake_system(folder):
    for name in ("blkio", "memory"):
        (folder / name / "own").mkdir(parents=True)
        (folder / name / "own" / "cgroup.procs").write_text("")
    (folder / "blkio" / "own" / "blkio.throttle.io_serviced").write_text("")
    (folder / "proc" / "self").mkdir(parents=True)
    (folder / "proc/self/cgroup").write_text("3:cpu:/\n2:blkio:/own\n1:memory:/own\n0::/\n")
    mounts = f"x {folder}/blkio cgroup rw,relatime,blkio 0 0\nx {folder}/memory cgroup rw,memory 0 0\nx / ext4 rw 0 0\n"
    (folder / "proc/self/mounts").write_text(mounts)
    return folder / "proc"


def test_the_first_control_groups_are_made_filled_and_removed(tmp_path, monkeypatch):
    proc, removed = fake_system(tmp_path), []
    monkeypatch.setattr(cgroup_v1, "remove", removed.append)
    assert cgroup_v1.why_not(DISK, proc) is None
    with cgroup_v1.limited(CAPS, DISK, proc) as words:
        blkio, memory = (tmp_path / name / "own" / f"coldpress-{os.getpid()}" for name in ("blkio", "memory"))
        assert words[4:] == [str(blkio), str(memory), "--"]
        assert {path.name: path.read_text() for path in (*blkio.iterdir(), *memory.iterdir())} == {
            "blkio.throttle.read_iops_device": "8:16 1234",
            "blkio.throttle.read_bps_device": "8:16 567000",
            "memory.limit_in_bytes": "200000000",
        }
        said = subprocess.run([*words, "echo", "a b", "--"], stdout=subprocess.PIPE, text=True, check=True).stdout
        assert said == "a b --\n"
        assert (blkio / "cgroup.procs").read_text() == (memory / "cgroup.procs").read_text() != ""
    assert removed == [blkio, memory]
    with pytest.raises(KeyboardInterrupt), cgroup_v1.limited(CAPS, DISK, proc):
        raise KeyboardInterrupt
    assert removed == 2 * [blkio, memory]


def test_groups_of_processes_that_run_are_left_alone(tmp_path):
    ended = subprocess.Popen(["true"])
    ended.wait()
    for name in (f"coldpress-{os.getpid()}", f"coldpress-{ended.pid}", "coldpress-mine", "other-1"):
        (tmp_path / name).mkdir()
    assert cgroup_v1.left_behind([tmp_path]) == [tmp_path / f"coldpress-{ended.pid}"]


def test_why_the_first_control_groups_cannot(tmp_path):
    proc = fake_system(tmp_path)
    (tmp_path / "blkio/own/blkio.throttle.io_serviced").unlink()
    assert "no throttling of /dev/sdx" in (cgroup_v1.why_not(DISK, proc) or "")
    (proc / "self/mounts").write_text("x / ext4 rw 0 0\n")
    assert cgroup_v1.why_not(DISK, proc) == "no controller blkio and memory is mounted"
    (proc / "self/mounts").unlink()
    assert "mounts cannot be read (No such file or directory)" in (cgroup_v1.why_not(DISK, proc) or "")


def test_systemd_makes_the_second_control_groups(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert systemd.why_not(DISK, tmp_path, tmp_path / "controllers") == "systemd does not run here"
    (tmp_path / "systemd-run").write_text('#!/bin/sh\nfor word; do echo "$word"; done\n')
    (tmp_path / "systemd-run").chmod(0o755)
    assert "io and memory are not in" in (systemd.why_not(DISK, tmp_path, tmp_path / "controllers") or "")
    (tmp_path / "controllers").write_text("cpu io memory\n")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert systemd.why_not(DISK, tmp_path, tmp_path / "controllers") == "only root can cap /dev/sdx"
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert systemd.why_not(DISK, tmp_path, tmp_path / "controllers") is None
    with systemd.limited(CAPS, DISK) as words:
        said = subprocess.run([*words, "true"], stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()
    assert [word for word in said if "=" in word] == [
        "IOReadIOPSMax=/dev/sdx 1234",
        "IOReadBandwidthMax=/dev/sdx 567000",
        "MemoryMax=200000000",
        "MemorySwapMax=0",
    ]
    assert said[-2:] == ["--", "true"]


def test_where_nothing_can_cap_the_reasons_are_told(monkeypatch):
    cannot = [
        SimpleNamespace(__name__=f"a.{name}", why_not=lambda _, name=name: f"no {name}") for name in ("one", "two")
    ]
    monkeypatch.setattr(emulation, "MECHANISMS", cannot)
    with pytest.raises(ColdpressError, match=r"test-device cannot be emulated here \(one: no one; two: no two\)"):
        emulation.Emulation(small_device(), DISK, CAPS).run(["true"])


def test_no_device_inside_another(monkeypatch):
    monkeypatch.setenv(emulation.ENVIRONMENT, json.dumps(vars(CAPS)))
    assert emulation.emulated() == CAPS
    with pytest.raises(ColdpressError, match="under the caps of an emulated test-device already"):
        emulation.Emulation(small_device(), DISK, CAPS).run(["true"])


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"device": "x"}', "{" * 5000, "[" * 100_000])
def test_caps_that_somebody_else_wrote_are_refused(text, monkeypatch):
    monkeypatch.setenv(emulation.ENVIRONMENT, text)
    with pytest.raises(ColdpressError, match=r"COLDPRESS_EMULATED is '.*', expected caps as .* writes them; unset it"):
        emulation.emulated()


def test_rates_are_scaled_and_memory_is_not(monkeypatch, tmp_path):
    device = small_device()
    monkeypatch.setattr(emulation, "disk_of", lambda place: DISK)
    caps = emulation.emulate(device, tmp_path, 0.25).caps
    assert caps.reads_per_s == pytest.approx(0.25 * device.flash.iops, abs=1)
    assert caps.bytes_per_s == pytest.approx(0.25 * device.flash.bytes_per_s, abs=1)
    assert caps.memory_bytes == device.dram_budget_bytes.value
    assert emulation.emulate(device, tmp_path, 0.25, 1 << 28).caps.memory_bytes == 1 << 28


def test_a_slower_disk_scales_both_rates_alike():
    device = small_device()  # 80 MB/s in reads of 4 KiB, at most 1 GB/s
    iops = 8e7 / 4096
    assert emulation.scale_of(device, Rates(100 * iops, 1e11)) == 1
    assert emulation.scale_of(device, Rates(iops / 2, 1e11)) == pytest.approx(0.8 / 2, rel=1e-3)
    assert emulation.scale_of(device, Rates(iops / 2, 1e8)) == pytest.approx(0.8 / 10)


def test_the_speed_of_a_folder_without_a_large_file_is_measured_on_one_that_nobody_sees(tmp_path, monkeypatch):
    (tmp_path / "small").write_bytes(b"x" * 4096)
    found = []

    def watched(path):
        found.append((path.stat().st_size, sorted(file.name for file in tmp_path.iterdir())))
        return Rates(1000.0, 1e8)

    monkeypatch.setattr(disks, "_rates", watched)
    assert Disk("/dev/sdx", "8:16", tmp_path).measured() == Rates(1000.0, 1e8)
    assert found[0][0] >= 16 << 20
    assert "small" in found[0][1]
    assert [path.name for path in tmp_path.iterdir()] == ["small"]
    (tmp_path / "large").write_bytes(b"x" * (16 << 20))
    Disk("/dev/sdx", "8:16", tmp_path).measured()
    assert found[1][0] == 16 << 20
    with pytest.raises(ColdpressError, match="this one has 4096; name a larger one or a folder with --place"):
        Disk("/dev/sdx", "8:16", tmp_path / "small").measured()


def test_a_disk_that_is_slower_than_its_caps_is_told(tmp_path):
    def title(rates):
        return emulation.Emulation(small_device(), DISK, CAPS, rates).title()

    assert "but this disk gives only 1000 reads/s and 1.000 GB/s" in title(Rates(1000.0, 1e9))
    assert "but this disk gives only 9999 reads/s and 0.000 GB/s" in title(Rates(9999.0, 1e5))
    assert "but this disk" not in title(Rates(2000.0, 1e9))
    assert "but this disk" not in title(None)


def test_a_run_that_lives_on_the_kernels_burst_is_told():
    """`bench` says so of a row; up to a tenth above the caps counts as capped."""
    assert emulation.exceeded(CAPS, 1234, 567_000) is None
    assert emulation.exceeded(CAPS, 1300, 600_000) is None
    assert emulation.exceeded(CAPS, 100, 5 * 567_000) == pytest.approx(5)
    assert emulation.exceeded(CAPS, 2 * 1234, 0) == pytest.approx(2)


def test_the_place_is_on_the_artifacts_disk(tmp_path, monkeypatch):
    numbers = {tmp_path: "8:16", ROOT: "8:32"}
    monkeypatch.setattr(command_line, "disk_of", lambda place: Disk("/dev/other", numbers[place], place))
    here = emulation.Emulation(small_device(), DISK, CAPS)
    command_line._check_same_disk(here, tmp_path)
    with pytest.raises(ColdpressError, match="is on /dev/sdx, expected /dev/other, the artifact's disk"):
        command_line._check_same_disk(here, ROOT)


def test_a_whole_disk_is_capped_for_its_partition(tmp_path):
    number = f"{os.major(found := tmp_path.stat().st_dev)}:{os.minor(found)}"
    whole, blocks = tmp_path / "devices/sdx", tmp_path / "block"
    (whole / "sdx3").mkdir(parents=True)
    (whole / "dev").write_text("8:16\n")
    (whole / "sdx3/dev").write_text(f"{number}\n")
    (whole / "sdx3/partition").write_text("3\n")
    blocks.mkdir()
    (blocks / number).symlink_to(whole / "sdx3")
    assert disk_of(tmp_path, blocks) == Disk("/dev/sdx", "8:16", tmp_path)
    (blocks / number).unlink()
    with pytest.raises(ColdpressError, match="it is not on a disk that the kernel can cap"):
        disk_of(tmp_path, blocks)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("pixel7", "--", "true"), "unknown device 'pixel7'. Did you mean 'pixel6'?"),
        (("gone.yaml", "--", "true"), "gone.yaml: no such profile"),
        (("gone.json", "--", "true"), "gone.json: No such file"),
        (("pixel6", "--scale", "1.5", "--", "true"), "the scale is 1.5, expected from 0.001 to 1; give another"),
        (("pixel6", "--scale", "nan", "--", "true"), "the scale is nan, expected from 0.001"),
        (("pixel6", "--scale", "1e-9", "--", "true"), "the scale is 1e-09, expected from 0.001"),  # 4 bytes a second
        (("pixel6", "--memory", "much", "--", "true"), "'much' is not an amount of memory"),
        (("pixel6", "--place", "nowhere", "--", "true"), "nowhere: No such file"),
        (("pixel6", "--place", "pyproject.toml", "--", "true"), "measured on a file of at least 16777216 bytes"),
    ],
)
def test_bad_requests_are_refused_in_a_sentence(flags, words, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert main(["emulate", *flags]) == 2
    assert words in capsys.readouterr().err


def test_a_profile_in_yaml_without_a_reader_of_yaml(monkeypatch):
    assert load_device("pixel6").flash.iops == 100_000
    monkeypatch.setitem(sys.modules, "coldpress.runtime.device_profiles.yaml_records", None)
    with pytest.raises(ColdpressError, match=r"needs PyYAML, which is not installed; pip install PyYAML"):
        load_device("pixel6")
