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


@dataclass(frozen=True)
class Stated:
    """Figures besides the storage that a user states for the device; None takes the base's, as an assumption."""

    dram_bytes: int | None = None
    dram_bytes_per_s: float | None = None
    num_cores: int | None = None


def import_fio(report: dict[str, Any], name: str, base: DeviceProfile, stated: Stated) -> DeviceProfile:
    """Returns a profile with fio's measurements of the storage, and figures that are stated or assumed for the rest.

    fio knows nothing of DRAM, cores and accelerator. What `stated` does not have is taken from `base`, and its source
    says that this is an assumption, so that no figure of another machine passes for one of this device.

    Args:
        report: The report of `fio --output-format=json`, with read jobs of different block sizes and depths; one with
            iodepth=1 at the smallest size shows the latency, the largest iodepth is the queue depth.
        name: The profile's name.
        base: The profile whose DRAM, cores and accelerator are assumed.
        stated: What is known of the device.

    Raises:
        ColdpressError: if there is no read job, no job that gives the latency, or a figure that no device has.
    """
    try:
        jobs = list(_fio_jobs(report))
    except (AttributeError, TypeError, ValueError, OverflowError) as error:
        raise ColdpressError(f"the report does not have fio's format ({clipped(str(error))}); measure again") from error
    if not jobs:
        raise ColdpressError("fio's report holds no job that read anything; run it with --rw=randread")
    best: dict[tuple[int, int], float] = {}
    for job in jobs:
        place = (job.block_bytes, job.depth)
        best[place] = max(best.get(place, 0.0), job.bytes_per_s)
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
    """Returns the source of fio's figures: its version and the day, where the report has them."""
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


@dataclass(frozen=True)
class _Job:
    """A job of fio that read something."""

    block_bytes: int
    depth: int
    bytes_per_s: float


def _fio_jobs(report: dict[str, Any]) -> Iterator[_Job]:
    shared = report.get("global options", {})
    for job in report.get("jobs", []):
        options = {**shared, **job.get("job options", {})}
        read = job.get("read", {})
        if read.get("bw_bytes"):
            depth = int(options.get("iodepth", 1)) * int(options.get("numjobs", 1))
            yield _Job(_fio_size(str(options.get("bs", "4k"))), depth, float(read["bw_bytes"]))


def _fio_size(text: str) -> int:
    match = re.fullmatch(r"(\d{1,12})([kmg]?)(?:i?b)?", text.lower())
    if match is None:
        raise ColdpressError(f"fio's block size '{clipped(text)}' is not a number with k, m or g")
    return int(match[1]) * FIO_UNITS[match[2]]


def read_report(path: Path) -> dict[str, Any]:
    """Returns fio's report.

    Raises:
        ColdpressError: if the file holds none.
    """
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # not JSON, not UTF-8, or a number that is too long
        raise ColdpressError(f"{path}: cannot be read as fio's JSON report: {error}") from error
    if not isinstance(report, dict):
        raise ColdpressError(f"{path}: holds no fio report; write one with --output-format=json")
    return report
