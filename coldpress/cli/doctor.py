"""Says what works on this machine: kernels, direct reads, io_uring, emulation, memory, disk, extras, the hub.

Each line is `ok` or `limited` (something is slower or missing, nothing breaks), with what to do.
"""

import importlib.util
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table

from coldpress.runtime import _native
from coldpress.runtime.cli.declaration import FILE, command, option, switch
from coldpress.runtime.cli.emulation import MECHANISMS
from coldpress.runtime.cli.emulation.disk import disk_of
from coldpress.runtime.dram.memory import physical_bytes
from coldpress.runtime.quantities import show_bytes
from coldpress.schemas.errors import ColdpressError

EXAMPLES = """
  coldpress doctor
  coldpress doctor --folder /mnt/models --json
"""
PAGE_BYTES = 4096
FASTEST = ("avx512vnni", "neon")
EXTRAS = {
    "compiler": ("torch", "transformers", "snakemake", "pulp"),
    "serve": ("starlette", "uvicorn"),
    "eval": ("lm_eval",),
    "llama": ("xllamacpp",),
}
"""Extra -> packages that it installs, which are looked for, not imported."""
HUB_S = 3
SMALL_BYTES = 2 << 30
"""Free disk or memory below this is enough for the demonstration model alone."""


@dataclass(frozen=True)
class Diagnosis:
    name: str
    state: Literal["ok", "limited"]
    found: str
    remedy: str = ""


@dataclass(frozen=True, kw_only=True)
class Doctor:
    folder: Path = option(
        "where artifacts will lie (default: the current folder)", default=Path(), type=FILE, metavar="FOLDER"
    )
    json: bool = switch("print one JSON object")


def run(flags: Doctor) -> int:
    """Prints the findings; raises ColdpressError if there is no such folder."""
    if not flags.folder.is_dir():
        raise ColdpressError(f"--folder {flags.folder} is no folder; name the one where artifacts will lie")
    found = list(findings(flags.folder))
    if flags.json:
        print(json.dumps({"findings": [asdict(one) for one in found]}))
    else:
        table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
        for one in found:
            table.add_row(one.state, one.name, one.found + (f"\n-> {one.remedy}" if one.remedy else ""))
        Console(highlight=False, markup=False).print(table)
    return 0


def findings(folder: Path) -> Iterator[Diagnosis]:
    yield _judged("python", ".".join(map(str, sys.version_info[:3])))
    yield _processor()
    yield _memory()
    yield _disk(folder)
    yield _direct_reads(folder)
    if error := _native.ring_error():
        yield _judged("io_uring", f"the kernel refuses it: {os.strerror(error)}", "nothing: threads read instead")
    else:
        yield _judged("io_uring", "--flash io_uring works")
    yield _emulation(folder)
    yield from map(_extra, EXTRAS)
    yield _hub()


def _judged(name: str, found: str, remedy: str = "") -> Diagnosis:
    return Diagnosis(name, "limited" if remedy else "ok", found, remedy)


def _processor() -> Diagnosis:
    best, cores = _native.cpu(), len(os.sched_getaffinity(0))
    found = f"{cores} cores; kernels for {best}, of {', '.join(_native.cpus())}"
    return _judged(
        "processor", found, "" if best in FASTEST else "nothing: the text is the same, decoding takes longer"
    )


def _memory() -> Diagnosis:
    num_bytes = physical_bytes()
    found = f"{show_bytes(num_bytes)} for this process, control groups counted"
    return _judged("memory", found, "" if num_bytes >= SMALL_BYTES else "give --dram-budget; build on a larger machine")


def _disk(folder: Path) -> Diagnosis:
    free = shutil.disk_usage(folder).free
    found = f"{show_bytes(free)} free in {folder}"
    if not os.access(folder, os.W_OK):
        return _judged("disk", f"{found}, not writable", "build elsewhere: --build-dir FOLDER")
    remedy = "" if free >= SMALL_BYTES else "free some room, or build elsewhere: --build-dir FOLDER"
    return _judged("disk", found, remedy)


def _direct_reads(folder: Path) -> Diagnosis:
    """Writes a page and reads it past the page cache, as the runtime reads weights."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".coldpress-") as file:
            file.write(bytes(PAGE_BYTES))
            file.flush()
            opened = os.open(file.name, os.O_RDONLY | os.O_DIRECT)
            try:
                os.preadv(opened, [_native.aligned_buffer(PAGE_BYTES).data], 0)
            finally:
                os.close(opened)
    except OSError as error:
        remedy = "put artifacts on another file system: here weights also fill the page cache, outside the budget"
        return _judged("O_DIRECT", f"{folder}: {error.strerror}", remedy)
    return _judged("O_DIRECT", f"{folder} can be read past the page cache")


def _emulation(folder: Path) -> Diagnosis:
    try:
        disk = disk_of(folder.resolve())
    except ColdpressError as error:
        return _judged("emulation", str(error), "emulate with --place on a disk")
    reasons = {mechanism.__name__.rpartition(".")[2]: mechanism.why_not(disk) for mechanism in MECHANISMS}
    if works := [name for name, reason in reasons.items() if reason is None]:
        return _judged("emulation", f"devices' disks and memory can be emulated: {works[0]}")
    found = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
    return _judged("emulation", found, "become root, or leave out --emulate")


def _extra(extra: str) -> Diagnosis:
    missing = [name for name in EXTRAS[extra] if importlib.util.find_spec(name) is None]
    if not missing:
        return _judged(extra, "installed")
    return _judged(extra, f"not installed: {', '.join(missing)}", f"pip install '.[{extra}]' in a checkout")


def _hub() -> Diagnosis:
    if os.environ.get("HF_HUB_OFFLINE", "0").upper() in ("1", "ON", "YES", "TRUE"):
        return _judged("hub", "HF_HUB_OFFLINE is set", "unset it, or build from a local folder")
    from urllib.error import HTTPError, URLError
    from urllib.request import Request, urlopen

    url = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    try:
        with urlopen(Request(url, method="HEAD"), timeout=HUB_S):
            pass
    except HTTPError as error:
        return _judged("hub", f"{url} answers ({error.code})")
    except (URLError, OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        return _judged("hub", f"{url} is out of reach: {reason}", "build from a local folder: coldpress build FOLDER")
    return _judged("hub", f"{url} answers")


COMMAND = command(Doctor, run, name="doctor", help=__doc__, examples=EXAMPLES)
