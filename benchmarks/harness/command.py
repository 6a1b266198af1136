"""Runs the command of a benchmark: options, requirements, progress, kept rows, tables, the last line and the record."""

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import fields
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table as RichTable

from benchmarks.harness import inputs, keys, record
from benchmarks.harness.benchmark import Benchmark, Cell, Row, Size, at_size, documented, options_type
from benchmarks.harness.kept import Kept, kept_rows, key_of
from benchmarks.harness.places import DATA, DOCUMENTS, RESULTS, WORK, record_of, whole_record_of
from benchmarks.harness.shown import committed, shown
from benchmarks.harness.tables import Table
from coldpress.schemas.errors import ColdpressError

STOPPED = {signal.SIGINT: 130, signal.SIGTERM: 143}


def main(name: str, argv: Sequence[str] | None = None) -> None:
    """Runs `benchmarks/<name>.py` and ends the process with its exit code.

    0: the last line of stdout is one JSON object with the documented keys. 1: its keys differ. 2: a requirement is
    missing or refused, and one sentence says which. 130 and 143: it was stopped; its rows are kept.
    """
    module = import_module(f"benchmarks.{name}")
    plugin: type[Benchmark[Any]] = module.Plugin
    arguments = _parser(name, module.__doc__ or "", plugin).parse_args(argv)
    for number in STOPPED:
        signal.signal(number, _stop)
    try:
        _refuse_what_is_missing(name, plugin)
        sys.exit(_run(name, plugin, arguments))
    except ColdpressError as error:
        sys.exit(_refused(str(error)))


class _Stopped(BaseException):
    """Raised when a signal asks for the end."""


def _stop(number: int, _: object) -> NoReturn:
    for other in STOPPED:  # `timeout` signals the process and its group: the second signal must not interrupt
        signal.signal(other, signal.SIG_IGN)
    raise _Stopped(number)


def _parser(name: str, text: str, plugin: type[Benchmark[Any]]) -> argparse.ArgumentParser:
    told = "\n".join(f"  {key:34s} {meaning}" for key, meaning in documented(plugin).items())
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}",
        description=text,
        epilog=f"Keys of the last line, one JSON object (a key with ? may be null or absent):\n{told}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    size = parser.add_mutually_exclusive_group()
    size.add_argument(
        "--smoke", dest="size", action="store_const", const="smoke", help="smallest inputs: takes seconds"
    )
    size.add_argument(
        "--full", dest="size", action="store_const", const="full", help=f"all cases, about {_minutes(plugin)}"
    )
    parser.set_defaults(size="default")
    parser.add_argument(
        "--record",
        type=Path,
        metavar="FILE",
        help="write figures, options and machine to FILE; in benchmarks/results only rows that documents show",
    )
    parser.add_argument("--fresh", action="store_true", help="drop the rows of a stopped run and measure anew")
    for one in fields(options_type(plugin)):
        _add_option(parser, one.name, one.default, one.metadata)
    return parser


def _minutes(plugin: type[Benchmark[Any]]) -> str:
    minutes = plugin.full_minutes
    return f"{minutes:g} minutes" if minutes < 100 else f"{minutes / 60:.1f} hours"


def _add_option(parser: argparse.ArgumentParser, name: str, default: Any, metadata: Mapping[str, Any]) -> None:
    flag, told = f"--{name.replace('_', '-')}", {"default": argparse.SUPPRESS, "help": metadata["help"]}
    if isinstance(default, bool):
        parser.add_argument(flag, action=argparse.BooleanOptionalAction, **told)
        return
    several = isinstance(default, tuple)
    kind = next((type(one) for one in (default if several else (default,)) if one is not None), str)
    metavar = {int: "N", float: "X"}.get(kind, name.upper())
    if several:
        told["nargs"] = "*"
    shown = " ".join(map(str, default)) if several else str(default)
    told["help"] += f" (default: {shown.replace('%', '%%')})"  # argparse reads a single % as a format
    parser.add_argument(flag, type=kind, choices=metadata["choices"], metavar=metavar, **told)


def _refuse_what_is_missing(name: str, plugin: type[Benchmark[Any]]) -> None:
    """Ends with code 2 and one sentence that says what to install or to do."""
    extra, _, package = plugin.extra.partition(": ")
    if extra and ((package in sys.modules and sys.modules[package] is None) or find_spec(package) is None):
        sys.exit(_refused(f"benchmarks.{name} needs {package}; pip install -e '.[{extra}]' in the checkout"))
    for program in plugin.programs:
        if shutil.which(program) is None:
            sys.exit(_refused(f"benchmarks.{name} starts {program}, which is not on PATH; install it"))
    if plugin.needs_root and os.geteuid() != 0:
        sys.exit(_refused(f"benchmarks.{name} caps memory and reads, which only root may; run it as root"))
    if plugin.needs_data and DATA is None:
        sys.exit(_refused(f"benchmarks.{name} reads real models; set COLDPRESS_TEST_DATA to their folder"))


