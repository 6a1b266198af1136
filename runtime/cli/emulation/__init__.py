"""Emulates a device on a real disk: the kernel caps reads per second, bytes per second and memory of a command.

Speeds under the caps are measured, not modelled, for our runtime and for any other program. Where this disk is slower
than the device, one stated factor scales both rates; memory is not scaled, and computing runs as fast as this machine
does. The kernel counts a cap over slices of about 0.1 s. A program that computes for a while may then read at the
disk's full rate until its saved-up share is spent, so that short runs are too fast; `exceeded` detects that. The closer
the caps are to the disk's rates, the smaller this effect.

A mechanism is a file of this package, cgroup_v1.py or systemd.py (cgroup v2). Its `why_not(disk)` returns a sentence if
it cannot work here, and its `limited(caps, disk)` yields the words to put before a command.
"""

import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

from coldpress.runtime.cli.emulation import cgroup_v1, systemd
from coldpress.runtime.cli.emulation.disk import Caps, Disk, Rates, disk_of
from coldpress.schemas.device import DeviceProfile
from coldpress.schemas.errors import ColdpressError, clipped, printable

MECHANISMS = (systemd, cgroup_v1)
HEADROOM = 0.8
"""Largest caps, as a share of the disk's rates: the caps must be the limit, even when the disk is a little slower."""
TOLERANCE = 1.1
"""Largest rate, in multiples of a cap, at which a run still counts as capped."""
LEAST_SCALE = 0.001
"""Smallest scale that a user may give: below it a program takes minutes to start, as it is read under the caps."""
ENVIRONMENT = "COLDPRESS_EMULATED"
"""Environment variable of an emulated command: the caps, as JSON."""


@dataclass(frozen=True)
class Emulation:
    device: DeviceProfile
    disk: Disk
    caps: Caps
    disk_rates: Rates | None = None
    """The disk's rates without caps; None if they were not measured."""

    def title(self) -> str:
        flash, caps = self.device.flash, self.caps
        return (
            f"{printable(self.device.title)} on {self.disk.name}: {caps.reads_per_s} reads/s and "
            f"{caps.bytes_per_s / 1e9:.3f} GB/s, {caps.scale:.3f} of the device's "
            f"{flash.iops:.0f} and {flash.bytes_per_s / 1e9:.3f}; memory {caps.memory_bytes / 1e9:.3f} GB; "
            f"computing as fast as this machine{self._slower_disk()}"
        )

    def _slower_disk(self) -> str:
        found, caps = self.disk_rates, self.caps
        if found is None or (found.reads_per_s >= caps.reads_per_s and found.bytes_per_s >= caps.bytes_per_s):
            return ""
        return (
            f"; but this disk gives only {found.reads_per_s:.0f} reads/s and {found.bytes_per_s / 1e9:.3f} GB/s, so "
            "that it limits more than the device would: give a smaller --scale, or none"
        )

    def run(self, command: Sequence[str]) -> int:
        """Runs a command under the caps, with cold caches; returns its exit code, or 128 + n if signal n ended it.
        Raises `ColdpressError` if the kernel cannot cap here, or killed the command for its memory; or if this process
        runs under caps already."""
        if under := emulated():
            raise ColdpressError(
                f"this command runs under the caps of an emulated {under.device} already, expected one device at a "
                "time; start it outside"
            )
        reasons: list[str] = []
        for mechanism in MECHANISMS:
            reason = mechanism.why_not(self.disk)
            if reason is None:
                drop_caches()
                environment = os.environ | {ENVIRONMENT: json.dumps(asdict(self.caps))}
                with mechanism.limited(self.caps, self.disk) as limits:
                    return run_limited(limits, command, environment, self.caps)
            reasons.append(f"{mechanism.__name__.rpartition('.')[2]}: {reason}")
        raise ColdpressError(
            f"{self.device.name} cannot be emulated here ({'; '.join(reasons)}), expected Linux as root with control "
            "groups for disks and memory; a modelled device needs none: --flash simulated"
        )


