"""Replays one trace, recorded or drawn, on several devices, with several DRAM budgets and caches, on all cores.

    python -m benchmarks.shared.sweep ARTIFACT --trace run.trace --device all --dram-budget 2MB,3MB --cache lfu,belady
    python -m benchmarks.shared.sweep ARTIFACT --signals --dram-budget 2MB,3MB --cache lfu,lru
    python -m benchmarks.shared.sweep ARTIFACT --synthetic density=0.1:repeated=0.6:tokens=500

A row is what `coldpress simulate` gives for its settings alone: the units are those of the trace, also where a selector
that sees what is in DRAM would choose others. From the signals that an artifact carries it chooses anew in each row
(runtime/signals.py). Budgets that hold no plan stay in the table, with the reason.
"""

import itertools
import json
import multiprocessing
import os
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import click

from benchmarks.shared.synthetic.measured import measured
from benchmarks.shared.synthetic.statistics import Figures, Statistics, read_statistics
from benchmarks.shared.synthetic.trace import Synthetic
from coldpress.runtime.artifact.reader import Artifact, open_artifact
from coldpress.runtime.cache import show_choice
from coldpress.runtime.cli.arguments import SOURCE, Simulate
from coldpress.runtime.cli.commands import trace_of
from coldpress.runtime.cli.declaration import command, option
from coldpress.runtime.cli.flags import names_of
from coldpress.runtime.device_profiles.devices import load_device, named_devices
from coldpress.runtime.generate.choice import budget_at, choose_plan
from coldpress.runtime.quantities import show_bytes, table
from coldpress.runtime.signals import Signals, decide, load_signals
from coldpress.runtime.simulate import on_device, simulate
from coldpress.runtime.trace import Event
from coldpress.schemas.device import UNCOMPUTED
from coldpress.schemas.errors import ColdpressError, DoesNotFitError
from coldpress.schemas.layout import Collapse, KvCacheFormat, Plan, Preload

STATISTICS = "\n".join(
    [
        "statistics of --synthetic:",
        *(f"  {name:<14}{field.description}" for name, field in Statistics.model_fields.items()),
    ]
)


@dataclass(frozen=True, kw_only=True)
class Sweep(Simulate):
    """The flags of a sweep: those of `coldpress simulate`, with lists, and with traces that are drawn."""

    synthetic: str | None = option(
        "draw a trace with these statistics, explained below; the output compares them with the drawn trace's",
        metavar="NAME=VALUE:…",
        panel=SOURCE,
    )


@dataclass(frozen=True)
class Case:
    """The settings of one simulation; None takes the artifact's."""

    device: str | None
    dram_budget_bytes: int | None
    cache: str | None
    collapse: Collapse | None
    preload: Preload | None
    kv_cache: KvCacheFormat | None

    def of(self, opened: Artifact) -> tuple[Artifact, Plan]:
        """Returns the artifact on the device, and its plan with these settings.

        Raises:
            DoesNotFitError: if the budget cannot hold what must stay in DRAM.
            ColdpressError: for an unknown name.
        """
        artifact = on_device(opened, None if self.device is None else load_device(self.device))
        budget = self.dram_budget_bytes
        reading = self.collapse, self.preload
        return artifact, choose_plan(artifact.manifest, budget, None, self.cache, *reading, self.kv_cache)


Source = Path | Statistics | Literal["signals"]
"""A recorded trace, what a drawn one is to have, or the signals that the artifact carries."""


@dataclass(frozen=True)
class Drawn:
    """A synthetic trace: the requested statistics, their totals over all parts, and those measured on the draw."""

    stated: Statistics
    asked: Figures
    achieved: Figures

    def as_data(self) -> dict[str, Any]:
        """Returns the statistics as JSON-ready data."""
        stated = self.stated.model_dump(mode="json")
        return {"synthetic": {"stated": stated, "asked": self.asked._asdict(), "achieved": self.achieved._asdict()}}

    def render(self) -> str:
        """Formats the statistics as a table for people."""
        figures = zip(Figures._fields, self.asked, self.achieved, strict=True)
        rows = [(name, f"{asked:.3f}", f"{achieved:.3f}") for name, asked, achieved in figures if asked is not None]
        return table([(f"drawn, seed {self.stated.seed}", "asked", "achieved"), *rows])


@dataclass(frozen=True)
class Row:
    """A simulation; figures are per decoded token."""

    device: str
    dram_budget_bytes: int
    plan: str
    """The artifact's plan that the budget takes; empty where none fits."""
    cache: str
    tokens_per_s: float | None = None
    """None where nothing fits."""
    hit_rate: float | None = None
    reads_per_token: float | None = None
    read_bytes_per_token: float | None = None
    refusal: str | None = None
    """Why the budget holds no plan."""
    is_most: bool = False
    """Whether `tokens_per_s` is an upper bound: the device's profile has no rates of computing."""


def cases_of(flags: Sweep) -> list[Case]:
    """Returns each combination of the devices, budgets and caches that the flags name, the caches varying fastest.

    Raises:
        ColdpressError: if a flag names no device, or a budget that is no number of bytes.
    """
    devices = [None] if flags.device is None else named_devices(flags.device)
    budgets = [budget_at(flags.artifact, size) for size in names_of(flags.dram_budget)]
    each = itertools.product(devices, budgets, names_of(flags.cache))
    return [Case(*one, flags.collapse, flags.preload, flags.kv_cache) for one in each]


def source_of(flags: Sweep) -> Source:
    """Returns where the flags say that the trace comes from.

    Raises:
        ColdpressError: for a statistic that is unknown or invalid.
    """
    if flags.signals:
        return "signals"
    if flags.synthetic is not None:
        return read_statistics(flags.synthetic)
    assert flags.trace is not None  # the command line has one of the three
    return flags.trace


