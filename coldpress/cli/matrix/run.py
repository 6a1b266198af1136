"""Builds every cell of a matrix, and writes what came out.

All builds are one run of Snakemake, `snakemake --config matrix=FILE`, so that what they share is built once, a cluster
gets all jobs at a time, and a second run does nothing. A build that is refused does not stop the others. The folder of
the results has index.html, summary.json, junit.xml and changes.md.
"""

import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import jinja2
from pydantic import ValidationError

from coldpress.cli.matrix import gate
from coldpress.cli.matrix.gate import Finding
from coldpress.cli.matrix.results import BuildResult, MatrixResults, junit
from coldpress.compiler.io import load_record, replacing
from coldpress.compiler.provenance import DECIDING, provenance, versions
from coldpress.compiler.python_api import started
from coldpress.compiler.workflow.last_words import REFUSAL, exit_code, why_not_built
from coldpress.compiler.workflow.matrix import MATRIX, ONLY, Cell, check_together, modules, selected
from coldpress.compiler.workflow.progress import follow
from coldpress.compiler.workflow.settings import BuildConfig, resolve
from coldpress.runtime.artifact.reader import open_artifact
from coldpress.runtime.quantities import show_bytes
from coldpress.schemas.base import Record
from coldpress.schemas.corpus import Corpus
from coldpress.schemas.errors import ColdpressError
from coldpress.schemas.metrics import Metrics
from coldpress.schemas.model import Model

FAILED, DONE = 1, 0
Tell = Callable[[str], object]


