"""compiler/device/command.py: profiles measured, imported from fio and resolved; every figure says where it comes
from."""

import configparser
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from coldpress.cli.main import main
from coldpress.compiler.device import command, host, overheads
from coldpress.compiler.device import measure as measuring
from coldpress.compiler.device.fio import JOBS, Stated, import_fio, read_report
from coldpress.compiler.device.host import GridPoint, Rounds, depth_of
from coldpress.compiler.device.measure import MEASURED, measure, storage_of
from coldpress.compiler.device.shown import held_out_errors
from coldpress.compiler.io import load_record
from coldpress.compiler.profiles import PROFILES
from coldpress.runtime.device_profiles.devices import read_device
from coldpress.runtime.plugins import names
from coldpress.schemas.device import DeviceProfile, flash_seconds
from coldpress.schemas.errors import ColdpressError
from tests.support.data import ROOT
from tests.support.devices import with_compute
from tests.support.statistics import device_of


def run_device(words: list[str]) -> int:
    """Runs `coldpress device`; returns its exit code."""
    return main(["device", *words])


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
    return read_device(PROFILES / "devices" / "pixel6.yaml")


def test_fio_gives_points_depth_and_law(base: DeviceProfile) -> None:
    """A device whose operations, of 8 us, and bytes, at 2 GB/s, add to a latency of 80 us."""
    jobs = [
        (f"{size // 1024}k", depth, size / (8e-6 + 80e-6 / depth + size / 2e9), 1e5)
        for size in (4096, 16384, 65536, 1 << 20)
        for depth in (1, 8, 32)
    ]
    slow_repeat = ("4k", 32, 1e6, 1e5)
    report = fio_report(slow_repeat, *jobs) | {"fio version": "fio-3.33", "timestamp": 1790000000}
    found = import_fio(report, "my-phone", base, Stated(num_cores=6))
    assert found.name == "my-phone"
    flash = found.flash
    assert flash.queue_depth.value == 32
    assert len(flash.read_curve.value) == len(jobs)
    assert flash.law.overlap == 0
    assert flash.latency_s.value == pytest.approx(8e-5, rel=0.01)
    assert flash.iops == pytest.approx(1 / 8e-6, rel=0.01)
    assert flash.bytes_per_s == pytest.approx(2e9, rel=0.01)
    assert float(flash_seconds(flash, 1, 4096)) == pytest.approx(8e-6 + 8e-5 + 4096 / 2e9, rel=0.01)
    assert flash.read_curve.source == "measured: fio --output-format=json, fio-3.33, 2026-09-21"
    assert found.dram_bytes.value == base.dram_bytes.value
    assert found.dram_bytes.source == f"assumption: as the profile pixel6 ({base.dram_bytes.source})"
    assert (found.num_cores.value, found.num_cores.source) == (6, "stated: --num-cores")
    assert flash.page_bytes.source == "assumption: the page of the kernel"
    held = held_out_errors(flash)
    assert held is not None
    assert abs(held).max() < 0.02


def test_the_job_file_covers_sizes_and_reads_in_flight() -> None:
    """As fio reads it: sections with keys; what is shared stands in [global]."""
    jobs = configparser.ConfigParser(allow_no_value=True, comment_prefixes=(";",))
    jobs.read_string(JOBS.read_text())
    shared, own = jobs["global"], [jobs[name] for name in jobs.sections() if name != "global"]
    assert (shared["rw"], shared["direct"]) == ("randread", "1")
    assert {"time_based", "stonewall"} <= set(shared)
    places = {(job["bs"], int(job["iodepth"])) for job in own}
    assert len(places) == len(own)
    sizes, depths = {size for size, _ in places}, {depth for _, depth in places}
    assert len(places) == len(sizes) * len(depths) >= 16
    assert {"4k", "1m"} <= sizes
    assert {1, 32} <= depths


