"""Imports the storage of a device profile from the report of `fio --output-format=json`."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import ValidationError

import coldpress
from coldpress.compiler.device.measure import storage_of
from coldpress.schemas.device import DeviceProfile
from coldpress.schemas.errors import ColdpressError, clipped

IMPORTED = "measured: fio --output-format=json"
JOBS = Path(coldpress.__file__).parent / "profiles" / "fio" / "reads.fio"
"""The job file whose report covers sizes and reads in flight."""
FIO_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
SYNCHRONOUS = ("sync", "psync", "vsync", "pvsync", "pvsync2")
"""Engines that wait for each read, whatever iodepth says."""
NO_STORAGE = ("mmap", "null", "cpuio", "filecreate", "filestat", "filedelete")
"""Engines that read through the page cache, or nothing."""
LIMITS = ("rate", "rate_iops", "rate_min", "rate_iops_min", "thinktime")
"""Options that slow a job down."""
DEEPEST_LEVEL = 64
"""Reads in flight from which on iodepth_level counts all together."""
SAME_SIZE, SAME_SECONDS = 0.02, 0.15
"""Shares by which the mean size of a job's reads may differ from its block size, and its number of processes, by their
seconds, from a whole number."""


@dataclass(frozen=True)
class Stated:
    """Figures besides the storage that a user states for the device; None takes the base's, as an assumption."""

    dram_bytes: int | None = None
    dram_bytes_per_s: float | None = None
    num_cores: int | None = None


def import_fio(report: dict[str, Any], name: str, base: DeviceProfile, stated: Stated) -> DeviceProfile:
    """Returns a profile with the measurements of read jobs of different block sizes and depths; iodepth=1 at the
    smallest size shows the latency, the largest iodepth is the queue depth. fio knows nothing of DRAM, cores and
    accelerator: what `stated` does not have is taken from `base`, and its source says that this is an assumption.
    Raises ColdpressError if there is no read job, no job that gives the latency, or a figure that no device has."""
    try:
        jobs = list(_fio_jobs(report))
    except (AttributeError, TypeError, ValueError, OverflowError) as error:
        raise ColdpressError(f"the report does not have fio's format ({clipped(str(error))}); measure again") from error
    if not jobs:
        raise ColdpressError("fio's report holds no job that read anything; measure with --rw=randread")
    best: dict[tuple[int, int], float] = {}
    for size, depth, rate in jobs:
        best[size, depth] = max(best.get((size, depth), 0.0), rate)
    smallest = min(size for size, _ in best)
    if (smallest, 1) not in best:
        raise ColdpressError(f"fio's report holds no job with --iodepth=1 --bs={smallest}; the latency needs one")
    points = [(size, depth, rate) for (size, depth), rate in best.items()]
    try:
        flash = storage_of(points, max(depth for _, depth in best), _said_of(report))
        return _assumed_from(base, stated).model_copy(
            update={"name": name, "title": f"{name}, storage measured with fio", "flash": flash}
        )
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        told = first["msg"].removeprefix("Value error, ")
        raise ColdpressError(f"fio's report: {place + ': ' if place else ''}{told}") from error


def _said_of(report: dict[str, Any]) -> str:
    version, stamp = report.get("fio version"), report.get("timestamp")
    parts = [version] if isinstance(version, str) and re.fullmatch(r"fio-[\w.-]{1,32}", version) else []
    if isinstance(stamp, int) and 0 < stamp < 1 << 33:
        parts.append(f"{datetime.fromtimestamp(stamp, UTC):%Y-%m-%d}")
    return ", ".join([IMPORTED, *parts])


