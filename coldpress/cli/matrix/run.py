"""Builds every cell of a matrix, one after another, and writes what came out.

Builds of one model share its folder, so what they share is built once, and a second run does nothing. A build that is
refused does not stop the others. The folder of the results has index.html, summary.json, junit.xml and changes.md.
"""

import math
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from pydantic import ValidationError

from coldpress.cli.matrix import gate
from coldpress.cli.matrix.cells import Cell, cells, read_matrix
from coldpress.cli.matrix.locking import Lock, differences, first_of_models, inputs_of, lock_file, read_lock
from coldpress.cli.matrix.pages import index
from coldpress.cli.matrix.results import BuildResult, MatrixResults, junit
from coldpress.compiler.io import load_record, replacing
from coldpress.compiler.provenance import DECIDING, provenance, versions
from coldpress.compiler.python_api import build
from coldpress.runtime.artifact.reader import open_artifact
from coldpress.schemas.errors import ColdpressError
from coldpress.schemas.metrics import Metrics

FAILED, DONE = 1, 0
Tell = Callable[[str], object]


def run(
    file: Path, folder: Path, accepted: Path | None, cores: str, *, accept: bool, update_lock: bool, tell: Tell
) -> tuple[int, MatrixResults]:
    """Builds the matrix of a file, writes the results into `folder`, and compares them with `accepted`.

    Models whose inputs are not those of the lock file are not built; `update_lock` writes it anew.

    Returns:
        The exit code, 1 if a build failed or is worse than the accepted one; and the results.

    Raises:
        ColdpressError: if the matrix or the accepted builds cannot be read.
    """
    known = _accepted(accepted) if accepted is not None and not accept else None
    found = cells(read_matrix(file), file.resolve().parent)
    refused = _refused(lock_file(file), found, cores, update_lock)
    rows = [
        _refusal(cell, refused[cell.model], tell)
        if cell.model in refused
        else _built(cell, folder, cores, f"[{number}/{len(found)}] {cell.name}", tell)
        for number, cell in enumerate(found, 1)
    ]
    results = MatrixResults(compiler=provenance().compiler, versions=versions(DECIDING), rows=tuple(rows))
    findings = gate.compare(results, known) if known else []
    worse = gate.worse(findings)
    changes = gate.markdown(findings) if known else "Nothing was accepted yet: see --accept.\n"
    _write(folder / "summary.json", results.to_json())
    _write(folder / "junit.xml", junit(results, worse))
    _write(folder / "index.html", index(results, findings))
    _write(folder / "changes.md", changes)
    if accept and accepted is not None:
        _write(accepted, gate.accepted_of(results).to_json())
    tell(changes if known else f"{len(rows) - results.num_failed} of {len(rows)} builds are there")
    tell(f"{folder / 'index.html'}")
    return FAILED if results.num_failed or worse else DONE, results


def _refused(path: Path, found: Sequence[Cell], cores: str, update_lock: bool) -> dict[str, str]:
    """Returns why models are not built, by name; writes the lock file if there is none, or new models."""
    before = None if update_lock else read_lock(path)
    known = dict(before.models) if before else {}
    refused: dict[str, str] = {}
    for name, cell in first_of_models(found).items():
        try:
            now = inputs_of(cell, cores)
        except ColdpressError as error:
            refused[name] = str(error)
            continue
        why = differences(path, name, known[name], now) if name in known else None
        if why is not None:
            refused[name] = why
        known.setdefault(name, now)
    lock = Lock(models=dict(sorted(known.items())))
    if lock != before:
        _write(path, lock.to_json())
    return refused


def _refusal(cell: Cell, why: str, tell: Tell) -> BuildResult:
    tell(f"error: {why}")
    return BuildResult(name=cell.name, exit_code=2, seconds=0.0, refusal=why)


def _built(cell: Cell, folder: Path, cores: str, title: str, tell: Tell) -> BuildResult:
    """Builds a cell."""
    started = time.monotonic()
    tell(title)

    def steps(line: str) -> None:
        """Shows finished steps alone: each build's summary is in its report."""
        if line.startswith("["):
            tell(line)

    try:
        config = dict(cell.config)
        artifact = build(config.pop("model"), config.pop("device"), progress=steps, cores=cores, **config)
    except ColdpressError as error:
        return _refusal(cell, str(error), tell).model_copy(update={"seconds": time.monotonic() - started})
    metrics = load_record(artifact.parent / "metrics.json", Metrics)
    error = metrics.ppl_ratio_error  # no number where there is one block
    errors = {"ppl_ratio": error} if error is not None and math.isfinite(error) else {}
    return BuildResult(
        name=cell.name,
        exit_code=0,
        seconds=time.monotonic() - started,
        artifact=os.path.relpath(artifact, folder),
        report=os.path.relpath(artifact.parent / "report.html", folder),
        manifest_sha256=metrics.artifact_sha256,
        inputs=dict(open_artifact(artifact).manifest.inputs),
        figures={
            "ppl_ratio": metrics.ppl_ratio,
            "modelled_tokens_per_s": metrics.modelled_tokens_per_s,
            "artifact_bytes": metrics.artifact_bytes,
        },
        errors=errors,
    )


def _accepted(path: Path) -> gate.Accepted:
    """Reads the accepted builds: plain JSON, for people to review."""
    try:
        return gate.Accepted.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ColdpressError(f"{path}: {error.strerror}; write it with --accept") from error
    except ValidationError as error:
        raise ColdpressError(
            f"{path} is not what --accept writes: {error.errors()[0]['msg']}; write it again"
        ) from error


def _write(path: Path, text: str) -> None:
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