def test_points_deeper_than_the_queue_are_left_out() -> None:
    rates = {1: 4e7, 2: 8e7, 4: 1.5e8, 8: 1.51e8}
    points = [GridPoint(4096, depth, Rounds((rate, rate, rate / 2))) for depth, rate in rates.items()]
    assert depth_of([*points, GridPoint(65536, 16, Rounds((1e9,)))]) == 4
    flash = storage_of([(point.read_bytes, point.in_flight, point.rounds.median) for point in points], 4, "a test")
    assert [point.reads_in_flight for point in flash.read_curve.value] == [1, 2, 4]


def test_reads_in_flight_bound_the_latency_of_noisy_points() -> None:
    """Else the profile would contradict itself, and be refused when it is read."""
    flash = storage_of([(4096, 1, 1e7), (8192, 1, 1e9), (4096, 32, 1e9), (1 << 20, 32, 1e9)], 32, "a test")
    assert flash.latency_s.value <= 8192 / 1e9


def test_figures_of_an_accelerator_say_whose_they_are() -> None:
    base = read_device(PROFILES / "devices" / "pc-high.yaml")
    found = import_fio(fio_report(("4k", 1, 4e7, 1e5)), "my-pc", base, Stated()).accelerator
    assert found is not None
    assert base.accelerator is not None
    assert found.sync_s.source == f"assumption: as the profile pc-high ({base.accelerator.sync_s.source})"
    assert found.sync_s.value == base.accelerator.sync_s.value


def test_fio_reports_that_say_too_little(base: DeviceProfile) -> None:
    with pytest.raises(ColdpressError, match="no job that read"):
        import_fio({"jobs": [{"write": {}}]}, "x", base, Stated())
    with pytest.raises(ColdpressError, match="iodepth=1 --bs=4096"):
        import_fio(fio_report(("4k", 32, 4e8, 3e5)), "x", base, Stated())
    with pytest.raises(ColdpressError, match="block size '4q'"):
        import_fio(fio_report(("4q", 1, 4e8, 3e5)), "x", base, Stated())
    with pytest.raises(ColdpressError, match=r"latency_s must be from 0 to 0\.05, found 1"):
        import_fio(fio_report(("4k", 1, 4096, 1e9)), "x", base, Stated())


POINTS = (("4k", 1, 3e7), ("4k", 32, 4e8), ("64k", 1, 2.5e8), ("64k", 32, 1.4e9), ("512k", 1, 9e8), ("512k", 32, 1.9e9))
"""Block size, reads in flight, bytes per second."""
IN_BYTES = {"4k": 4096, "64k": 65536, "512k": 524288}


def detailed(engine: str = "libaio", **options: str) -> dict[str, Any]:
    """A report with what fio 3 writes of each job; `options` are global."""

    def job(size: str, depth: int, rate: float) -> dict[str, Any]:
        return {
            "jobname": f"{size}-{depth}",
            "groupid": 0,
            "error": 0,
            "job options": {"bs": size, "iodepth": str(depth)},
            "read": {
                "io_bytes": int(rate * 2),
                "bw_bytes": int(rate),
                "bw": int(rate) // 1024,
                "total_ios": int(rate * 2 / IN_BYTES[size]),
                "runtime": 2000,
            },
            "job_runtime": 2001,
            "iodepth_level": {name: 100.0 if name == str(depth) else 0.1 for name in ("1", "2", "4", "8", "16", "32")},
        }

    shared = {"ioengine": engine, "direct": "1", "rw": "randread", **options}
    return {"fio version": "fio-3.36", "global options": shared, "jobs": [job(*point) for point in POINTS]}


def of_points(base: DeviceProfile, report: dict[str, Any]) -> dict[tuple[int, int], float]:
    flash = import_fio(report, "x", base, Stated()).flash
    deepest, curve = flash.queue_depth.value, flash.read_curve.value
    return {(point.read_bytes, point.reads_in_flight or deepest): point.bytes_per_s for point in curve}


def with_processes(change: Callable[[dict[str, Any]], list[dict[str, Any]]], **options: str) -> dict[str, Any]:
    """The same measured by 32 processes with one read in flight each; `change` returns the entries of one job."""
    report = detailed("psync", **options)
    report["jobs"] = [
        each for job in report["jobs"] for each in ([job] if job["jobname"].endswith("-1") else change(job))
    ]
    return report


