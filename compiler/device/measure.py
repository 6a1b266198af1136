"""The profile of the machine at hand, measured (compiler/device/host.py), and how measured figures become a profile."""

from pathlib import Path

from coldpress.compiler.device import host
from coldpress.compiler.device.host import PAGE_BYTES
from coldpress.schemas.device import DeviceProfile, Figure, Flash, ReadPoint

MEASURED = "measured: python -m coldpress.compiler.device measure"


def measure(name: str, folder: Path, file_bytes: int) -> DeviceProfile:
    """The profile of this machine, with the storage that holds `folder`."""
    found = host.measure_flash(folder, file_bytes)
    dram = host.dram_bytes()
    return DeviceProfile(
        name=name,
        title="The machine at hand, measured",
        dram_bytes=Figure(value=dram, source=MEASURED),
        dram_budget_bytes=Figure(value=dram // 2, source="assumption: half of the DRAM"),
        dram_bytes_per_s=Figure(value=rounded(host.dram_bytes_per_s()), source=MEASURED),
        num_cores=Figure(value=host.num_cores(), source=MEASURED),
        flash=storage_of(found.latency_s, found.queue_depth, found.curve, MEASURED),
    )


def storage_of(latency_s: float, queue_depth: int, curve: tuple[tuple[int, float], ...], source: str) -> Flash:
    """The storage's part of a profile from figures of one source: bytes per second by read size, ascending."""
    return Flash(
        page_bytes=Figure(value=PAGE_BYTES, source="assumption: the page of the kernel"),
        queue_depth=Figure(value=queue_depth, source=source),
        latency_s=Figure(value=rounded(latency_s), source=source),
        read_curve=Figure(
            value=tuple(ReadPoint(read_bytes=size, bytes_per_s=rounded(rate)) for size, rate in curve), source=source
        ),
    )


def rounded(value: float) -> float:
    """Four digits: a measurement does not know more."""
    return float(f"{value:.4g}")
