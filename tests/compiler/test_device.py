"""compiler/device/__main__.py: profiles measured, imported from fio and resolved; every figure says where it comes
from."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from coldpress.compiler.device import __main__ as command
from coldpress.compiler.device import calls, host, kernels
from coldpress.compiler.device import measure as measuring
from coldpress.compiler.device.fio import import_fio
from coldpress.compiler.device.host import FlashFigures, Rounds
from coldpress.compiler.device.measure import MEASURED, measure
from coldpress.compiler.io import load_record
from coldpress.compiler.profiles import PROFILES, load_device
from coldpress.schemas.device import DeviceProfile
from coldpress.schemas.errors import ColdpressError
from tests.support.data import ROOT


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
    assert found.dram_bytes.value == base.dram_bytes.value
    assert found.dram_bytes.source == f"{base.dram_bytes.source} (of the profile pixel6)"
    assert found.flash.page_bytes.source == "assumption: the page of the kernel"


def test_figures_of_an_accelerator_say_whose_they_are() -> None:
    base = load_device(PROFILES / "devices" / "pc-high.yaml")
    found = import_fio(fio_report(("4k", 1, 4e7, 1e5)), "my-pc", base).accelerator
    assert found is not None
    assert base.accelerator is not None
    assert found.sync_s.source == f"{base.accelerator.sync_s.source} (of the profile pc-high)"
    assert found.sync_s.value == base.accelerator.sync_s.value


def test_fio_reports_that_say_too_little(base: DeviceProfile) -> None:
    with pytest.raises(ColdpressError, match="no job that read"):
        import_fio({"jobs": [{"write": {}}]}, "x", base)
    with pytest.raises(ColdpressError, match="iodepth=1 --bs=4096"):
        import_fio(fio_report(("4k", 32, 4e8, 3e5)), "x", base)
    with pytest.raises(ColdpressError, match="block size '4q'"):
        import_fio(fio_report(("4q", 1, 4e8, 3e5)), "x", base)
    with pytest.raises(ColdpressError, match=r"latency_s must be from 0 to 0\.05, found 0\.2"):
        import_fio(fio_report(("4k", 1, 4e8, 2e8)), "x", base)


@pytest.mark.parametrize(
    "report",
    [
        {"jobs": [7]},
        {"jobs": 7},
        {"jobs": [{"read": {"bw_bytes": [1]}}]},
        {"jobs": [{"read": {"bw_bytes": 1, "lat_ns": 3}}]},
        {"jobs": [{"read": {"bw_bytes": 1, "lat_ns": {"mean": 1}}, "job options": {"iodepth": "x"}}]},
    ],
)
def test_a_report_of_another_form_is_refused(base: DeviceProfile, report: dict[str, object]) -> None:
    with pytest.raises(ColdpressError, match="the report does not have fio's format"):
        import_fio(report, "x", base)


def test_import_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report, profile = tmp_path / "fio.json", tmp_path / "phone.yaml"
    report.write_text(json.dumps(fio_report(("4k", 1, 4e7, 1e5), ("128k", 8, 2e9, 5e5))))
    arguments = ["import-fio", str(report), "--base", "oneplus12", "--name", "phone", "--output", str(profile)]
    assert command.main(arguments) == 0
    assert load_device(profile).flash.queue_depth.value == 8
    told = capsys.readouterr().err
    assert "DRAM, cores and accelerator are those of the profile oneplus12; edit them where the device differs" in told
    assert "warning" not in told
    report.write_text("[]")
    assert command.main(arguments) == 2
    assert "holds no fio report" in capsys.readouterr().err


def test_an_import_names_its_base_and_warns_of_one_read_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without, a phone got the DRAM and the cores of the machine that imported the report."""
    report, profile = tmp_path / "fio.json", tmp_path / "phone.yaml"
    report.write_text(json.dumps(fio_report(("4k", 1, 4e7, 1e5))))
    arguments = ["import-fio", str(report), "--name", "phone", "--output", str(profile)]
    assert command.main(arguments) == 2
    assert "--base, the profile that its DRAM, cores and accelerator are taken from" in capsys.readouterr().err
    assert not profile.exists()
    assert command.main([*arguments, "--base", "oneplus12"]) == 0
    assert "warning: the report has one read size, 4096 bytes, whose bandwidth" in capsys.readouterr().err
    assert load_device(profile).dram_bytes.source.endswith("(of the profile oneplus12)")


