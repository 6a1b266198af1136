"""Measures planted artifacts in a process under the kernel's caps of a device (runtime/cli/emulation)."""

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import Benchmark
from benchmarks.harness.apart import apart
from coldpress.runtime.cli.emulation import emulate
from coldpress.runtime.cli.emulation.disk import Caps
from coldpress.runtime.device_profiles.devices import load_device
from coldpress.runtime.generate.session import Session
from coldpress.schemas.compute import Compute
from coldpress.schemas.device import DeviceProfile, Flash, ReadPoint

SAMPLE, SAMPLE_BYTES = "disk.sample", 64 << 20
OTHER_BYTES = 768 << 20
"""Memory of a process beside its budget: interpreter, libraries, checksums, the artifact's tables."""


def sample_of(folder: Path) -> Path:
    """Returns a folder with a file to measure the disk's speed on, since small artifacts have none large enough."""
    path = folder / "disk" / SAMPLE
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            file.write(os.urandom(SAMPLE_BYTES))
            file.flush()
            os.fsync(file.fileno())  # reads of a file that is still being written would be no sample
    return path.parent


def capped(device: DeviceProfile, caps: Caps, compute: Compute, latency_s: float) -> DeviceProfile:
    """Returns the device as these caps leave it, computing at this machine's rates."""
    flash, page = device.flash, device.flash.page_bytes.value
    curve = (
        ReadPoint(read_bytes=page, bytes_per_s=min(caps.bytes_per_s, caps.reads_per_s * page)),
        ReadPoint(read_bytes=1 << 20, bytes_per_s=caps.bytes_per_s),
    )
    changed = Flash(
        page_bytes=flash.page_bytes,
        queue_depth=flash.queue_depth,
        latency_s=flash.latency_s.model_copy(update={"value": latency_s}),
        read_curve=flash.read_curve.model_copy(update={"value": curve}),
    )
    return device.model_copy(update={"flash": changed, "compute": compute})


def apart_under_caps(
    benchmark: Benchmark[Any], method: str, device: str, scale: float, memory_bytes: int, *arguments: Any
) -> tuple[Any, Caps]:
    """Returns the result of a method in a process under a device's caps, and these caps.

    Args:
        benchmark: The benchmark with the method.
        method: See `apart`.
        device: Name of the device's profile.
        scale: Share of the device's rates; 0 takes as much as the disk gives.
        memory_bytes: Cap on memory, in bytes.
        arguments: See `apart`.
    """
    emulation = emulate(load_device(device), sample_of(benchmark.folder), scale or None, memory_bytes)
    print(emulation.title(), file=sys.stderr, flush=True)
    return apart(benchmark, method, *arguments, run=emulation.run), emulation.caps


def follow(session: Session, text: Sequence[int]) -> list[float]:
    """Decodes a text; returns the seconds of each token but the first."""
    session.decoder.begin(len(text))
    seconds = list[float]()
    for token in text:
        started = time.perf_counter()
        session.decoder.decode(token)
        seconds.append(time.perf_counter() - started)
    return seconds[1:]
