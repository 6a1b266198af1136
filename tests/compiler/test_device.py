"""compiler/device/__main__.py: profiles measured, imported from fio and resolved; every figure says where it comes
from."""

import json
from pathlib import Path

import pytest

from coldpress.compiler.device import __main__ as command
from coldpress.compiler.device import host
from coldpress.compiler.device.fio import import_fio
from coldpress.compiler.device.measure import MEASURED
from coldpress.compiler.io import load_record
from coldpress.compiler.profiles import PROFILES, load_device
from coldpress.schemas.device import DeviceProfile
from coldpress.schemas.errors import ColdpressError


def fio_report(*jobs: tuple[str, int, float, float]) -> dict[str, object]:
    """A report of (block size, I/O depth, bytes per second, mean latency in ns)."""
    return {
        "global options": {"rw": "randread", "direct": "1"},
        "jobs": [
            {
                "job options": {"bs": size, "iodepth": str(depth)},
                "read": {"bw_bytes": rate, "lat_ns": {"mean": latency}},
            }
            for size, depth, rate, latency in jobs
        ],
    }


@pytest.fixture
def base() -> DeviceProfile:
    return load_device(PROFILES / "devices" / "pixel6.yaml")


def test_fio_gives_curve_depth_and_latency(base: DeviceProfile) -> None:
    report = fio_report(("4k", 1, 4e7, 1e5), ("4k", 32, 4e8, 3e5), ("1m", 32, 2e9, 1e7), ("64k", 32, 1e9, 1e6))
    found = import_fio(report, "my-phone", base)
    assert found.name == "my-phone"
    assert found.flash.latency_s.value == 1e-4
    assert found.flash.queue_depth.value == 32
    assert [point.read_bytes for point in found.flash.read_curve.value] == [4096, 65536, 1 << 20]
    assert found.flash.iops == pytest.approx(4e8 / 4096, rel=1e-3)
    assert found.flash.bytes_per_s == 2e9
    assert found.flash.read_curve.source.startswith("measured: fio")
    assert found.dram_bytes == base.dram_bytes


def test_fio_reports_that_say_too_little(base: DeviceProfile) -> None:
    with pytest.raises(ColdpressError, match="no job that read"):
        import_fio({"jobs": [{"write": {}}]}, "x", base)
    with pytest.raises(ColdpressError, match="iodepth=1 --bs=4096"):
        import_fio(fio_report(("4k", 32, 4e8, 3e5)), "x", base)
    with pytest.raises(ColdpressError, match="block size '4q'"):
        import_fio(fio_report(("4q", 1, 4e8, 3e5)), "x", base)


def test_import_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report, profile = tmp_path / "fio.json", tmp_path / "phone.yaml"
    report.write_text(json.dumps(fio_report(("4k", 1, 4e7, 1e5), ("128k", 8, 2e9, 5e5))))
    arguments = ["import-fio", str(report), "--base", "oneplus12", "--name", "phone", "--output", str(profile)]
    assert command.main(arguments) == 0
    assert load_device(profile).flash.queue_depth.value == 8
    report.write_text("[]")
    assert command.main(arguments) == 2
    assert "holds no fio report" in capsys.readouterr().err


def test_resolve_writes_the_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["resolve", "pixel6", "--output", str(tmp_path / "device.json")]) == 0
    assert load_record(tmp_path / "device.json", DeviceProfile).name == "pixel6"
    assert command.main(["resolve", "pixel", "--output", str(tmp_path / "none.json")]) == 2
    assert "Did you mean 'pixel6'?" in capsys.readouterr().err
    assert not (tmp_path / "none.json").exists()


def test_measure_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A short measurement gives a profile that loads, and leaves no file but it."""
    monkeypatch.setattr(host, "READ_SIZES", (4096, 65536))
    monkeypatch.setattr(host, "DEPTHS", (1, 2))
    monkeypatch.setattr(host, "ROUND_BYTES", 1 << 20)
    monkeypatch.setattr(host, "DRAM_BYTES", 8 << 20)
    path = tmp_path / "host.yaml"
    done = command.main(["measure", "--output", str(path), "--file-size", "8MiB"])
    if done == 2 and "refuses reads that bypass" in capsys.readouterr().err:
        pytest.skip("the file system of the temporary folder has no O_DIRECT")
    assert done == 0
    assert list(tmp_path.iterdir()) == [path]
    found = load_device(path)
    assert found.flash.read_curve.source == MEASURED
    assert 0 < found.flash.latency_s.value < 1
    assert found.dram_budget_bytes.value <= found.dram_bytes.value
    assert str(tmp_path) not in path.read_text()


def test_a_file_too_small_to_measure(tmp_path: Path) -> None:
    with pytest.raises(ColdpressError, match="too small to measure"):
        host.measure_flash(tmp_path, 4096)