def in_one_entry(job: dict[str, Any]) -> list[dict[str, Any]]:
    job["job options"] |= {"iodepth": "1", "numjobs": "32", "group_reporting": ""}
    return [job | {"job_runtime": 32 * 2001}]


def with_global_numjobs(job: dict[str, Any]) -> list[dict[str, Any]]:
    """fio leaves it out of the report."""
    job["job options"] |= {"iodepth": "1", "group_reporting": "1"}
    return [job | {"job_runtime": 32 * 2001}]


def in_an_entry_each(job: dict[str, Any]) -> list[dict[str, Any]]:
    job["job options"] |= {"iodepth": "1", "numjobs": "32"}
    shared = {name: value // 32 if name != "runtime" else value for name, value in job["read"].items()}
    return [job | {"read": shared} for _ in range(32)]


@pytest.mark.parametrize("change", [in_one_entry, with_global_numjobs, in_an_entry_each])
def test_reads_in_flight_are_those_of_all_processes(
    base: DeviceProfile, change: Callable[[dict[str, Any]], list[dict[str, Any]]]
) -> None:
    expected = of_points(base, detailed())
    assert of_points(base, with_processes(change)) == pytest.approx(expected, rel=1e-5)


def test_an_engine_that_waits_has_one_read_in_flight(base: DeviceProfile) -> None:
    assert {depth for _, depth in of_points(base, detailed("psync"))} == {1}
    waiting = detailed()
    del waiting["global options"]["ioengine"]
    for job in waiting["jobs"]:
        job["iodepth_level"] = {"1": 100.0, "2": 0.0, "32": 0.0}
    assert {depth for _, depth in of_points(base, waiting)} == {1}


def test_a_report_of_fio_2_has_kib(base: DeviceProfile) -> None:
    report = detailed()
    for job in report["jobs"]:
        del job["read"]["bw_bytes"]
        job["read"]["io_bytes"] //= 1024
    assert of_points(base, report) == pytest.approx(of_points(base, detailed()), rel=1e-4)


@pytest.mark.parametrize("size", ["4k,4k,4k", "4k,64k", "4K", "4kib", "4096"])
def test_block_sizes_in_fios_spellings(base: DeviceProfile, size: str) -> None:
    report = detailed()
    report["jobs"][0]["job options"]["bs"] = size
    assert of_points(base, report) == of_points(base, detailed())


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"error": 5}, "failed with error 5; measure again"),
        ({"job options": {"direct": "0"}}, r"does not read the storage alone \(direct=0, .*; measure with direct=1"),
        ({"job options": {"ioengine": "mmap"}}, r"does not read the storage alone \(ioengine=mmap\)"),
        ({"job options": {"rw": "read"}}, "has rw=read, and units are read at random"),
        ({"job options": {"rate_iops": "500"}}, "is limited by rate_iops"),
        ({"job options": {"bssplit": "64k/50:128k/50"}}, r"reads blocks of several sizes \(bssplit\)"),
        ({"job options": {"bs": "4k-64k"}}, "has the block size '4k-64k', which is not a number"),
        ({"job options": {"bs": "512"}}, "says bs=512 and read 4096 bytes at a time"),
        ({"job options": {"numjobs": "8"}}, "has numjobs=8 and one entry; measure with group_reporting"),
        ({"job options": {"group_reporting": "1"}, "job_runtime": 3000}, "ran for 3000 ms in all its processes and "),
        ({"job options": {"iodepth": "32"}}, "says iodepth=32, and most of its reads had 1 in flight"),
    ],
)
def test_a_job_that_measured_something_else_is_refused_by_name(
    base: DeviceProfile, changes: dict[str, Any], sentence: str
) -> None:
    report = detailed()
    job = report["jobs"][0]
    report["jobs"][0] = job | changes | {"job options": job["job options"] | changes.get("job options", {})}
    with pytest.raises(ColdpressError, match=f"fio's job '4k-1' {sentence}"):
        import_fio(report, "x", base, Stated())


