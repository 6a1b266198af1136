"""Imports the storage of a device profile from the report of `fio --output-format=json`."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from coldpress.compiler.device.measure import storage_of
from coldpress.schemas.device import DeviceProfile
from coldpress.schemas.errors import ColdpressError, clipped

IMPORTED = "measured: fio --output-format=json"
FIO_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


def import_fio(report: dict[str, Any], name: str, base: DeviceProfile) -> DeviceProfile:
    """Returns `base` with its storage replaced by fio's measurements; the sources of all other figures name `base`.

    Args:
        report: The report of `fio --output-format=json`, with read jobs of different block sizes; a job with iodepth=1
            at the smallest size gives the latency, the largest iodepth is the queue depth.
        name: The profile's name.
        base: The profile with DRAM, cores and accelerator, and their sources.

    Raises:
        ColdpressError: if there is no read job, no job that gives the latency, or a figure that no device has.
    """
    try:
        jobs = list(_fio_jobs(report))
    except (AttributeError, TypeError, ValueError, OverflowError) as error:
        raise ColdpressError(f"the report does not have fio's format ({clipped(str(error))}); measure again") from error
    if not jobs:
        raise ColdpressError("fio's report holds no job that read anything; run it with --rw=randread")
    curve: dict[int, float] = {}
    for job in jobs:
        curve[job.block_bytes] = max(curve.get(job.block_bytes, 0.0), job.bytes_per_s)
    alone = [job for job in jobs if job.block_bytes == min(curve) and job.depth == 1]
    if not alone:
        raise ColdpressError(f"fio's report holds no job with --iodepth=1 --bs={min(curve)}; the latency needs one")
    queue_depth = max(job.depth for job in jobs)
    try:
        storage = storage_of(alone[0].latency_s, queue_depth, tuple(sorted(curve.items())), IMPORTED)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise ColdpressError(f"fio's report: {place}: {first['msg'].removeprefix('Value error, ')}") from error
    return _said_to_be_of(base).model_copy(
        update={"name": name, "title": f"{name}, storage measured with fio", "flash": storage}
    )


def _said_to_be_of(base: DeviceProfile) -> DeviceProfile:
    """Returns the profile; the source of each figure besides the storage ends with the profile's name."""

    def named(values: dict[str, Any]) -> dict[str, Any]:
        return {
            name: {**value, "source": f"{value['source']} (of the profile {base.name})"}
            if isinstance(value, dict) and "source" in value
            else value
            for name, value in values.items()
        }

    values = named(base.model_dump())
    if base.accelerator is not None:
        values["accelerator"] = named(values["accelerator"])
    if base.compute is not None:
        values["compute"] = named(values["compute"])
    return DeviceProfile.model_validate(values)


@dataclass(frozen=True)
class _Job:
    """A job of fio that read something."""

    block_bytes: int
    depth: int
    bytes_per_s: float
    latency_s: float


def _fio_jobs(report: dict[str, Any]) -> Iterator[_Job]:
    """Yields every job that read something."""
    shared = report.get("global options", {})
    for job in report.get("jobs", []):
        options = {**shared, **job.get("job options", {})}
        read = job.get("read", {})
        if read.get("bw_bytes"):
            latency_s = float(read.get("lat_ns", read.get("clat_ns", {})).get("mean", 0.0)) / 1e9
            depth = int(options.get("iodepth", 1)) * int(options.get("numjobs", 1))
            yield _Job(_fio_size(str(options.get("bs", "4k"))), depth, float(read["bw_bytes"]), latency_s)


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
