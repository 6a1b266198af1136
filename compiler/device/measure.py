"""Measures the profile of this machine (compiler/device/host.py), and turns measured points into a profile."""

import os
import platform
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

import numpy as np

from coldpress.compiler.device import host, overheads
from coldpress.compiler.device.host import PAGE_BYTES, Rounds
from coldpress.runtime.dram.memory import physical_bytes
from coldpress.schemas.compute import Compute, Figure, KernelRate
from coldpress.schemas.device import DeviceProfile, Flash, ReadPoint
from coldpress.schemas.law import Grid, fit

MEASURED = "measured: coldpress device measure"
LARGE_SPREAD = 0.25
"""A measurement is doubtful if the rounds of half of its points differ by more than this share."""
LARGE_ERROR = 0.15
"""A law is doubtful if it misses a point by more than this share."""
LARGE_LOAD = 0.5
"""Load per core before the measurement, above which the machine counts as busy."""


def measure(name: str, folder: Path, file_bytes: int, tell: Callable[[str], None]) -> DeviceProfile:
    """Measures this machine, and the storage that holds `folder`. A busy machine gives figures that are too low. So
    each source records date, host, kernel, load and the spread of the rounds, and a large load or spread causes a
    warning, as does a point that the fitted law misses. Raises ColdpressError as `host.measure_flash`."""
    load, num_cores = os.getloadavg()[0], host.num_cores()
    tell(f"DRAM, with {num_cores} threads")
    dram = host.dram_rates()
    points = host.measure_flash(folder, file_bytes, tell)
    system = f"{platform.node() or 'unnamed'}, {platform.system()} {platform.release()}"
    where = f"{MEASURED}, {datetime.now(UTC):%Y-%m-%d}, {system}, load {load:.1f}"
    usual = sorted(points, key=lambda point: point.rounds.spread)[len(points) // 2].rounds
    _warn_of_load(load, num_cores, {"DRAM": dram, "storage": usual}, tell)
    largest = max(point.rounds.spread for point in points)
    memory = physical_bytes()
    found = DeviceProfile(
        name=name,
        title="The machine at hand, measured",
        dram_bytes=Figure(value=memory, source=where),
        dram_budget_bytes=Figure(value=memory // 2, source="assumption: half of the DRAM"),
        dram_bytes_per_s=Figure(value=rounded(dram.best), source=f"{where}, {_of_rounds(dram)}, the best"),
        num_cores=Figure(value=num_cores, source=where),
        flash=storage_of(
            [(point.read_bytes, point.in_flight, point.rounds.median) for point in points],
            host.depth_of(points),
            f"{where}, {_of_rounds(usual)} at half of the points, by {largest:.0%} at most, the median",
        ),
    )
    tell(fit_sentence(found.flash))
    return found.model_copy(update={"compute": computing(found, folder, where, tell)})


def computing(device: DeviceProfile, folder: Path, where: str, tell: Callable[[str], None]) -> Compute:
    """Measures this machine's kernels, copies and calls; all sources begin with `where`."""
    tell("products of the runtime's kernels")
    rates = list(host.kernel_rates())
    copies, shares = host.copy_rate(), host.further_shares()
    tell("what requests, layers and tokens cost besides")
    costs, spread = overheads.call_costs(device)
    largest = max((rounds for _, _, rounds in rates), key=lambda rounds: rounds.spread)
    besides = f"{where}, {overheads.ROUNDS} rounds that differ by {spread:.0%} at most, the median processor time"
    compute = Compute(
        rates=Figure(
            value=tuple(
                KernelRate(format=name, density=density, bytes_per_s=rounded(rounds.median))
                for name, density, rounds in rates
            ),
            source=f"{where}, {_of_rounds(largest)} at most, the median",
        ),
        copy_bytes_per_s=Figure(value=rounded(copies.median), source=f"{where}, {_of_rounds(copies)}, the median"),
        **{name: Figure(value=rounded(seconds), source=besides) for name, seconds in costs.items()},
        further_share=Figure(
            value=rounded(median(shares)),
            source=f"{where}, {len(shares)} rounds from {shares[0]:.2f} to {shares[-1]:.2f}, the median",
        ),
    )
    tell("what portions of reads cost besides")
    portion_s = rounded(overheads.portion_cost(device.model_copy(update={"compute": compute}), folder))
    source = f"{where}, {overheads.ROUNDS} rounds, the median seconds"
    return compute.model_copy(update={"portion_s": Figure(value=portion_s, source=source)})


def _of_rounds(rounds: Rounds) -> str:
    return f"{len(rounds.rates)} rounds that differ by {rounds.spread:.0%}"


def _warn_of_load(load: float, num_cores: int, measured: dict[str, Rounds], tell: Callable[[str], None]) -> None:
    reasons = [f"a load of {load:.1f} on {num_cores} cores"] if load > LARGE_LOAD * num_cores else []
    reasons += [
        f"rounds of {name} that differ by {rounds.spread:.0%}"
        for name, rounds in measured.items()
        if rounds.spread > LARGE_SPREAD
    ]
    if reasons:
        tell(f"warning: the machine seems busy ({', '.join(reasons)}); measure again when nothing else runs")


def fit_sentence(flash: Flash) -> str:
    """Says how well the law holds on the points, as a warning where it misses one."""
    off = np.abs(flash.law_errors)
    worst = int(off.argmax())
    where = f"{flash.grid.read_bytes[worst]:.0f} bytes, {flash.grid.in_flight[worst]:.0f} in flight"
    text = f"the law misses the points by {np.median(off):.1%} in the median, by {off.max():.1%} at most ({where})"
    return text if off.max() <= LARGE_ERROR else f"warning: {text}; measure again when nothing else runs"


def storage_of(points: Sequence[tuple[int, int, float]], queue_depth: int, source: str) -> Flash:
    """Returns the storage's part of a profile, with its latency and law fitted, from points of one source: (read size
    in bytes, reads in flight, bytes per second). Points above `queue_depth`, the most reads in flight that the runtime
    issues, are left out."""
    kept = sorted((size, depth, rounded(rate)) for size, depth, rate in points if depth <= queue_depth)
    sizes, depths, rates = np.array(kept, np.float64).T
    grid = Grid(sizes, depths, sizes / rates)
    # n reads in flight each take the latency, so that no more than n end in that time (Little's law)
    latency_s = rounded(min(fit(grid, None).latency_s, float((depths * grid.read_s).min())))
    return Flash(
        page_bytes=Figure(value=PAGE_BYTES, source="assumption: the page of the kernel"),
        queue_depth=Figure(value=queue_depth, source=source),
        latency_s=Figure(value=latency_s, source=f"{source}; fitted to the points of read_curve"),
        read_curve=Figure(
            value=tuple(
                ReadPoint(read_bytes=size, bytes_per_s=rate, reads_in_flight=depth) for size, depth, rate in kept
            ),
            source=source,
        ),
    )


def rounded(value: float) -> float:
    """Rounds to four digits: a measurement is no more precise."""
    return float(f"{value:.4g}")