def test_a_report_that_fio_wrote_among_its_messages(tmp_path: Path) -> None:
    path, text = tmp_path / "reads.json", json.dumps(detailed(), indent=2)
    before = "fio: file x exceeds 32-bit tausworthe random generator.\n"
    for written in (before + text, text + "\nfio: terminating\n", f"\ufeff{text}"):
        path.write_text(written, encoding="utf-8")
        assert read_report(path) == detailed()
    path.write_text(text, encoding="utf-16")
    assert read_report(path) == detailed()
    path.write_text(f"{text}\n{text}\n")
    with pytest.raises(ColdpressError, match="holds 2 reports of fio, expected one; measure all jobs in one run"):
        read_report(path)
    path.write_text("no report")
    with pytest.raises(
        ColdpressError, match=r"cannot be read as fio's JSON report: .*; write one with --output-format"
    ):
        read_report(path)


@pytest.mark.parametrize(
    "report",
    [
        {"jobs": [7]},
        {"jobs": 7},
        {"jobs": [{"read": {"bw_bytes": [1]}}]},
        {"jobs": [{"read": {"bw_bytes": 1}, "job options": {"iodepth": "x", "direct": 1, "rw": "randread"}}]},
    ],
)
def test_a_report_of_another_form_is_refused(base: DeviceProfile, report: dict[str, object]) -> None:
    with pytest.raises(ColdpressError, match="the report does not have fio's format"):
        import_fio(report, "x", base, Stated())


def test_import_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report, profile = tmp_path / "fio.json", tmp_path / "phone.yaml"
    report.write_text(json.dumps(fio_report(("4k", 1, 4e7, 1e5), ("128k", 8, 2e9, 5e5))))
    arguments = ["import-fio", str(report), "--base", "oneplus12", "--name", "phone", "--output", str(profile)]
    assert run_device(arguments) == 0
    assert read_device(profile).flash.queue_depth.value == 8
    told = capsys.readouterr().err
    assert (
        "warning: dram_bytes, dram_bytes_per_s, num_cores are assumed as in the profile oneplus12, not the device's own"
    ) in told
    for rate in ("5e10", "50GB", "50GB/s"):
        stated = ("--dram-bytes", "12GB", "--dram-bytes-per-s", rate, "--num-cores", "8")
        assert run_device([*arguments, *stated]) == 0
        told = capsys.readouterr().err
        assert "warning" not in told
        assert f"note: {profile} is replaced, with all figures that it had" in told
        assert read_device(profile).dram_bytes_per_s.value == 5e10
    found = read_device(profile)
    assert (found.dram_bytes.value, found.dram_budget_bytes.value) == (12 * 10**9, 6 * 10**9)
    assert (found.dram_bytes_per_s.value, found.num_cores.value) == (5e10, 8)
    assert found.dram_bytes.source == "stated: --dram-bytes"
    report.write_text("[]")
    assert run_device(arguments) == 2
    assert "holds no fio report" in capsys.readouterr().err