def loaded(opened: Artifact, source: Source) -> Iterable[Event] | Signals:
    """Returns the events of a trace, or the artifact's signals.

    Raises:
        ColdpressError: if the file is no trace, no trace has the statistics, or the artifact has no signals.
    """
    if isinstance(source, Statistics):
        return Synthetic(opened, source)
    return load_signals(opened) if source == "signals" else trace_of(source)


def drawn(opened: Artifact, source: Source) -> Drawn | None:
    """Returns the statistics of a drawn trace; None of a recorded one."""
    if not isinstance(source, Statistics):
        return None
    trace = Synthetic(opened, source)
    return Drawn(source, trace.expected, measured(trace))


def swept(path: Path, source: Source, cases: Sequence[Case]) -> list[Row]:
    """Returns a row for each case, in order; they are simulated in as many processes as there are cores.

    Raises:
        ColdpressError: for a file that is no trace, an unknown name, or if no case fits.
    """
    opened = open_artifact(path)
    loaded(opened, source)  # each process reads or draws it; what is wrong is said once, before any starts
    refusals = [_refusal(opened, case) for case in cases]
    fitting = [case for case, refusal in zip(cases, refusals, strict=True) if refusal is None]
    if not fitting:
        raise ColdpressError(f"nothing fits {opened.manifest.source.name}: {refusals[-1]}")
    workers = min(len(fitting), len(os.sched_getaffinity(0)))
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _start, (path, source)) as pool:
        found = pool.map(_row, fitting)
        return [
            next(found) if refusal is None else _refused(opened, case, refusal)
            for case, refusal in zip(cases, refusals, strict=True)
        ]


def _refusal(opened: Artifact, case: Case) -> str | None:
    """Returns why the budget holds no plan; None if it holds one."""
    try:
        case.of(opened)
    except DoesNotFitError as error:
        return str(error)
    return None


def _refused(opened: Artifact, case: Case, refusal: str) -> Row:
    assert case.dram_budget_bytes is not None, "an artifact's own plan fits"
    device = case.device or opened.manifest.device.name
    return Row(device, case.dram_budget_bytes, "", case.cache or "", refusal=refusal)


_OPENED: list[tuple[Artifact, Iterable[Event] | Signals]] = []
"""The artifact and the trace or signals in a process of the pool."""


def _start(path: Path, source: Source) -> None:
    opened = open_artifact(path)
    _OPENED.append((opened, loaded(opened, source)))


def _row(case: Case) -> Row:
    opened, trace = _OPENED[0]
    artifact, plan = case.of(opened)
    named = Row(
        device=artifact.manifest.device.name,
        dram_budget_bytes=plan.dram_budget_bytes,
        plan=plan.name,
        cache=show_choice(plan.cache, plan.cache_options),
        is_most=artifact.manifest.device.compute is None,
    )
    if isinstance(trace, Signals):
        chosen = decide(artifact, plan, trace)
        return replace(
            named,
            tokens_per_s=1 / chosen.token_s,
            hit_rate=chosen.hit_rate,
            reads_per_token=chosen.reads,
            read_bytes_per_token=chosen.read_bytes,
        )
    found = simulate(artifact, plan, trace)
    return replace(
        named,
        tokens_per_s=found.modelled_tokens_per_s,
        hit_rate=found.hit_rate,
        reads_per_token=found.reads / found.num_tokens if found.num_tokens else 0.0,
        read_bytes_per_token=found.read_bytes / found.num_tokens if found.num_tokens else 0.0,
    )


def as_data(rows: Sequence[Row]) -> dict[str, Any]:
    """Returns the rows as JSON-ready data."""
    return {"runs": [asdict(row) for row in rows]}


def render(rows: Sequence[Row]) -> str:
    """Formats the rows as a table for people, with the reasons of refusals below."""
    head = ("device", "DRAM", "plan", "cache", "tokens/s", "hit rate", "reads/token", "bytes/token")
    refusals = dict.fromkeys(row.refusal for row in rows if row.refusal)
    bounds = [f"at most: {UNCOMPUTED}"] if any(row.is_most for row in rows) else []
    return "\n".join([table([head, *map(_cells, rows)]), *bounds, *refusals])


def _cells(row: Row) -> tuple[str, ...]:
    named = row.device, show_bytes(row.dram_budget_bytes), row.plan or "does not fit", row.cache
    if row.tokens_per_s is None or row.hit_rate is None or row.reads_per_token is None:
        return (*named, "", "", "", "")
    read = show_bytes(row.read_bytes_per_token or 0)
    speed = f"{'at most ' if row.is_most else ''}{row.tokens_per_s:.1f}"
    return (*named, speed, f"{row.hit_rate:.3f}", f"{row.reads_per_token:.1f}", read)


def _sweep(flags: Sweep) -> None:
    cases, source = cases_of(flags), source_of(flags)
    described, rows = drawn(open_artifact(flags.artifact), source), swept(Path(flags.artifact), source, cases)
    if flags.json:
        print(json.dumps(as_data(rows) | (described.as_data() if described else {})))
        return
    print(render(rows))
    if described:
        print(described.render())


COMMAND = command(
    Sweep,
    _sweep,
    name="sweep",
    help="Replays a trace on modelled devices, with several budgets and caches: lists with commas between.",
    more_help=STATISTICS,
    one_of=SOURCE,
    needs_one=True,
)


def main(words: Sequence[str]) -> int:
    """Runs the command, and returns its exit code."""
    with COMMAND.make_context("python -m benchmarks.shared.sweep", list(words)) as context:
        return COMMAND.invoke(context)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except click.exceptions.Exit as done:  # after a help
        sys.exit(done.exit_code)
