"""Caps a command with Linux control groups, version 2 (io.max, memory.max); systemd makes and removes the groups."""

import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from coldpress.runtime.cli.emulation.disk import Caps, Disk


def why_not(
    disk: Disk,
    running: Path = Path("/run/systemd/system"),
    controllers: Path = Path("/sys/fs/cgroup/cgroup.controllers"),
) -> str | None:
    if shutil.which("systemd-run") is None or not running.is_dir():
        return "systemd does not run here"
    offered = controllers.read_text().split() if controllers.exists() else []
    missing = [name for name in ("io", "memory") if name not in offered]
    if missing:
        return f"the controllers {' and '.join(missing)} are not in {controllers}"
    if os.geteuid() != 0:
        return f"only root can cap {disk.name}"
    return None


@contextmanager
def limited(caps: Caps, disk: Disk) -> Generator[list[str]]:
    properties = {
        "IOReadIOPSMax": f"{disk.name} {caps.reads_per_s}",
        "IOReadBandwidthMax": f"{disk.name} {caps.bytes_per_s}",
        "MemoryMax": str(caps.memory_bytes),
        "MemorySwapMax": "0",
    }
    flags = [word for name, value in properties.items() for word in ("--property", f"{name}={value}")]
    yield ["systemd-run", "--quiet", "--scope", "--collect", *flags, "--"]
