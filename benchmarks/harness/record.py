"""Makes the record of a benchmark's figures: the options, the code and the machine that gave them."""

import json
import math
import os
import platform
import re
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import metadata
from itertools import groupby
from pathlib import Path
from typing import Any

import psutil

from benchmarks.harness.benchmark import Size
from benchmarks.harness.inputs import digests
from benchmarks.harness.kept import Kept
from benchmarks.harness.places import ROOT, WORK
from coldpress.runtime.cli.emulation.disk import disk_of

BUSY_SHARE = 0.1
"""Share of all cores in use by others from which a machine counts as busy."""
LOOK_S = 1.0


def load_now() -> float:
    """Returns the share of all cores in use; the caller waits LOOK_S seconds."""
    return psutil.cpu_percent(LOOK_S) / 100


def record(
    name: str,
    size: Size,
    options: Mapping[str, Any],
    figures: Mapping[str, Any],
    kept: Kept,
    load: Mapping[str, float],
    is_timing: bool,
) -> dict[str, Any]:
    """Returns the record, JSON-ready: the figures with everything that a reader asks about them."""
    return {
        "benchmark": name,
        "command": f"python -m benchmarks.{name}{'' if size == 'default' else f' --{size}'}",
        "size": size,
        "options": dict(options),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": _git("rev-parse", "HEAD"),
        "clean": not _git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks/results"),
        "seconds": round(kept.seconds, 1),
        "load": {name: round(share, 2) for name, share in load.items()},
        "busy": any(share > BUSY_SHARE for share in load.values()),
        "machine": machine(is_timing),
        "versions": _versions(),
        "inputs": digests(sorted(kept.inputs)),
        "figures": figures,
    }


def write(path: Path, told: Mapping[str, Any]) -> None:
    """Writes a record as a whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.part")
    temporary.write_text(as_text(told), encoding="utf-8")
    temporary.replace(path)


def as_text(told: Mapping[str, Any]) -> str:
    """Returns a record as JSON with a figure a line; versions share a line, and so do digests of a folder's files."""
    text = json.dumps({**told, "inputs": {}, "versions": {}}, indent=1, sort_keys=True, allow_nan=False)
    folders = groupby(sorted(told["inputs"].items()), key=lambda entry: entry[0].rpartition("/")[0])
    for name, groups in (("inputs", [dict(files) for _, files in folders]), ("versions", [told["versions"]])):
        lines = ",\n".join(f"  {json.dumps(group, sort_keys=True)[1:-1]}" for group in groups if group)
        text = text.replace(f'\n "{name}": {{}}', f'\n "{name}": {{\n{lines}\n }}')
    return text + "\n"


def finite(value: Any) -> Any:
    """Returns figures for JSON; NaN and infinity, which JSON cannot express, become null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value.item() if hasattr(value, "item") else value


def machine(with_disk: bool) -> dict[str, Any]:
    """Describes this machine: processor, own cores, memory, kernel and, if asked, the disk's measured law."""
    cpus = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    model = re.search(r"^model name\s*:\s*(.*)$", cpus, re.MULTILINE)
    found: dict[str, Any] = {
        "processor": model[1] if model else platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "kernel": platform.release(),
    }
    if with_disk:
        rates = disk_of(WORK).measured_if_possible()
        found["disk"] = rates and {"reads_per_s": round(rates.reads_per_s), "bytes_per_s": round(rates.bytes_per_s)}
    return found


def _versions() -> dict[str, str]:
    """Returns the versions of Python and of the libraries in pyproject.toml that are installed."""
    found = {"python": platform.python_version()}
    for requirement in metadata.requires("coldpress") or ():
        name = re.split(r"[^A-Za-z0-9_.-]", requirement, maxsplit=1)[0]
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return dict(sorted(found.items()))


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
