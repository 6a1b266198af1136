"""Compares two artifacts, or two builds: inputs, settings, plans, quality, speed and sizes.

A and B are artifacts, or folders of builds such as build/relu-demo/pixel6, whose measured figures are compared, too.
Only what differs is shown; `--all` shows everything. `--html` writes one page about two builds, with their plans,
fronts, DRAM and charts.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from coldpress.compiler.io import load_record, replacing
from coldpress.runtime.artifact.reader import artifact_folder, open_artifact
from coldpress.runtime.cli import inspect
from coldpress.runtime.cli.declaration import FILE, argument, command, option, switch
from coldpress.schemas.errors import ColdpressError, clipped, printable
from coldpress.schemas.manifest import MANIFEST_FILE
from coldpress.schemas.metrics import Metrics

EXAMPLES = """
  coldpress diff build/relu-demo/pixel6 build/relu-demo/oneplus12
  coldpress diff old.coldpress new.coldpress --json
  coldpress diff build/relu-demo/pixel6 build/relu-demo/pixel6+int8 --html both.html
"""
PROVENANCE, METRICS = "provenance/build.json", "metrics.json"
MEASURED = (
    "ppl_ratio",
    "modelled_tokens_per_s",
    "tokens_per_s",
    "flash_bytes_per_token",
    "reads_per_token",
    "hit_rate",
    "whole_model_bytes",
)
"""The figures of a build that are compared."""
PATHS = ("artifact", "warnings", "skipped_plans", "experts")
"""Fields of `inspect` that are derived, and therefore not compared."""
LEFT_OUT = ("build.sparsity.tried.", "build.sparsity.front.", "build.inputs.")
"""Candidates of the search, which each build's report shows; digests that `inspect` says, too."""
FIRST = ("measured.", "plans.")
"""Facts that are shown before all others: quality, speed and sizes, then settings of plans."""


@dataclass(frozen=True, kw_only=True)
class Diff:
    a: Path = argument("an artifact, or the folder of a build", type=FILE)
    b: Path = argument("an artifact, or the folder of a build", type=FILE)
    all: bool = switch("also show what is equal")
    json: bool = switch("print one JSON object")
    html: Path | None = option("also write one page about two finished builds", type=FILE, metavar="FILE")


def run(flags: Diff) -> None:
    """Prints what differs; raises ColdpressError if a path is neither an artifact nor a build, ArtifactError if it is
    damaged."""
    one, other = (facts_of(path) for path in (flags.a, flags.b))
    names = [name for name in one | other if flags.all or one.get(name) != other.get(name)]
    names.sort(key=lambda name: next((at for at, begins in enumerate(FIRST) if name.startswith(begins)), len(FIRST)))
    if flags.html is not None:
        _write_page(flags.html, flags.a, flags.b, [_row(name, one, other) for name in names])
    if flags.json:
        print(json.dumps({"rows": [{"name": name, "a": one.get(name), "b": other.get(name)} for name in names]}))
        return
    if not names:
        print(
            "the two are equal, byte for byte"
            if one["manifest_sha256"] == other["manifest_sha256"]
            else "no fact differs"
        )
        return
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    for title in ("A", "B", ""):
        table.add_column(title, overflow="fold")
    for name in names:
        table.add_row(*_row(name, one, other))
    print(f"A is {printable(str(flags.a))}, B is {printable(str(flags.b))}\n")
    Console(highlight=False, markup=False).print(table)


def _row(name: str, one: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[str, ...]:
    found, against = one.get(name), other.get(name)
    return (name, _shown(found), _shown(against), _change(found, against))


def _write_page(file: Path, a: Path, b: Path, rows: list[tuple[str, ...]]) -> None:
    from coldpress.cli.diff_page import ComparedArtifact, render  # a comparison without a page draws nothing

    def found(path: Path) -> ComparedArtifact:
        folder, build = _artifact_in(path)
        artifact, metrics = open_artifact(folder), measured(build)
        if metrics is None or metrics.artifact_sha256 != artifact.sha256:
            raise ColdpressError(
                f"{path} has no {METRICS} of its artifact, expected the folder of a finished build such as "
                "build/relu-demo/pixel6; --html compares what builds measured"
            )
        return ComparedArtifact(path, metrics, artifact.manifest)

    text = render(found(a), found(b), rows)
    with replacing(file) as temporary:
        temporary.write_text(text, encoding="utf-8")


def measured(build: Path) -> Metrics | None:
    return load_record(build / METRICS, Metrics) if (build / METRICS).is_file() else None


def facts_of(path: Path) -> dict[str, Any]:
    """Returns what an artifact is, how it was built, and what the build measured, by dotted names."""
    folder, build = _artifact_in(path)
    artifact = open_artifact(folder)
    described = inspect.describe(artifact)
    found = {name: value for name, value in flat(described) if name.partition(".")[0] not in PATHS}
    if (folder / PROVENANCE).is_file():
        built = flat(json.loads((folder / PROVENANCE).read_bytes()), "build.")
        found |= {name: value for name, value in built if not name.startswith(LEFT_OUT)}
    metrics = measured(build)
    if metrics is not None and metrics.artifact_sha256 == artifact.sha256:
        found |= {f"measured.{name}": getattr(metrics, name) for name in MEASURED}
        found |= {f"made_by.{name}": value for name, value in flat(metrics.provenance.model_dump())}
    return found


def _artifact_in(path: Path) -> tuple[Path, Path]:
    """Returns an artifact's folder, and the folder that holds it, which may be that of its build; raises ColdpressError
    if `path` is neither, or a build with several artifacts."""
    found = artifact_folder(path)
    if not (found / MANIFEST_FILE).is_file():
        raise ColdpressError(
            f"{path} holds no artifact, expected one, or the folder of a finished build such as build/relu-demo/pixel6"
        )
    return found, path.resolve().parent if found == path else path


def flat(data: object, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the values inside JSON-ready data by dotted names; entries of lists by their numbers."""
    inside = data.items() if isinstance(data, Mapping) else enumerate(data) if isinstance(data, list | tuple) else None
    if inside is None:
        yield prefix.removesuffix("."), data
        return
    for name, value in inside:
        yield from flat(value, f"{prefix}{name}.")


def _shown(value: object) -> str:
    if isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value):
        return value[:12]  # of a digest
    text = f"{value:.6g}" if isinstance(value, float) else f"{value:,}" if type(value) is int else str(value)
    return "" if value is None else printable(clipped(text, 80))


def _change(one: object, other: object) -> str:
    if not all(isinstance(value, int | float) and not isinstance(value, bool) for value in (one, other)):
        return ""
    assert isinstance(one, int | float)
    assert isinstance(other, int | float)
    return f"× {other / one:.3f}" if one > 0 and other != one else ""


COMMAND = command(Diff, run, name="diff", help=__doc__, examples=EXAMPLES)
