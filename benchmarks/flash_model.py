"""Compares the law of a device's reads with its disk, at points it is fitted to, at other points and at requests.

The grid of read sizes and reads in flight is measured on this disk, as `device measure` does, or taken from reports of
fio (`--reports`). `fit` rows are laws of several forms on each grid, with the errors at points of a read size that the
law was not fitted to. `request` rows are requests on this disk as plans make them: a token uses clusters of units, and
their reads are joined over a gap, so that reads of many sizes are in flight together; no fit has seen one. `gap` rows
choose the gap of each set of units by the fitted law. Requests and points are each the fastest of interleaved rounds,
since other processes only lengthen a round.
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.harness import Benchmark, Cell, Figures, Row, Rows, main, option
from coldpress.compiler.device import host
from coldpress.compiler.device.fio import Stated, import_fio, read_report
from coldpress.compiler.device.measure import storage_of
from coldpress.compiler.device.shown import held_out_errors
from coldpress.runtime.device_profiles.devices import load_device
from coldpress.runtime.extents import Extents
from coldpress.runtime.store import planner
from coldpress.runtime.store.planner import MAX_READ_BYTES, Strided
from coldpress.schemas.device import Flash, flash_seconds
from coldpress.schemas.law import OVERLAPS, fit

DISK = "disk"
FITTED = "fitted"
FORMS: Mapping[str, Sequence[float]] = {FITTED: OVERLAPS, "maximum": (1.0,), "sum": (0.0,)}
UNIT_BYTES = (1536, 4608, 12288, 28672)
NUM_UNITS = 11008
DENSITIES = (0.01, 0.04)
CLUSTER_UNITS = 6
"""Units in a cluster. A token uses half of the cluster on average."""
GAPS = tuple(4096 * pages for pages in (0, 1, 2, 4, 8, 16, 32))


@dataclass(frozen=True)
class Wanted:
    """Units that a token uses in one section."""

    unit_bytes: int
    positions: np.ndarray

    def extents(self, gap_bytes: int) -> Extents:
        """Returns the reads of a plan with this gap."""
        units = Strided(0, self.unit_bytes, self.unit_bytes)
        return planner.plan_reads(units, self.positions, host.PAGE_BYTES, gap_bytes, MAX_READ_BYTES).extents


def wanted_sets(seed: int) -> list[Wanted]:
    """Returns clusters of units at random places, for each unit size and density."""
    random, found = np.random.default_rng(seed), []
    for size in UNIT_BYTES:
        for density in DENSITIES:
            starts = random.integers(0, NUM_UNITS - CLUSTER_UNITS, round(density * NUM_UNITS / 3))
            near = starts[:, None] + np.arange(CLUSTER_UNITS)
            positions = np.unique(near[random.random(near.shape) < 0.5])
            found.append(Wanted(size, positions))
    return found


def seconds(flash: Flash, extents: Extents) -> float:
    """Returns the seconds of reads by the flash's law."""
    return float(flash_seconds(flash, len(extents), extents.num_bytes))


@dataclass(frozen=True)
class Measured:
    """This disk: its flash, and the fastest seconds of each request by (set of units, gap)."""

    flash: Flash
    request_s: Mapping[tuple[int, int], float]


