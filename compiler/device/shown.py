"""Shows a device profile for people: its figures, its points beside the law, and two profiles side by side. The law's
held-out error comes from fits that leave out one read size each (scikit-learn's LeaveOneGroupOut)."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Column, Table
from sklearn.model_selection import LeaveOneGroupOut

from coldpress.compiler.io import replacing
from coldpress.schemas.device import DeviceProfile, Flash, flash_seconds
from coldpress.schemas.errors import ColdpressError, printable
from coldpress.schemas.law import OVERLAPS, Floats, Grid, fit, read_seconds

LEAST_SIZES = 4
"""Fewer read sizes leave nothing to hold out: the law has three parameters of reads, and the latency."""
REQUESTS = ((1, 4096), (32, 4096), (256, 8192), (256, 65536), (16, 1 << 20))
"""Reads and the size of each, which `compare` gives seconds for."""


def held_out_errors(flash: Flash, overlaps: Sequence[float] = OVERLAPS) -> Floats | None:
    """Returns the relative errors at the points of each read size of laws that are fitted to all others, float64 [n].
    None where a profile has too few read sizes. `overlaps` are those that the fit may choose."""
    grid = flash.grid
    if np.unique(grid.read_bytes).size < LEAST_SIZES:
        return None
    latency_s = None if grid.in_flight.min() < flash.queue_depth.value else flash.latency_s.value
    errors = np.zeros_like(grid.read_s)
    for rest, held in LeaveOneGroupOut().split(grid.read_s, groups=grid.read_bytes):
        found = fit(Grid(*(column[rest] for column in grid)), latency_s, overlaps)
        seconds = read_seconds(found.law, found.latency_s, grid.read_bytes[held], grid.in_flight[held])
        errors[held] = seconds / grid.read_s[held] - 1
    return errors


def show(profile: DeviceProfile, console: Console) -> None:
    """Prints the figures with their sources, the law with its errors, and each point beside it."""
    flash = profile.flash
    console.print(f"{profile.name}: {printable(profile.title)}", markup=False)
    figures = _table("figure", "value", "source")
    for name, value, source in _figures(profile):
        figures.add_row(name, value, printable(source))
    console.print(figures)
    console.print(_law_sentence(flash), markup=False, soft_wrap=True)
    points = _table("read", "in flight", "GB/s", "by the law", "error", "first unit after")
    grid, errors = flash.grid, flash.law_errors
    for size, depth, seconds, error in zip(*grid, errors, strict=True):
        first_s = float(flash_seconds(flash, 1, size))
        rate = size / seconds / 1e9
        points.add_row(
            _size(size), f"{depth:.0f}", f"{rate:.3g}", f"{rate / (1 + error):.3g}", f"{error:+.1%}", _time(first_s)
        )
    console.print(points)


def compare(one: DeviceProfile, other: DeviceProfile, console: Console) -> None:
    """Prints the figures of two profiles side by side, and the seconds of some requests by both laws."""
    table = _table("figure", one.name, other.name)
    for (name, value, _), (_, against, _) in zip(_figures(one), _figures(other), strict=True):
        table.add_row(name, value, against)
    console.print(table)
    requests = _table("request", one.name, other.name, "ratio")
    for reads, size in REQUESTS:
        first, second = (float(flash_seconds(profile.flash, reads, reads * size)) for profile in (one, other))
        requests.add_row(f"{reads} x {_size(size)}", _time(first), _time(second), f"{second / first:.2f}")
    console.print(requests)
    console.print(f"ratio: seconds on {other.name} over seconds on {one.name}; below 1, {other.name} is faster")


def plot(profile: DeviceProfile, path: Path) -> None:
    """Writes an SVG of bandwidth over read size: points as measured, lines by the law, a colour per reads in flight.
    Raises ColdpressError if the file's name does not end in .svg."""
    if path.suffix != ".svg":
        raise ColdpressError(f"--chart {path}: a chart is an SVG, expected a name that ends in .svg")
    import matplotlib
    from matplotlib.figure import Figure

    grid, flash = profile.flash.grid, profile.flash
    sizes = np.geomspace(grid.read_bytes.min(), grid.read_bytes.max(), 120)
    with matplotlib.rc_context({"svg.hashsalt": profile.name, "svg.fonttype": "none"}):
        figure = Figure(figsize=(6.4, 4.0), layout="constrained")
        axes = figure.add_subplot()
        for number, depth in enumerate(np.unique(grid.in_flight)):
            at, colour = grid.in_flight == depth, f"C{number % 10}"
            measured = grid.read_bytes[at] / grid.read_s[at] / 1e9
            by_law = sizes / read_seconds(flash.law, flash.latency_s.value, sizes, np.full_like(sizes, depth)) / 1e9
            axes.plot(sizes, by_law, color=colour, linewidth=1.4, label=f"{depth:.0f} in flight")
            axes.plot(grid.read_bytes[at], measured, "o", color=colour, markersize=4)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("bytes of a read")
        axes.set_ylabel("GB/s: points of the profile, lines by the law")
        axes.legend(frameon=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            figure.savefig(temporary, format="svg", metadata={"Date": None, "Creator": None})


def _figures(profile: DeviceProfile) -> Iterator[tuple[str, str, str]]:
    flash, law = profile.flash, "fitted to read_curve"
    yield "DRAM", f"{profile.dram_bytes.value / 1e9:.3g} GB", profile.dram_bytes.source
    yield "DRAM budget", f"{profile.dram_budget_bytes.value / 1e9:.3g} GB", profile.dram_budget_bytes.source
    yield "DRAM bandwidth", f"{profile.dram_bytes_per_s.value / 1e9:.4g} GB/s", profile.dram_bytes_per_s.source
    yield "cores", str(profile.num_cores.value), profile.num_cores.source
    yield "page", f"{flash.page_bytes.value} bytes", flash.page_bytes.source
    yield "reads in flight", str(flash.queue_depth.value), flash.queue_depth.source
    yield "latency", _time(flash.latency_s.value), flash.latency_s.source
    yield "read curve", f"{len(flash.read_curve.value)} points", flash.read_curve.source
    yield "operations", f"{flash.law.reads_per_s:,.0f}/s", law
    yield "bandwidth", f"{flash.law.bytes_per_s / 1e9:.3g} GB/s", law
    yield "overlap", f"{flash.law.overlap:.2f} (1: the largest bound counts, 0: their sum)", law
    yield "break-even gap", f"{flash.break_even_gap_bytes} bytes", law


def _law_sentence(flash: Flash) -> str:
    off, held = np.abs(flash.law_errors), held_out_errors(flash)
    text = f"The law misses the points by {np.median(off):.1%} in the median, {off.max():.1%} at most"
    if held is None:
        return f"{text}; there are too few read sizes to hold one out."
    away = np.abs(held)
    return f"{text}; points of a read size that it was not fitted to by {np.median(away):.1%} and {away.max():.1%}."


def _table(*columns: str) -> Table:
    folded = (Column(name, overflow="fold") for name in columns)
    return Table(*folded, box=None, pad_edge=False, header_style="bold")


def _size(size: float) -> str:
    return f"{size / 1024:.4g} KiB" if size < 1 << 20 else f"{size / (1 << 20):.4g} MiB"


def _time(seconds: float) -> str:
    return f"{1e6 * seconds:.4g} us" if seconds < 1e-3 else f"{1e3 * seconds:.4g} ms"