def _assumed_from(base: DeviceProfile, stated: Stated) -> DeviceProfile:
    """Returns the profile with what is stated; every other figure is said to be assumed from the base."""

    def assumed(values: dict[str, Any]) -> dict[str, Any]:
        return {
            name: {**value, "source": f"assumption: as the profile {base.name} ({value['source']})"}
            if isinstance(value, dict) and "source" in value
            else value
            for name, value in values.items()
        }

    values = assumed(base.model_dump())
    if base.accelerator is not None:
        values["accelerator"] = assumed(values["accelerator"])
    if base.compute is not None:
        values["compute"] = assumed(values["compute"])
    for name, value in vars(stated).items():
        if value is not None:
            values[name] = {"value": value, "source": f"stated: --{name.replace('_', '-')}"}
    if stated.dram_bytes is not None:
        values["dram_budget_bytes"] = {"value": stated.dram_bytes // 2, "source": "assumption: half of the DRAM"}
    return DeviceProfile.model_validate(values)


def _fio_jobs(report: dict[str, Any]) -> Iterator[tuple[int, int, float]]:
    """Yields (bytes of a block, depth, bytes per second) of the jobs that read, in order; entries of one job, which fio
    writes without group_reporting, add up. Raises ColdpressError for a job that does not say what random reads from the
    storage give."""
    shared = report.get("global options", {})
    entries: dict[str, list[dict[str, Any]]] = {}
    for entry in report.get("jobs", []):
        options = {**shared, **entry.get("job options", {})}
        name = clipped(str(entry.get("jobname", "?")))
        if found := entry.get("error") or entry.get("total_err"):
            raise ColdpressError(f"fio's job '{name}' failed with error {found}; measure again, or take the job out")
        if _bytes_per_s(entry):
            own = {"name": name, "options": options, "group": entry.get("groupid")}
            own |= {} if "jobname" in entry else {"number": len(entries)}
            entries.setdefault(json.dumps(own, sort_keys=True), []).append(entry)
    for key, same in entries.items():
        own = json.loads(key)
        try:
            yield _job_of(own["options"], same)
        except ColdpressError as error:
            raise ColdpressError(f"fio's job '{own['name']}' {error}") from error


def _job_of(options: dict[str, Any], entries: list[dict[str, Any]]) -> tuple[int, int, float]:
    """The job of entries of one name and options; its errors, ColdpressErrors, lack the name."""
    _check_storage(options)
    block_bytes = _block_bytes(options)
    per_job = _depth(options, entries)
    for read in (entry["read"] for entry in entries):
        if "bw_bytes" in read and read.get("total_ios") and read.get("io_bytes"):
            mean = read["io_bytes"] / read["total_ios"]
            if abs(mean / block_bytes - 1) > SAME_SIZE:
                raise ColdpressError(
                    f"says bs={block_bytes} and read {mean:.0f} bytes at a time; measure one block size per job, each "
                    "job in a group of its own (stonewall)"
                )
    return block_bytes, per_job * _num_jobs(options, entries), sum(map(_bytes_per_s, entries))


def _check_storage(options: dict[str, Any]) -> None:
    """Refuses options under which a job measures something else than random reads of the storage."""
    engine, pattern = options.get("ioengine"), str(options.get("rw", "read")).partition(":")[0]
    is_direct = options.get("direct", "0") not in ("0", 0) or str(options.get("buffered")) == "0"
    if engine in NO_STORAGE or not is_direct:
        how = f"ioengine={engine}" if engine in NO_STORAGE else "direct=0, which is fio's default"
        raise ColdpressError(f"does not read the storage alone ({how}): DRAM answers; measure with direct=1")
    if pattern != "randread":
        raise ColdpressError(f"has rw={clipped(pattern)}, and units are read at random; measure with rw=randread")
    if limits := [name for name in LIMITS if str(options.get(name, "0")) != "0"]:
        raise ColdpressError(f"is limited by {limits[0]}, not by the storage; measure without it")


def _block_bytes(options: dict[str, Any]) -> int:
    """Returns the size of a read; of several sizes, the first is that of reads, before writes and trims."""
    for name in ("bssplit", "bsrange"):
        if name in options:
            raise ColdpressError(f"reads blocks of several sizes ({name}); give it one bs, or take it out")
    text = str(options.get("bs", "")).partition(",")[0] or "4k"
    match = re.fullmatch(r"(\d{1,12})([kmg]?)(?:i?b?)", text.strip().lower())
    if match is None or not int(match[1]):
        raise ColdpressError(f"has the block size '{clipped(text)}', which is not a number with k, m or g")
    return int(match[1]) * FIO_UNITS[match[2]]


def _depth(options: dict[str, Any], entries: list[dict[str, Any]]) -> int:
    """Returns the reads that each process of a job had in flight: one with an engine that waits for each."""
    engine, depth = options.get("ioengine"), int(options.get("iodepth", 1))
    if engine in SYNCHRONOUS:
        return 1
    for entry in entries:
        levels = {int(name.removeprefix(">=")): float(share) for name, share in entry.get("iodepth_level", {}).items()}
        mostly = max(levels, key=lambda level: levels[level], default=depth)
        if mostly == 1 and engine is None:  # fio's default waits for each read
            return 1
        if 2 * mostly <= min(depth, DEEPEST_LEVEL):
            raise ColdpressError(
                f"says iodepth={depth}, and most of its reads had {mostly} in flight (iodepth_level); measure with an "
                "engine that does not wait for each read, such as libaio or io_uring, or with numjobs"
            )
    return depth


def _num_jobs(options: dict[str, Any], entries: list[dict[str, Any]]) -> int:
    """Returns the number of processes that read at the same time. fio leaves a numjobs of its global options out of the
    report; the processes' seconds together then tell it."""
    stated = int(options.get("numjobs", 1))
    if len(entries) > 1:
        if stated not in (1, len(entries)):
            raise ColdpressError(f"has numjobs={stated} and {len(entries)} entries; measure with group_reporting")
        return len(entries)
    if stated > 1:
        if str(options.get("group_reporting", "0")) == "0":
            raise ColdpressError(f"has numjobs={stated} and one entry; measure with group_reporting")
        return stated
    (entry,) = entries
    runtime, together = entry["read"].get("runtime", 0), entry.get("job_runtime", 0)
    if "group_reporting" not in options or not runtime or not together:
        return stated
    jobs = together / runtime
    if abs(jobs / max(1, round(jobs)) - 1) > SAME_SECONDS:
        raise ColdpressError(
            f"ran for {together} ms in all its processes and for {runtime} ms by the clock, so that their number is "
            "unknown; state numjobs in the job itself"
        )
    return max(1, round(jobs))


def _bytes_per_s(entry: dict[str, Any]) -> float:
    """Returns the bandwidth of an entry's reads; before fio 3.2 it has KiB alone."""
    read = entry.get("read", {})
    return float(read["bw_bytes"] if "bw_bytes" in read else 1024 * read.get("bw", 0))


def read_report(path: Path) -> dict[str, Any]:
    """Returns fio's report; fio writes messages into the same file, before and after it. Raises ColdpressError if the
    file holds none, or several."""
    try:
        data = path.read_bytes()
        text, found, end = data.decode(json.detect_encoding(data)), list[Any](), 0
        for begin in [match.end() - 1 for match in re.finditer(r"^[ \t]*\{", text, re.MULTILINE)] or [0]:
            if begin >= end:  # else it is a part of the last one
                report, end = json.JSONDecoder().raw_decode(text, begin)
                found.append(report)
    except (OSError, ValueError, RecursionError) as error:  # not JSON, not UTF-8, or a number that is too long
        raise ColdpressError(
            f"{path}: cannot be read as fio's JSON report: {error}; write one with --output-format=json"
        ) from error
    if len(found) > 1:
        raise ColdpressError(f"{path}: holds {len(found)} reports of fio, expected one; measure all jobs in one run")
    if not isinstance(found[0], dict):
        raise ColdpressError(f"{path}: holds no fio report; write one with --output-format=json")
    return found[0]