@pytest.mark.parametrize("name", ["My Phone", "phone_1", "phone-", "a" * 65, ""])
def test_names_are_checked_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    monkeypatch.setattr(command, "measure", lambda *_: pytest.fail("it was measured"))
    (tmp_path / "fio.json").write_text(json.dumps(fio_report(("4k", 1, 4e7, 1e5))))
    for given in (["measure"], ["import-fio", str(tmp_path / "fio.json"), "--base", "pixel6"]):
        assert command.main([*given, "--name", name, "--output", str(tmp_path / "phone.yaml")]) == 2
        told = capsys.readouterr().err
        assert "is no name of a device; use small letters and digits, with single hyphens between them" in told
    assert not (tmp_path / "phone.yaml").exists()


def test_resolve_writes_the_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["resolve", "pixel6", "--output", str(tmp_path / "device.json")]) == 0
    assert load_record(tmp_path / "device.json", DeviceProfile).name == "pixel6"
    assert command.main(["resolve", "pixel", "--output", str(tmp_path / "none.json")]) == 2
    assert "Did you mean 'pixel6'?" in capsys.readouterr().err
    assert not (tmp_path / "none.json").exists()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A measurement takes a moment."""
    monkeypatch.setattr(host, "READ_SIZES", (4096, 65536))
    monkeypatch.setattr(host, "DEPTHS", (1, 2))
    monkeypatch.setattr(host, "ROUND_BYTES", 1 << 20)
    monkeypatch.setattr(host, "DRAM_BYTES", 8 << 20)
    monkeypatch.setattr(kernels, "WEIGHT_BYTES", 1 << 20)
    monkeypatch.setattr(calls, "TOKENS", 1)


@pytest.mark.parametrize("name", ["host.yaml", "host.json"])
def test_measure_this_machine(tmp_path: Path, quick: None, capsys: pytest.CaptureFixture[str], name: str) -> None:
    """A short measurement gives a profile that loads, shows its steps, and leaves no file but it."""
    path = tmp_path / name
    done = command.main(["measure", "--output", str(path), "--file-size", "8MiB"])
    told = capsys.readouterr().err
    if done == 2 and "refuses reads that bypass" in told:
        pytest.skip("the file system of the temporary folder has no O_DIRECT")
    assert done == 0
    for step in ("DRAM, with ", "writing the file", "reads of 4096 bytes, 2 at once", "reads of 65536 bytes, "):
        assert step in told
    assert list(tmp_path.iterdir()) == [path]
    found = load_record(path, DeviceProfile) if path.suffix == ".json" else load_device(path)
    pattern = rf"{MEASURED}, \d{{4}}-\d\d-\d\d, Linux [^,]+, load \d+\.\d"
    assert re.fullmatch(pattern, found.dram_bytes.source)
    assert re.fullmatch(rf"{pattern}, 5 rounds that differ by \d+%, the best", found.dram_bytes_per_s.source)
    assert re.fullmatch(rf"{pattern}, 3 rounds that differ by \d+% at most, the median", found.flash.read_curve.source)
    assert 0 < found.flash.latency_s.value < 1
    assert found.dram_budget_bytes.value <= found.dram_bytes.value
    assert str(tmp_path) not in path.read_text()
    assert found.compute is not None
    assert [(rate.format, rate.density) for rate in found.compute.rates.value] == [
        (name, density) for name in ("fp16", "int4_group32", "int8_group32") for density in (0.1, 0.5, 1.0)
    ]
    assert re.fullmatch(rf"{pattern}, 9 rounds that differ by \d+% at most, the best", found.compute.rates.source)
    costs = [found.compute.request_s, found.compute.reading_s, found.compute.layer_s, found.compute.token_s]
    assert all(cost is not None and "the least processor time" in cost.source for cost in costs)


@pytest.mark.parametrize(
    ("load", "dram", "storage", "warning"),
    [
        (0.4, (10.0, 9.0), (5.0, 4.9), None),
        (9.5, (10.0, 9.0), (5.0, 4.9), "(a load of 9.5 on 4 cores)"),
        (0.4, (10.0, 5.0), (5.0, 4.9), "(rounds of DRAM that differ by 67%)"),
        (0.4, (10.0, 9.0), (5.0, 1.0), "(rounds of storage that differ by 133%)"),
        (9.5, (10.0, 5.0), (5.0, 4.9), "(a load of 9.5 on 4 cores, rounds of DRAM that differ by 67%)"),
    ],
)
def test_a_busy_machine_is_said_to_be_busy(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    load: float,
    dram: tuple[float, ...],
    storage: tuple[float, ...],
    warning: str | None,
) -> None:
    monkeypatch.setattr("os.getloadavg", lambda: (load, 99.0, 99.0))
    monkeypatch.setattr(host, "num_cores", lambda: 4)
    monkeypatch.setattr(host, "dram_rates", lambda: Rounds(dram))
    curve = ((4096, Rounds((4.0, 4.0))), (65536, Rounds(storage)))
    monkeypatch.setattr(host, "measure_flash", lambda *_: FlashFigures(1e-4, 8, curve))
    monkeypatch.setattr(measuring, "computing", lambda *_: None)
    told: list[str] = []
    found = measure("host", tmp_path, 1 << 30, told.append)
    warnings = [text for text in told if text.startswith("warning")]
    assert len(warnings) == (warning is not None)
    assert warning is None or warning in warnings[0]
    assert found.dram_bytes_per_s.value == 10.0
    assert f"load {load}" in found.flash.latency_s.source


def test_measuring_needs_only_the_runtime(tmp_path: Path) -> None:
    """`pip install coldpress` without extras, on the device itself."""
    blocked = ("psutil", "yaml", "torch", "transformers", "pyarrow", "numba", "huggingface_hub", "snakemake")
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({blocked}))\n"
        "from coldpress.compiler.device import __main__ as command\n"
        "from coldpress.compiler.device import calls, host, kernels\n"
        "kernels.WEIGHT_BYTES, calls.TOKENS = 1 << 20, 1\n"
        "host.READ_SIZES, host.DEPTHS, host.DRAM_BYTES = (4096,), (1,), 1 << 20\n"
        "host.ROUND_BYTES = 1 << 16; sys.exit(command.main(sys.argv[1:]))"
    )

    def run(*given: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-c", code, *given], capture_output=True, text=True, cwd=ROOT)

    done = run("measure", "--output", str(tmp_path / "host.json"), "--file-size", "8MiB")
    if "refuses reads that bypass" in done.stderr:
        pytest.skip("the file system of the temporary folder has no O_DIRECT")
    assert done.returncode == 0, done.stderr
    assert load_record(tmp_path / "host.json", DeviceProfile).name == "host"
    for given in (["measure"], ["import-fio", "x.json", "--name", "x", "--base", "pixel6"]):
        refused = run(*given, "--output", str(tmp_path / "host.yaml"))
        assert (refused.returncode, refused.stdout) == (2, "")
        assert refused.stderr == (
            f"error: --output {tmp_path / 'host.yaml'}: a profile in YAML needs PyYAML, which is not installed; "
            "install coldpress[compiler], or give a name that ends in .json\n"
        )
    refused = run("resolve", "pixel6", "--output", str(tmp_path / "device.json"))
    assert refused.returncode == 2
    assert refused.stderr == "error: this needs yaml, which is not installed; install coldpress[compiler]\n"


def test_a_file_too_small_to_measure(tmp_path: Path) -> None:
    with pytest.raises(ColdpressError, match="too small to measure"):
        host.measure_flash(tmp_path, 4096, print)
