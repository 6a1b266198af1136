"""Device profiles on the command line: a profile's record for a build, this machine measured, fio's figures imported.

`resolve` is what the workflow runs. `measure` and `import-fio` write a YAML profile; `device=<path>.yaml` uses any of
them, and `device=host` takes build/host.yaml where it exists.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from compiler import _host
from compiler._io import replacing, save_record
from compiler.profiles import device_file, load_device
from runtime._quantities import parse_bytes
from schemas.device import DeviceProfile, Figure, Flash, ReadPoint
from schemas.errors import ColdpressError

MEASURED = "measured: python -m compiler.device measure"
IMPORTED = "measured: fio --output-format=json"
FIO_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


def measure(name: str, folder: Path, file_bytes: int) -> DeviceProfile:
    """The profile of this machine, with the storage that holds `folder`."""
    found = _host.measure_flash(folder, file_bytes)
    dram = _host.dram_bytes()
    return DeviceProfile(
        name=name,
        title="The machine at hand, measured",
        dram_bytes=Figure(value=dram, source=MEASURED),
        dram_budget_bytes=Figure(value=dram // 2, source="assumption: half of the DRAM"),
        dram_bytes_per_s=Figure(value=_round(_host.dram_bytes_per_s()), source=MEASURED),
        num_cores=Figure(value=_host.num_cores(), source=MEASURED),
        flash=_flash(found.latency_s, found.queue_depth, found.curve, MEASURED),
    )


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
    storage = _flash(latency_s, queue_depth, tuple(sorted(curve.items())), IMPORTED)
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


def _flash(latency_s: float, queue_depth: int, curve: tuple[tuple[int, float], ...], source: str) -> Flash:
    return Flash(
        page_bytes=Figure(value=_host.PAGE_BYTES, source="assumption: the page of the kernel"),
        queue_depth=Figure(value=queue_depth, source=source),
        latency_s=Figure(value=_round(latency_s), source=source),
        read_curve=Figure(
            value=tuple(ReadPoint(read_bytes=size, bytes_per_s=_round(rate)) for size, rate in curve), source=source
        ),
    )


def _round(value: float) -> float:
    """Four digits: a measurement does not know more."""
    return float(f"{value:.4g}")


def _save_profile(profile: DeviceProfile, path: Path) -> None:
    with replacing(path) as temporary:
        temporary.write_text(
            yaml.safe_dump(profile.model_dump(mode="json"), sort_keys=False, width=120), encoding="utf-8"
        )


def _read_report(path: Path) -> dict[str, Any]:
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise ColdpressError(f"{path}: cannot be read as fio's JSON report: {error}") from error
    if not isinstance(report, dict):
        raise ColdpressError(f"{path}: holds no fio report; write one with --output-format=json")
    return report


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m compiler.device", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    resolve = commands.add_parser("resolve", help="check a profile and write its record")
    resolve.add_argument("device", help="name of a profile, or the path of a YAML file")
    measured = commands.add_parser("measure", help="measure this machine: its DRAM, its cores, the storage of --folder")
    measured.add_argument("--folder", type=Path, help="where artifacts will lie (default: the output's folder)")
    measured.add_argument("--file-size", default="1GiB", help="size of the file that is read (default: 1GiB)")
    imported = commands.add_parser("import-fio", help="take the storage from a report of fio --output-format=json")
    imported.add_argument("report", type=Path)
    imported.add_argument("--base", default="host", help="profile of everything but the storage (default: host)")
    for command in (measured, imported):
        command.add_argument("--name", default="host", help="name of the profile (default: host)")
    for command in (resolve, measured, imported):
        command.add_argument("--output", type=Path, required=True, metavar="FILE")
    return parser


def _execute(arguments: argparse.Namespace) -> None:
    if arguments.command == "resolve":
        save_record(load_device(device_file(arguments.device, Path("build"))), arguments.output)
    elif arguments.command == "measure":
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        folder = arguments.folder or arguments.output.parent
        print(f"measuring the DRAM, and the storage of {folder} with a file of {arguments.file_size}", file=sys.stderr)
        _save_profile(measure(arguments.name, folder, parse_bytes(arguments.file_size)), arguments.output)
    else:
        base = load_device(device_file(arguments.base, Path("build")))
        _save_profile(import_fio(_read_report(arguments.report), arguments.name, base), arguments.output)


def main(argv: list[str] | None = None) -> int:
    """Entry point; bad input ends in one sentence and exit code 2."""
    try:
        _execute(_build_parser().parse_args(argv))
    except ColdpressError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