def emulate(
    device: DeviceProfile, place: Path, scale: float | None = None, memory_bytes: int | None = None
) -> Emulation:
    """Prepares the emulation of a device on the disk that holds `place`.

    Args:
        place: A file or folder; its disk is capped, and measured if `scale` is None.
        scale: The share of the device's rates; None takes as large a share as the disk can give.
        memory_bytes: The cap on memory; None for the DRAM budget of the device's profile.

    Raises:
        ColdpressError: if the place is on no disk, the scale is not from LEAST_SCALE to 1, or the disk cannot be
            measured.
    """
    disk = disk_of(place)
    if scale is not None and not LEAST_SCALE <= scale <= 1:
        raise ColdpressError(f"the scale is {scale:g}, expected from {LEAST_SCALE} to 1; give another --scale, or none")
    rates = None
    if scale is None:
        rates = disk.measured()
        scale = scale_of(device, rates)
    caps = Caps(
        device=device.name,
        scale=scale,
        reads_per_s=max(1, round(scale * device.flash.iops)),
        bytes_per_s=max(1, round(scale * device.flash.bytes_per_s)),
        memory_bytes=device.dram_budget_bytes.value if memory_bytes is None else memory_bytes,
    )
    return Emulation(device, disk, caps, rates)


def scale_of(device: DeviceProfile, rates: Rates) -> float:
    """Returns the largest share of a device's rates, at most 1, that a disk of these rates can emulate."""
    flash = device.flash
    return min(1.0, HEADROOM * min(rates.reads_per_s / flash.iops, rates.bytes_per_s / flash.bytes_per_s))


def exceeded(caps: Caps, reads_per_s: float, bytes_per_s: float) -> float | None:
    """Returns the factor by which a run read faster than the caps, as short runs can; None if it did not."""
    factor = max(reads_per_s / caps.reads_per_s, bytes_per_s / caps.bytes_per_s)
    return factor if factor > TOLERANCE else None


def emulated() -> Caps | None:
    """Returns the caps under which this process runs; None if it is not an emulated command. Raises `ColdpressError` if
    the environment variable holds something else."""
    found = os.environ.get(ENVIRONMENT)
    if found is None:
        return None
    try:
        return Caps(**json.loads(found))
    except (ValueError, TypeError, RecursionError) as error:
        raise ColdpressError(
            f"the environment variable {ENVIRONMENT} is {clipped(found)!r}, expected caps as `coldpress emulate` "
            "writes them; unset it"
        ) from error


def drop_caches() -> None:
    """Drops the kernel's page cache, so that a command starts as on a device where no file is in memory. Raises
    `ColdpressError` if this process may not drop it."""
    os.sync()  # the kernel drops only pages that are written to disk
    try:
        Path("/proc/sys/vm/drop_caches").write_text("1")
    except OSError as error:
        raise ColdpressError(f"the page cache cannot be dropped ({error.strerror}); run as root") from error


SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PATIENCE_S = 5.0
"""Time for a command to end after a signal, before it is killed."""


def run_limited(limits: Sequence[str], command: Sequence[str], environment: Mapping[str, str], caps: Caps) -> int:
    """Runs `command` behind the words that limit it; returns its exit code, or 128 + n if signal n ended it. Raises
    `ColdpressError` if the kernel killed the command, as it does at the memory cap."""
    told: list[int] = []
    child: subprocess.Popen[bytes] | None = None

    def tell(number: int, _: FrameType | None) -> None:
        told.append(number)
        if child:
            _signal(child, number)

    before = {number: signal.signal(number, tell) for number in SIGNALS}
    try:
        # a new process group: the terminal's interrupt reaches only us, and we signal the command with its children
        child = subprocess.Popen([*limits, *command], env=dict(environment), process_group=0)
        for number in told:  # signals that came before there was a child
            _signal(child, number)
        code = _wait(child, told)
    finally:
        if child:
            _signal(child, signal.SIGKILL)  # the whole group: processes that the command left running
            child.wait()
        for number, handler in before.items():
            signal.signal(number, handler)
    if code == -signal.SIGKILL and not told:
        raise ColdpressError(
            f"the command was killed, as the kernel does at the memory cap of {caps.memory_bytes} bytes; give it more "
            "with --memory, or a smaller --dram-budget"
        )
    return 128 - code if code < 0 else code


def _signal(child: "subprocess.Popen[bytes]", number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(child.pid, number)


def _wait(child: "subprocess.Popen[bytes]", told: Sequence[int]) -> int:
    while not told:
        with suppress(subprocess.TimeoutExpired):
            return child.wait(0.2)
    with suppress(subprocess.TimeoutExpired):
        return child.wait(PATIENCE_S)
    _signal(child, signal.SIGKILL)
    return child.wait()