def run(
    file: Path,
    folder: Path,
    accepted: Path | None,
    told: Sequence[str],
    *,
    accept: bool,
    update_lock: bool,
    tell: Tell,
) -> tuple[int, MatrixResults]:
    """Builds the matrix of a file, writes the results into `folder`, and compares them with `accepted`.

    Models whose inputs are not those of the lock file are not built; `update_lock` writes it anew.

    Args:
        accepted: What the builds are held to; None for nothing.
        told: Further words of snakemake's command line.
        accept: Write `accepted` instead.
        tell: Called with each line for the user.

    Returns:
        The exit code, 1 if a build failed or is worse than the accepted one; and the results.

    Raises:
        ColdpressError: if the matrix or the accepted builds cannot be read, or the builds cannot be made together.
    """
    known = _accepted(accepted) if accepted is not None and not accept else None
    found = selected(file, None)
    builds, refused = _resolved(found)
    check_together(builds)
    refused |= _differing(file, builds, told, update_lock)
    left = {name: build for name, build in builds.items() if name not in refused}
    start_s = time.time()
    refused |= _made(file, left, told)
    for name, why in refused.items():
        tell(f"{REFUSAL}{name}: {why}")
    rows = [
        _refusal(cell, refused[cell.name]) if cell.name in refused else _built(cell, left[cell.name], folder, start_s)
        for cell in found
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


def _resolved(found: Sequence[Cell]) -> tuple[dict[str, BuildConfig], dict[str, str]]:
    builds: dict[str, BuildConfig] = {}
    refused: dict[str, str] = {}
    for cell in found:
        try:
            builds[cell.name] = resolve(cell.config)
        except ColdpressError as error:
            refused[cell.name] = str(error)
    return builds, refused


def _differing(file: Path, builds: Mapping[str, BuildConfig], told: Sequence[str], update_lock: bool) -> dict[str, str]:
    """Says by name why builds are not made, once weights and text were read; writes a new lock file, or new models."""
    path = lock_file(file)
    before = None if update_lock else read_lock(path)
    known = dict(before.models) if before else {}
    first = [module for module in modules(builds) if module.shared is not None]
    steps = [f"{module.shared}tokenize" for module in first]
    refused = _made(file, {module.name: module.build for module in first}, [*steps, *told])
    of_models: dict[str, str | None] = {name.partition("/")[0]: why for name, why in refused.items()}
    for name, build in builds.items():
        model = name.partition("/")[0]
        if model in of_models:
            continue
        now = inputs_of(build.folder)
        of_models[model] = differences(path, model, known[model], now) if model in known else None
        known.setdefault(model, now)
    lock = Lock(models=dict(sorted(known.items())))
    if lock != before:
        _write(path, lock.to_json())
    return {name: why for name in builds if (why := of_models[name.partition("/")[0]]) is not None}


def _made(file: Path, builds: Mapping[str, BuildConfig], told: Sequence[str]) -> dict[str, str]:
    if not builds:
        return {}
    config = {MATRIX: str(file), ONLY: ",".join(builds)}
    refused: dict[str, str] = {}
    last = ""

    def seen(lines: Iterable[str]) -> Iterator[str]:
        nonlocal last
        for line in lines:
            if found := why_not_built(line):
                refused[found[0]] = found[1]
            elif line.startswith(REFUSAL):
                last = line.strip()
            yield line

    with started(config, ["--keep-going", *told]) as process:
        assert process.stdout
        code = follow(seen(process.stdout))
    if code and not refused:  # all of them, or the only one
        return dict.fromkeys(builds, last.removeprefix(REFUSAL) or f"snakemake ended with code {code}")
    return refused


def _refusal(cell: Cell, why: str) -> BuildResult:
    return BuildResult(name=cell.name, exit_code=exit_code(f"{REFUSAL}{why}"), seconds=0.0, refusal=why)


def _built(cell: Cell, build: BuildConfig, folder: Path, start_s: float) -> BuildResult:
    file = build.target_folder / "metrics.json"
    metrics = load_record(file, Metrics)
    error = metrics.ppl_ratio_error  # no number where there is one block
    errors = {"ppl_ratio": error} if error is not None and math.isfinite(error) else {}
    return BuildResult(
        name=cell.name,
        exit_code=0,
        seconds=max(0.0, file.stat().st_mtime - start_s),
        artifact=os.path.relpath(build.artifact, folder),
        report=os.path.relpath(build.target_folder / "report.html", folder),
        manifest_sha256=metrics.artifact_sha256,
        inputs=dict(open_artifact(build.artifact).manifest.inputs),
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


INPUTS = {"revision": "commit", "weights_sha256": "weights", "text_sha256": "text"}
"""Locked field -> the input whose hash it holds."""


class Locked(Record):
    revision: str | None
    """The commit of a hub model."""
    weights_sha256: str
    text_sha256: str


class Lock(Record):
    """builds.lock, beside builds.yaml, for a repository to keep: each model's weights and text when it was written. The
    first run writes it. Later runs read weights and text again before anything else, and build no cell of a model whose
    inputs are others: a changed folder, or a profile that names another commit, is found in seconds."""

    models: dict[str, Locked]
    """By the model's name in the names of builds."""


def lock_file(matrix: Path) -> Path:
    return matrix.with_suffix(".lock")


def read_lock(path: Path) -> Lock | None:
    """Reads a lock file; None if there is none. Raises ColdpressError if it cannot be read, or is none."""
    try:
        return Lock.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as error:
        raise ColdpressError(
            f"{path} cannot be read as a lock file; restore it, or write it anew with --update-lock"
        ) from error


def inputs_of(folder: Path) -> Locked:
    """Reads what the weights and the text in the folder of a model's builds are; raises ColdpressError if a record
    cannot be read."""
    model, corpus = load_record(folder / "ingest.json", Model), load_record(folder / "tokenize.json", Corpus)
    return Locked(revision=model.revision, weights_sha256=model.weights_sha256, text_sha256=corpus.text_sha256)


def differences(lock: Path, name: str, before: Locked, now: Locked) -> str | None:
    """Returns the sentence that refuses a model's builds; None if its inputs are those of the lock file."""
    found = [
        f"{words} {_short(getattr(before, field))} became {_short(getattr(now, field))}"
        for field, words in INPUTS.items()
        if getattr(before, field) != getattr(now, field)
    ]
    if not found:
        return None
    return f"{name} differs from {lock.name}: {', '.join(found)}; restore it, or accept it with --update-lock"


def _short(value: str | None) -> str:
    return "none" if value is None else value[:12]


def index(results: MatrixResults, findings: list[Finding]) -> str:
    """Returns the page; figures of unfinished builds are empty."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=jinja2.StrictUndefined
    )
    environment.filters["bytes"] = lambda value: show_bytes(int(value))
    shown = [one for one in findings if one.verdict != "equal"]
    return environment.get_template("index.html.j2").render(results=results, findings=shown)
