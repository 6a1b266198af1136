"""Measures the profile of this machine (compiler/device/host.py), and turns measured figures into a profile."""

import os
import platform
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from coldpress.compiler.device import calls, host, kernels
from coldpress.compiler.device.host import PAGE_BYTES, Rounds
from coldpress.runtime.plan.memory import physical_bytes
from coldpress.schemas.compute import Compute, KernelRate
from coldpress.schemas.device import DeviceProfile, Flash, ReadPoint
from coldpress.schemas.figure import Figure

MEASURED = "measured: python -m coldpress.compiler.device measure"
LARGE_SPREAD = 0.25
"""A measurement is doubtful if its rounds differ by more than this share."""
LARGE_LOAD = 0.5
"""Load per core before the measurement, above which the machine counts as busy."""


def measure(name: str, folder: Path, file_bytes: int, tell: Callable[[str], None]) -> DeviceProfile:
    """Measures this machine, and the storage that holds `folder`.

    A busy machine gives figures that are too low. So each source records date, kernel, load and the spread of the
    rounds, and a large load or spread causes a warning.

    Args:
        name: Name of the profile.
        folder: On the storage that artifacts will lie on.
        file_bytes: Size of the file that is read.
        tell: Called with a line about each step, and with warnings.

    Raises:
        ColdpressError: as `host.measure_flash`.
    """
    load, num_cores = os.getloadavg()[0], host.num_cores()
    tell(f"DRAM, with {num_cores} threads")
    dram = host.dram_rates()
    flash = host.measure_flash(folder, file_bytes, tell)
    where = f"{MEASURED}, {datetime.now(UTC):%Y-%m-%d}, {platform.system()} {platform.release()}, load {load:.1f}"
    largest = max(flash.curve, key=lambda point: point[1].spread)[1]
    _warn(load, num_cores, {"DRAM": dram, "storage": largest}, tell)
    memory = physical_bytes()
    found = DeviceProfile(
        name=name,
        title="The machine at hand, measured",
        dram_bytes=Figure(value=memory, source=where),
        dram_budget_bytes=Figure(value=memory // 2, source="assumption: half of the DRAM"),
        dram_bytes_per_s=Figure(value=rounded(dram.best), source=f"{where}, {_of_rounds(dram)}, the best"),
        num_cores=Figure(value=num_cores, source=where),
        flash=storage_of(
            flash.latency_s,
            flash.queue_depth,
            tuple((size, rounds.median) for size, rounds in flash.curve),
            f"{where}, {_of_rounds(largest)} at most, the median",
        ),
    )
    return found.model_copy(update={"compute": computing(found, where, tell)})


def computing(device: DeviceProfile, where: str, tell: Callable[[str], None]) -> Compute:
    """Measures this machine's kernels, copies and calls.

    Args:
        device: The profile so far, for its pages, queue and DRAM.
        where: The beginning of all sources.
        tell: Called with a line about each step.
    """
    tell("products of the runtime's kernels")
    rates = list(kernels.kernel_rates())
    copies = kernels.copy_rate()
    tell("what requests, layers and tokens cost besides")
    costs = calls.call_costs(device)
    largest = max((rounds for _, _, rounds in rates), key=lambda rounds: rounds.spread)
    besides = f"{where}, {calls.ROUNDS} rounds that differ by {costs.spread:.0%} at most, the least processor time"

    def cost(seconds: float) -> Figure[float]:
        return Figure(value=rounded(seconds), source=besides)

    return Compute(
        rates=Figure(
            value=tuple(
                KernelRate(format=name, density=density, bytes_per_s=rounded(rounds.best))
                for name, density, rounds in rates
            ),
            source=f"{where}, {_of_rounds(largest)} at most, the best",
        ),
        copy_bytes_per_s=Figure(value=rounded(copies.best), source=f"{where}, {_of_rounds(copies)}, the best"),
        request_s=cost(costs.request_s),
        reading_s=cost(costs.reading_s),
        layer_s=cost(costs.layer_s),
        token_s=cost(costs.token_s),
    )


def _of_rounds(rounds: Rounds) -> str:
    return f"{len(rounds.rates)} rounds that differ by {rounds.spread:.0%}"


def _warn(load: float, num_cores: int, measured: dict[str, Rounds], tell: Callable[[str], None]) -> None:
    reasons = [f"a load of {load:.1f} on {num_cores} cores"] if load > LARGE_LOAD * num_cores else []
    reasons += [
        f"rounds of {name} that differ by {rounds.spread:.0%}"
        for name, rounds in measured.items()
        if rounds.spread > LARGE_SPREAD
    ]
    if reasons:
        tell(f"warning: the machine seems busy ({', '.join(reasons)}); measure again when nothing else runs")


def storage_of(latency_s: float, queue_depth: int, curve: tuple[tuple[int, float], ...], source: str) -> Flash:
    """Returns the storage's part of a profile from figures of one source: bytes per second by read size, ascending."""
    return Flash(
        page_bytes=Figure(value=PAGE_BYTES, source="assumption: the page of the kernel"),
        queue_depth=Figure(value=queue_depth, source=source),
        latency_s=Figure(value=rounded(latency_s), source=source),
        read_curve=Figure(
            value=tuple(ReadPoint(read_bytes=size, bytes_per_s=rounded(rate)) for size, rate in curve), source=source
        ),
    )


def rounded(value: float) -> float:
    """Rounds to four digits: a measurement is no more precise."""
    return float(f"{value:.4g}")