def measured(folder: Path, sets: Sequence[Wanted], file_bytes: int, rounds: int) -> Measured:
    """Measures the grid and the requests in alternation."""
    places = [(size, depth) for size in host.READ_SIZES for depth in host.DEPTHS]
    rates = dict.fromkeys(places, 0.0)
    requests = {(number, gap): one.extents(gap) for number, one in enumerate(sets) for gap in GAPS}
    requests = {key: found for key, found in requests.items() if found.num_bytes <= host.ROUND_BYTES}
    request_s = dict.fromkeys(requests, np.inf)
    with host.sample(folder, file_bytes) as reader:
        for number in range(rounds):
            for size, depth in places:
                rates[size, depth] = max(rates[size, depth], reader.rate(size, depth, number))
            reader.rate(host.PAGE_BYTES, host.DEPTHS[-1], number)  # else the first request alone would begin cold
            random = np.random.default_rng(number)
            for key, extents in requests.items():
                offsets, lengths = (np.asarray(found, np.uint64) for found in (extents.offsets, extents.lengths))
                # reads elsewhere in each round, so that no cache below this machine has seen the pages
                room = file_bytes - int(offsets[-1] + lengths[-1])
                moved = offsets + np.uint64(host.PAGE_BYTES * random.integers(0, room // host.PAGE_BYTES))
                request_s[key] = min(request_s[key], reader.seconds(moved, lengths, host.DEPTHS[-1]))
    points = [(size, depth, rate) for (size, depth), rate in rates.items()]
    return Measured(storage_of(points, host.DEPTHS[-1], "measured: benchmarks.flash_model"), request_s)


def fit_row(flash: Flash, form: str) -> Row:
    """Returns a law's parameters, and its errors where it was fitted and where not."""
    overlaps, errors = FORMS[form], flash.law_errors
    if form != FITTED:
        found = fit(flash.grid, None, overlaps)
        latency = flash.latency_s.model_copy(update={"value": found.latency_s})
        flash, errors = flash.model_copy(update={"law": found.law, "latency_s": latency}), found.errors
    return {
        "part": "fit",
        "form": form,
        "latency_s": flash.latency_s.value,
        **flash.law.model_dump(),
        **_errors("fit", errors),
        **_errors("held", held_out_errors(flash, overlaps)),
    }


def _errors(name: str, errors: np.ndarray | None) -> Row:
    off = None if errors is None else np.abs(errors)
    return {
        f"{name}_median": None if off is None else float(np.median(off)),
        f"{name}_worst": None if off is None else float(off.max()),
    }


@dataclass(frozen=True)
class Options:
    reports: tuple[str, ...] = option((), help="files that fio wrote with --output-format=json")
    rounds: int = option(12, smoke=2, full=60, help="rounds; the fastest of each point and request counts")
    file_mib: int = option(1024, smoke=320, help="MiB of the file that is read")


class Plugin(Benchmark[Options]):
    keys = {
        "rows[].grid": "disk: measured on this machine; else the file of fio's report",
        "rows[].part": "fit: a law on a grid; request: one planned request; gap: the gap chosen for a set of units",
        "rows[].form?": "fit: fitted (the product's law), maximum or sum of its three bounds",
        "rows[].latency_s?": "fit: latency of a read in seconds",
        "rows[].reads_per_s?": "fit: operations per second without their bytes",
        "rows[].bytes_per_s?": "fit: bandwidth without the operations' time",
        "rows[].overlap?": "fit: how far the three bounds overlap; 1: the largest counts, 0: their sum",
        "rows[].fit_median?": "fit: relative error at the points that the law was fitted to, median",
        "rows[].fit_worst?": "fit: relative error at the points that the law was fitted to, largest",
        "rows[].held_median?": "fit: relative error at read sizes that were left out of the fit, median over points",
        "rows[].held_worst?": "fit: relative error at read sizes that were left out of the fit, largest",
        "rows[].unit_bytes?": "request and gap: bytes of a unit",
        "rows[].units?": "request and gap: number of units that are requested",
        "rows[].gap_bytes?": "request: gap in bytes over which reads are joined; gap: the fitted law's choice",
        "rows[].reads?": "request: number of reads",
        "rows[].read_bytes?": "request: bytes of these reads",
        "rows[].seconds?": "request: measured seconds, fastest round",
        "rows[].error?": "request: seconds by the fitted law over measured seconds, minus 1",
        "rows[].of_best?": "gap: measured seconds with the fastest gap over those with the fitted law's",
        "held_median": "relative error of the fitted law at left-out read sizes: median over grids of their medians",
        "held_worst": "relative error of the fitted law at left-out read sizes: largest of all grids",
        "request_median": "relative error of the fitted law at requests, median",
        "request_worst": "relative error of the fitted law at requests, largest",
    }
    is_timing = True
    over = ({"grid": (DISK,)}, {"grid": "reports"})
    full_minutes = 5

    def measure(self, cell: Cell) -> Iterator[Row]:
        """Yields the laws of a grid; for the disk also requests and gaps."""
        if cell["grid"] != DISK:
            base = load_device("pixel6")  # fio's report has no DRAM, and the law needs none
            flash = import_fio(read_report(Path(cell["grid"])), "reported", base, Stated()).flash
            yield from (fit_row(flash, form) for form in FORMS)
            return
        sets = wanted_sets(7)
        found = measured(self.folder, sets, self.options.file_mib << 20, self.options.rounds)
        yield from (fit_row(found.flash, form) for form in FORMS)
        yield from request_rows(found, sets)
        yield from gap_rows(found, sets)

    def figures(self, rows: Rows) -> Figures:
        fitted = [row for row in rows if row["part"] == "fit" and row["form"] == "fitted" and row["held_median"]]
        errors = [abs(row["error"]) for row in rows if row["part"] == "request"]
        return {
            "held_median": statistics.median(row["held_median"] for row in fitted),
            "held_worst": max(row["held_worst"] for row in fitted),
            "request_median": statistics.median(errors),
            "request_worst": max(errors),
        }


def request_rows(found: Measured, sets: Sequence[Wanted]) -> Iterator[Row]:
    """Yields a row per set of units and gap."""
    for (number, gap), spent in found.request_s.items():
        one, extents = sets[number], sets[number].extents(gap)
        yield {
            "part": "request",
            "unit_bytes": one.unit_bytes,
            "units": one.positions.size,
            "gap_bytes": gap,
            "reads": len(extents),
            "read_bytes": extents.num_bytes,
            "seconds": spent,
            "error": seconds(found.flash, extents) / spent - 1,
        }


def gap_rows(found: Measured, sets: Sequence[Wanted]) -> Iterator[Row]:
    """Yields a row per set of units: the gap that the law chooses, and the disk's best time over that with this gap."""
    for number, one in enumerate(sets):
        spent = {gap: found.request_s[number, gap] for gap in GAPS if (number, gap) in found.request_s}
        chosen = min(spent, key=lambda gap: seconds(found.flash, one.extents(gap)))
        yield {
            "part": "gap",
            "unit_bytes": one.unit_bytes,
            "units": one.positions.size,
            "gap_bytes": chosen,
            "of_best": min(spent.values()) / spent[chosen],
        }


if __name__ == "__main__":
    main("flash_model")