def test_an_import_names_its_base_and_warns_of_one_read_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without, a phone got the DRAM and the cores of the machine that imported the report."""
    report, profile = tmp_path / "fio.json", tmp_path / "phone.yaml"
    report.write_text(json.dumps(fio_report(("4k", 1, 4e7, 1e5))))
    arguments = ["import-fio", str(report), "--name", "phone", "--output", str(profile)]
    assert run_device(arguments) == 2
    assert "--base, the profile that its DRAM, cores and accelerator are assumed from" in capsys.readouterr().err
    assert not profile.exists()
    assert run_device([*arguments, "--base", "oneplus12"]) == 0
    assert "warning: the report has one read size, 4096 bytes, whose bandwidth" in capsys.readouterr().err
    assert read_device(profile).dram_bytes.source.startswith("assumption: as the profile oneplus12 (")


def test_the_job_file_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_device(["fio-jobs"]) == 0
    assert capsys.readouterr().out == JOBS.read_text()


@pytest.mark.slow
def test_a_profile_is_shown_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """macbook-m1-max: 2.25 GB/s in reads of 16 KiB (LLM in a flash, Table 2)."""
    chart = tmp_path / "chart.svg"
    assert run_device(["show", "macbook-m1-max", "--chart", str(chart)]) == 0
    shown = capsys.readouterr().out
    (row,) = [line.split() for line in shown.splitlines() if line.startswith("16 KiB")]
    assert row[2:5] == ["32", "2.25", "2.26"]
    assert "The law misses the points by" in shown
    assert "too few read sizes" in shown
    drawn = chart.read_text()
    assert "32 in flight" in drawn
    first = chart.read_bytes()
    assert run_device(["show", "macbook-m1-max", "--chart", str(chart)]) == 0
    assert chart.read_bytes() == first
    assert run_device(["show", "pixel6", "--chart", str(tmp_path / "chart.png")]) == 2
    assert "a chart is an SVG" in capsys.readouterr().err


def test_two_profiles_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_device(["compare", "oneplus12", "oneplus-ace2"]) == 0
    shown = capsys.readouterr().out
    (row,) = [line.split() for line in shown.splitlines() if line.startswith("256 x 64 KiB")]
    assert float(row[-1]) == pytest.approx(2.0, abs=0.01), "half of the bandwidth"


@pytest.mark.parametrize("name", ["My Phone", "phone_1", "phone-", "a" * 65, ""])
def test_names_are_checked_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    monkeypatch.setattr(command, "measure", lambda *_: pytest.fail("it was measured"))
    (tmp_path / "fio.json").write_text(json.dumps(fio_report(("4k", 1, 4e7, 1e5))))
    for given in (["measure"], ["import-fio", str(tmp_path / "fio.json"), "--base", "pixel6"]):
        assert run_device([*given, "--name", name, "--output", str(tmp_path / "phone.yaml")]) == 2
        told = capsys.readouterr().err
        assert "is no name of a device; use small letters and digits, with single hyphens between them" in told
    assert not (tmp_path / "phone.yaml").exists()


def test_resolve_writes_the_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_device(["resolve", "pixel6", "--output", str(tmp_path / "device.json")]) == 0
    assert load_record(tmp_path / "device.json", DeviceProfile).name == "pixel6"
    assert run_device(["resolve", "pixel", "--output", str(tmp_path / "none.json")]) == 2
    told = capsys.readouterr().err
    assert "Did you mean 'pixel6'?" in told
    assert "(or pixel.yaml, a file)" in told
    assert not (tmp_path / "none.json").exists()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A measurement takes a moment."""
    monkeypatch.setattr(host, "READ_SIZES", (4096, 65536))
    monkeypatch.setattr(host, "DEPTHS", (1, 2))
    monkeypatch.setattr(host, "ROUND_BYTES", 1 << 20)
    monkeypatch.setattr(host, "DRAM_BYTES", 8 << 20)
    monkeypatch.setattr(host, "WEIGHT_BYTES", 1 << 20)
    monkeypatch.setattr(overheads, "CALL_TOKENS", 1)
    monkeypatch.setattr(overheads, "ROUNDS", 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["host.yaml", "host.json"])