def _refused(sentence: str) -> int:
    print(f"error: {sentence}", file=sys.stderr)
    return 2


def _run(name: str, plugin: type[Benchmark[Any]], arguments: argparse.Namespace) -> int:
    size: Size = arguments.size
    kind = options_type(plugin)
    given = {one.name: getattr(arguments, one.name) for one in fields(kind) if hasattr(arguments, one.name)}
    options = at_size(kind, size, **{key: tuple(v) if isinstance(v, list) else v for key, v in given.items()})
    kept = kept_rows(name, vars(options), inputs.code_now())
    if arguments.fresh:
        kept = Kept(kept.path)
        kept.drop()
    load = {"before": record.load_now()} if arguments.record else {}
    with tempfile.TemporaryDirectory(dir=_work(), prefix=f"{name}-", ignore_cleanup_errors=True) as scratch:
        folder = Path(scratch)
        inputs.watch(folder / "inputs")
        (folder / "cells").mkdir()
        benchmark = plugin(options, folder / "cells")
        cells = list(benchmark.cells())
        try:
            rows = _rows(name, benchmark, cells, kept, size)
        except _Stopped as stopped:
            kept.add_inputs(inputs.watched(folder / "inputs"))
            number = signal.Signals(stopped.args[0])
            print(
                f"stopped: the rows of {len(kept.cells)} of {len(cells)} cells are kept; "
                "the same command goes on from there",
                file=sys.stderr,
            )
            return STOPPED[number]
        kept.add_inputs(inputs.watched(folder / "inputs"))
        figures = record.finite({**benchmark.figures(rows), "rows": rows})
        tables = list(benchmark.tables(rows, figures))
    if arguments.record:
        load["after"] = record.load_now()
        told = record.record(name, size, vars(options), figures, kept, load, plugin.is_timing)
        record.write(whole_record_of(name, size), told)
        if arguments.record.resolve().parent == RESULTS:
            told = committed(told, shown(path.read_text(encoding="utf-8") for path in DOCUMENTS).get(name))
        record.write(arguments.record, told)
    kept.drop()
    for table in tables:
        show(table)
    said = keys.complaints(documented(plugin), figures)
    for sentence in said:
        print(f"error: benchmarks.{name}: {sentence}", file=sys.stderr)
    print(json.dumps(figures, sort_keys=True, allow_nan=False))
    return 1 if said else 0


def _work() -> Path:
    WORK.mkdir(parents=True, exist_ok=True)
    return WORK


def _rows(name: str, benchmark: Benchmark[Any], cells: Sequence[Cell], kept: Kept, size: Size) -> list[Row]:
    """Measures the cells that have no rows yet, with progress on stderr."""
    console = Console(stderr=True)
    left = [cell for cell in cells if key_of(cell) not in kept.cells]
    kept_already = f", {len(cells) - len(left)} kept from an earlier start" if len(left) < len(cells) else ""
    console.print(f"{name}: {len(cells)} cells{kept_already}{_expected(name, benchmark, size)}", highlight=False)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left:"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(name, total=len(cells), completed=len(cells) - len(left))
        start_s = time.monotonic()
        for number, cell in enumerate(left, 1):
            before_s = time.monotonic()
            rows = [record.finite({**cell, **row}) for row in benchmark.measure(cell)]
            kept.add(cell, rows, time.monotonic() - before_s)
            progress.advance(task)
            if not console.is_terminal:
                taken_s = time.monotonic() - start_s
                still_s = taken_s / number * (len(left) - number)
                done = len(cells) - len(left) + number
                console.print(f"{done} of {len(cells)}: {_text(cell)} ({taken_s:.0f} s, about {still_s:.0f} s left)")
    return [row for cell in cells for row in kept.cells[key_of(cell)]]


def _expected(name: str, benchmark: Benchmark[Any], size: Size) -> str:
    """Returns the expected duration as text, or "" if nothing is known."""
    path = record_of(name, size)
    if path.exists():
        return f", {json.loads(path.read_text())['seconds']:.0f} s when it was recorded last"
    return f", about {_minutes(type(benchmark))}" if size == "full" else ""


def _text(cell: Cell) -> str:
    return ", ".join(f"{name} {value}" for name, value in cell.items()) or "all"


def show(table: Table) -> None:
    """Prints a table; floats get four significant digits, a spread its median."""
    shown = RichTable(title=table.title)
    for column in table.columns:
        shown.add_column(column, justify="right" if column != table.columns[0] else "left")
    for row in table.rows:
        shown.add_row(*map(_cell_text, row))
    Console(width=160).print(shown)


def _cell_text(value: object) -> str:
    if isinstance(value, Mapping) and "median" in value:
        shown = value.get("shown")
        return f"{shown if isinstance(shown, str) else _cell_text(value['median'])}"
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
