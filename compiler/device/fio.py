"""The storage of a profile from what `fio --output-format=json` measured."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from coldpress.compiler.device.measure import storage_of
from coldpress.schemas.device import DeviceProfile
from coldpress.schemas.errors import ColdpressError

IMPORTED = "measured: fio --output-format=json"
FIO_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


def import_fio(report: dict[str, Any], name: str, base: DeviceProfile) -> DeviceProfile:
    """`base` with its storage replaced by what fio measured.

    Args:
        report: What `fio --output-format=json` wrote: read jobs of different block sizes; a job with iodepth=1 at the
            smallest size gives the latency, the largest iodepth is the queue depth.
        name: The profile's name.
        base: Where DRAM, cores and accelerator are taken from, with their sources.

    Raises:
        ColdpressError: if there is no read job, or no job that tells the latency.
    """
    jobs = list(_fio_jobs(report))
    if not jobs:
        raise ColdpressError("fio's report holds no job that read anything; run it with --rw=randread")
    curve: dict[int, float] = {}
    for size, _, read in jobs:
        curve[size] = max(curve.get(size, 0.0), float(read["bw_bytes"]))
    alone = [read for size, depth, read in jobs if size == min(curve) and depth == 1]
    if not alone:
        raise ColdpressError(f"fio's report holds no job with --iodepth=1 --bs={min(curve)}; the latency needs one")
    latency_s = float(alone[0].get("lat_ns", alone[0].get("clat_ns", {})).get("mean", 0.0)) / 1e9
    queue_depth = max(depth for _, depth, _ in jobs)
    storage = storage_of(latency_s, queue_depth, tuple(sorted(curve.items())), IMPORTED)
    return base.model_copy(update={"name": name, "title": f"{name}, storage measured with fio", "flash": storage})


def _fio_jobs(report: dict[str, Any]) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """(block bytes, I/O depth, read section) of every job that read."""
    shared = report.get("global options", {})
    for job in report.get("jobs", []):
        options = {**shared, **job.get("job options", {})}
        read = job.get("read", {})
        if read.get("bw_bytes"):
            depth = int(options.get("iodepth", 1)) * int(options.get("numjobs", 1))
            yield _fio_size(str(options.get("bs", "4k"))), depth, read


def _fio_size(text: str) -> int:
    match = re.fullmatch(r"(\d+)([kmg]?)(?:i?b)?", text.lower())
    if match is None:
        raise ColdpressError(f"fio's block size '{text}' is not a number with k, m or g")
    return int(match[1]) * FIO_UNITS[match[2]]


def read_report(path: Path) -> dict[str, Any]:
    """fio's report.

    Raises:
        ColdpressError: if the file holds none.
    """
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise ColdpressError(f"{path}: cannot be read as fio's JSON report: {error}") from error
    if not isinstance(report, dict):
        raise ColdpressError(f"{path}: holds no fio report; write one with --output-format=json")
    return report