def test_measure_this_machine(tmp_path: Path, quick: None, capsys: pytest.CaptureFixture[str], name: str) -> None:
    """A short measurement gives a profile that loads, shows its steps, and leaves no file but it."""
    path = tmp_path / name
    done = run_device(["measure", "--output", str(path), "--file-size", "8MiB"])
    told = capsys.readouterr().err
    if done == 2 and "refuses reads that bypass" in told:
        pytest.skip("the file system of the temporary folder has no O_DIRECT")
    assert done == 0
    for step in ("DRAM, with ", "writing the file", "round 1 of 5: reads of 4096 to 65536 bytes, 1 to 2 at once"):
        assert step in told
    assert list(tmp_path.iterdir()) == [path]
    found = load_record(path, DeviceProfile) if path.suffix == ".json" else read_device(path)
    pattern = rf"{MEASURED}, \d{{4}}-\d\d-\d\d, [^,]+, Linux [^,]+, load \d+\.\d"
    assert re.fullmatch(pattern, found.dram_bytes.source)
    assert re.fullmatch(rf"{pattern}, 5 rounds that differ by \d+%, the best", found.dram_bytes_per_s.source)
    spread = r"5 rounds that differ by \d+% at half of the points, by \d+% at most, the median"
    assert re.fullmatch(rf"{pattern}, {spread}", found.flash.read_curve.source)
    assert "the law misses the points by" in told
    assert 0 < found.flash.latency_s.value < 1
    assert found.dram_budget_bytes.value <= found.dram_bytes.value
    assert str(tmp_path) not in path.read_text()
    assert found.compute is not None
    assert [(rate.format, rate.density) for rate in found.compute.rates.value] == [
        (name, density) for name in names("coldpress.runtime.quantization") for density in (0.1, 0.5, 1.0)
    ]
    assert re.fullmatch(rf"{pattern}, 9 rounds that differ by \d+% at most, the median", found.compute.rates.source)
    assert found.compute.portion_s is not None
    assert found.compute.portion_s.source.endswith("2 rounds, the median seconds")
    costs = [found.compute.request_s, found.compute.reading_s, found.compute.layer_s, found.compute.token_s]
    assert all(cost is not None and "the median processor time" in cost.source for cost in costs)


@pytest.mark.parametrize("cost_s", [0.0, 1e-5, 2.5e-4])
def test_the_cost_of_a_portion_is_the_one_that_explains_the_difference(cost_s: float) -> None:
    """A processor that is slower than flash waits for the first portion alone: 4 layers of 16 portions or of 2."""
    device = with_compute(device_of(latency_s=1e-6), (("int8_group32", 1.0, 1e8),))
    num_bytes = 2048 * 3 * (256 + 256 // 32 * 2)
    few_s = float(flash_seconds(device.flash, 4, num_bytes, 4)) / 2
    many_s = float(flash_seconds(device.flash, 16, num_bytes + 8 * 4096, 2)) / 16  # eight pages are read twice
    assert overheads.cost_of(device, 4 * (many_s - few_s + 14 * cost_s)) == pytest.approx(cost_s, abs=1e-9)


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
    points = (
        GridPoint(4096, 1, Rounds((4.0e7, 4.0e7))),
        GridPoint(65536, 1, Rounds(tuple(1e8 * rate for rate in storage))),
    )
    monkeypatch.setattr(host, "measure_flash", lambda *_: points)
    monkeypatch.setattr(measuring, "computing", lambda *_: None)
    told: list[str] = []
    found = measure("host", tmp_path, 1 << 30, told.append)
    warnings = [text for text in told if text.startswith("warning")]
    assert len(warnings) == (warning is not None)
    assert warning is None or warning in warnings[0]
    assert found.dram_bytes_per_s.value == 10.0
    assert f"load {load}" in found.flash.latency_s.source


@pytest.mark.slow
def test_measuring_needs_only_the_runtime(tmp_path: Path) -> None:
    """`pip install coldpress` without extras, on the device itself."""
    blocked = ("psutil", "yaml", "torch", "transformers", "pyarrow", "huggingface_hub", "snakemake")
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({blocked}))\n"
        "from coldpress.cli.main import main\n"
        "from coldpress.compiler.device import host, overheads\n"
        "host.WEIGHT_BYTES, overheads.CALL_TOKENS = 1 << 20, 1\n"
        "host.READ_SIZES, host.DEPTHS, host.DRAM_BYTES = (4096,), (1,), 1 << 20\n"
        "host.ROUND_BYTES = 1 << 16; sys.exit(main(['device', *sys.argv[1:]]))"
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
            "pip install PyYAML, or give a name that ends in .json\n"
        )
    refused = run("resolve", "pixel6", "--output", str(tmp_path / "device.json"))
    assert refused.returncode == 2
    assert refused.stderr == (
        "error: coldpress device needs yaml, which is not installed; pip install '.[compiler]' in a checkout\n"
    )


def test_a_file_too_small_to_measure(tmp_path: Path) -> None:
    with pytest.raises(ColdpressError, match="too small to measure"):
        host.measure_flash(tmp_path, 4096, print)
