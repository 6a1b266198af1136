"""Benchmarks that measure planted artifacts on emulated devices: their options, and a row in a process of its own.

Such a benchmark starts itself once more for every combination of case, device and share in DRAM, under the kernel's
caps of the device (runtime/cli/emulation), with `--one` and what to measure; the answer comes back in a file.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.shared.planted import CASES
from coldpress.runtime.cli.emulation import emulate
from coldpress.runtime.cli.emulation.caps import Caps
from coldpress.runtime.profiles.devices import load_device

SAMPLE, SAMPLE_BYTES = "disk.sample", 64 << 20
OTHER_BYTES = 768 << 20
"""Memory of a process beside its budget: interpreter, libraries, checksums, the artifact's tables."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """What a process under caps measures."""

    case: str
    device: str
    dram: float
    """Share of the bytes on flash that DRAM holds, beside what is always resident."""
    num_tokens: int
    folder: Path
    """Where the artifacts are."""
    output: Path
    """Where the answer goes."""
    extra: Any = None
    """What else the benchmark tells itself; JSON-ready."""


def parser(description: str | None) -> argparse.ArgumentParser:
    """The options that all have."""
    found = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES), metavar="CASE")
    found.add_argument("--devices", nargs="+", default=["pixel6", "oneplus12"], metavar="DEVICE")
    found.add_argument("--dram", nargs="+", type=float, default=[0.1, 0.5], metavar="SHARE")
    found.add_argument("--scale", type=float, help="of the devices' rates (default: as much as the disk gives)")
    found.add_argument("--layers", type=int, default=4)
    found.add_argument("--tokens", type=int, default=40)
    found.add_argument("--folder", type=Path, help="where artifacts are kept for the next run")
    found.add_argument("--one", help=argparse.SUPPRESS)
    return found


@contextmanager
def folder_of(arguments: argparse.Namespace) -> Iterator[Path]:
    """Where artifacts go."""
    with tempfile.TemporaryDirectory(dir=".") as temporary:
        yield arguments.folder or Path(temporary)


def tasks(arguments: argparse.Namespace, case: str, folder: Path, extra: Any = None) -> Iterator[Task]:
    """Every combination of a case."""
    for device in arguments.devices:
        for dram in arguments.dram:
            yield Task(
                case=case,
                device=device,
                dram=dram,
                num_tokens=arguments.tokens,
                folder=folder.resolve(),
                output=folder.resolve() / "row.json",
                extra=extra,
            )


def answered(arguments: argparse.Namespace, measure: Callable[[Task], Any]) -> bool:
    """Measures what this process was started for, if it is such a one."""
    if not arguments.one:
        return False
    told = json.loads(arguments.one)
    task = Task(**told | {name: Path(told[name]) for name in ("folder", "output")})
    task.output.write_text(json.dumps(measure(task)))
    return True


def _write_sample(folder: Path) -> None:
    """A file that the disk's speed is measured on, since small artifacts have none that is large enough."""
    if not (folder / SAMPLE).exists():
        (folder / SAMPLE).write_bytes(os.urandom(SAMPLE_BYTES))


def measured_apart(module: str, task: Task, scale: float | None, memory_bytes: int) -> tuple[Any, Caps]:
    """The answer of a process of `module` under the caps of the task's device, and these."""
    if scale is None:
        _write_sample(task.folder)
    emulation = emulate(load_device(task.device), task.folder, scale, memory_bytes)
    print(f"{task.case}, {task.dram:.0%} in DRAM, {emulation.title()}", flush=True)
    code = emulation.run([sys.executable, "-m", module, "--one", json.dumps(asdict(task), default=str)])
    if code:
        raise SystemExit(f"the measuring process ended with {code}")
    return json.loads(task.output.read_text()), emulation.caps
