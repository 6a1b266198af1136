"""Builds every cell of a matrix, and writes what came out.

All builds are one run of Snakemake, `snakemake --config matrix=FILE`, so that what they share is built once, a cluster
gets all jobs at a time, and a second run does nothing. A build that is refused does not stop the others. The folder of
the results has index.html, summary.json, junit.xml and changes.md.

A gate holds builds to those that were accepted. A build is worse if its perplexity ratio rose, its modelled speed fell
or its artifact grew by more than the tolerance, if it no longer builds, or if the same compiler made other bytes of the
same inputs. What is better, new or gone is shown, and fails nothing.
"""

import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple
from xml.etree import ElementTree

import jinja2
from pydantic import Field, ValidationError

from coldpress.compiler.io import load_record, replacing
from coldpress.compiler.provenance import DECIDING, provenance, versions
from coldpress.compiler.python_api import started
from coldpress.compiler.workflow.last_words import REFUSAL, exit_code, why_not_built
from coldpress.compiler.workflow.matrix import MATRIX, ONLY, Cells, check_together, modules, selected
from coldpress.compiler.workflow.progress import follow
from coldpress.compiler.workflow.settings import BuildConfig, resolve
from coldpress.runtime.artifact.reader import open_artifact
from coldpress.runtime.quantities import show_bytes
from coldpress.schemas.base import Count, Record
from coldpress.schemas.corpus import Corpus
from coldpress.schemas.errors import ColdpressError
from coldpress.schemas.metrics import Metrics
from coldpress.schemas.model import Model

FAILED, DONE = 1, 0
FIGURES = ("ppl_ratio", "modelled_tokens_per_s", "artifact_bytes")
TOLERANCES = {"ppl_ratio": 0.002, "modelled_tokens_per_s": 0.02, "artifact_bytes": 0.01}
"""The share by which a figure may be worse: smaller changes are noise, or worth nobody's attention."""
LARGER_IS_BETTER = {"modelled_tokens_per_s"}
Verdict = Literal["worse", "better", "equal", "new", "gone"]


class BuildResult(Record):
    name: str
    exit_code: int
    """0 for a finished build, whether or not anything had to be done."""
    seconds: float
    """Seconds from the start of all builds until this one was finished; 0 where nothing had to be done."""
    refusal: str | None = None
    """The sentence that the build ended with; None for a finished one."""
    artifact: str | None = None
    report: str | None = None
    """Paths as seen from the summary's folder."""
    manifest_sha256: str | None = None
    inputs: dict[str, str] = Field(default={})
    """Digests of weights, texts and settings, from the artifact."""
    figures: dict[str, float] = Field(default={})
    """By the names of `FIGURES`."""
    errors: dict[str, float] = Field(default={})
    """Standard errors of figures that have one."""


class MatrixResults(Record):
    """summary.json."""

    compiler: str
    """Version, and the commit of the checkout."""
    versions: dict[str, str]
    """Versions of the libraries that decide bytes."""
    rows: tuple[BuildResult, ...]

    @property
    def num_failed(self) -> Count:
        return sum(row.exit_code != 0 for row in self.rows)


class Accepted(Record):
    """accepted.json: the builds that others are held to."""

    compiler: str
    versions: dict[str, str]
    builds: dict[str, BuildResult]


class Finding(NamedTuple):
    name: str
    figure: str
    before: str
    now: str
    verdict: Verdict
    why: str = ""


def run(
    file: Path, folder: Path, accepted: Path | None, told: Sequence[str], *, accept: bool, update_lock: bool
) -> tuple[int, MatrixResults]:
    """Builds the matrix of a file, writes the results into `folder`, and compares them with `accepted`, or writes it
    with `accept`. Models whose inputs are not those of the lock file are not built; `update_lock` writes it anew.
    `told` are further words of snakemake's command line. Returns the exit code, 1 if a build failed or is worse than
    the accepted one, and the results. Raises ColdpressError if the matrix or the accepted builds cannot be read, or the
    builds cannot be made together."""
    known = _accepted(accepted) if accepted is not None and not accept else None
    found = selected(file, None)
    builds, refused = _resolved(found)
    check_together(builds)
    refused |= _differing(file, builds, told, update_lock)
    left = {name: build for name, build in builds.items() if name not in refused}
    start_s = time.time()
    refused |= _made(file, left, told)
    for name, why in refused.items():
        print(f"{REFUSAL}{name}: {why}", flush=True)
    rows = [
        _refusal(name, refused[name]) if name in refused else _built(name, left[name], folder, start_s)
        for name in found
    ]
    results = MatrixResults(compiler=provenance().compiler, versions=versions(DECIDING), rows=tuple(rows))
    findings = compare(results, known) if known else []
    sentences = worse(findings)
    changes = markdown(findings) if known else "Nothing was accepted yet: see --accept.\n"
    _write(folder / "summary.json", results.to_json())
    _write(folder / "junit.xml", junit(results, sentences))
    _write(folder / "index.html", index(results, findings))
    _write(folder / "changes.md", changes)
    if accept and accepted is not None:
        _write(accepted, accepted_of(results).to_json())
    print(changes if known else f"{len(rows) - results.num_failed} of {len(rows)} builds are there")
    print(folder / "index.html", flush=True)
    return FAILED if results.num_failed or sentences else DONE, results


def _resolved(found: Cells) -> tuple[dict[str, BuildConfig], dict[str, str]]:
    builds: dict[str, BuildConfig] = {}
    refused: dict[str, str] = {}
    for name, config in found.items():
        try:
            builds[name] = resolve(config)
        except ColdpressError as error:
            refused[name] = str(error)
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


def _refusal(name: str, why: str) -> BuildResult:
    return BuildResult(name=name, exit_code=exit_code(f"{REFUSAL}{why}"), seconds=0.0, refusal=why)


def _built(name: str, build: BuildConfig, folder: Path, start_s: float) -> BuildResult:
    file = build.target_folder / "metrics.json"
    metrics = load_record(file, Metrics)
    error = metrics.ppl_ratio_error  # no number where there is one block
    errors = {"ppl_ratio": error} if error is not None and math.isfinite(error) else {}
    return BuildResult(
        name=name,
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


def _accepted(path: Path) -> Accepted:
    """Reads the accepted builds: plain JSON, for people to review."""
    try:
        return Accepted.model_validate_json(path.read_bytes())
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
    return environment.get_template("matrix_page.html.j2").render(results=results, findings=shown)


def accepted_of(results: MatrixResults) -> Accepted:
    """Returns what later builds are held to: the finished ones."""
    builds = {row.name: row.model_copy(update={"seconds": 0.0}) for row in results.rows if not row.exit_code}
    return Accepted(compiler=results.compiler, versions=results.versions, builds=builds)


def compare(results: MatrixResults, accepted: Accepted) -> list[Finding]:
    """Returns what differs, build by build, in the order of the results; then what is gone."""
    found: list[Finding] = []
    for row in results.rows:
        before = accepted.builds.get(row.name)
        if before is None:
            found.append(Finding(row.name, "build", "", "failed" if row.exit_code else "built", "new"))
        elif row.exit_code:
            found.append(Finding(row.name, "build", "built", row.refusal or "failed", "worse"))
        else:
            found += _figures(row, before, _why(row, before, results, accepted))
    names = {row.name for row in results.rows}
    return found + [Finding(name, "build", "built", "", "gone") for name in accepted.builds if name not in names]


def worse(findings: list[Finding]) -> dict[str, str]:
    found: dict[str, str] = {}
    for one in findings:
        if one.verdict == "worse":
            sentence = f"{one.figure} was {one.before}, now {one.now}" + (f" ({one.why})" if one.why else "")
            found[one.name] = f"{found[one.name]}; {sentence}" if one.name in found else sentence
    return found


def markdown(findings: list[Finding]) -> str:
    """Returns the findings as a table in Markdown, the worse ones first; equal figures are left out."""
    shown = sorted((one for one in findings if one.verdict != "equal"), key=lambda one: one.verdict != "worse")
    if not shown:
        return "All builds are as they were accepted.\n"
    rows = [
        f"| {one.verdict} | {one.name} | {one.figure} | {one.before} | {one.now} | {one.why} |".replace("\n", " ")
        for one in shown
    ]
    return "\n".join(["| | build | figure | accepted | now | why |", "|---|---|---|---|---|---|", *rows, ""])


def _figures(row: BuildResult, before: BuildResult, why: str) -> list[Finding]:
    found: list[Finding] = []
    for name in FIGURES:
        old, new = before.figures[name], row.figures[name]
        change = (new - old) / old if old else 0.0
        loss = -change if name in LARGER_IS_BETTER else change
        noise = max(TOLERANCES[name], (before.errors.get(name, 0.0) + row.errors.get(name, 0.0)) / old if old else 0.0)
        verdict: Verdict = "worse" if loss > noise else "better" if loss < -noise else "equal"
        found.append(Finding(row.name, name, f"{old:.6g}", f"{new:.6g}", verdict, why))
    same = row.manifest_sha256 == before.manifest_sha256
    is_unexplained = not same and why == SAME
    old_id, new_id = ((one.manifest_sha256 or "")[:12] for one in (before, row))
    found.append(Finding(row.name, "bytes", old_id, new_id, "worse" if is_unexplained else "equal", why))
    return found


SAME = "nothing that is known has changed"


def _why(row: BuildResult, before: BuildResult, results: MatrixResults, accepted: Accepted) -> str:
    names = sorted({*row.inputs, *before.inputs})
    changed = [f"another {name}" for name in names if row.inputs.get(name) != before.inputs.get(name)]
    if results.compiler != accepted.compiler:
        changed.append(f"compiler {accepted.compiler} became {results.compiler}")
    changed += [
        f"{name} {accepted.versions.get(name, 'none')} became {results.versions.get(name, 'none')}"
        for name in sorted({*results.versions, *accepted.versions})
        if results.versions.get(name) != accepted.versions.get(name)
    ]
    return "; ".join(changed) or SAME


def junit(results: MatrixResults, worse: Mapping[str, str]) -> str:
    """Returns the results as JUnit's XML: a build is a test that fails if it was refused, or if the gate finds it
    worse; `worse` has the gate's sentences by build."""
    suite = ElementTree.Element("testsuite", name="coldpress build --matrix", tests=str(len(results.rows)))
    failures = 0
    for row in results.rows:
        case = ElementTree.SubElement(suite, "testcase", name=row.name, time=f"{row.seconds:.1f}")
        why = row.refusal or worse.get(row.name)
        if row.exit_code or why:
            failures += 1
            ElementTree.SubElement(case, "failure", message=why or f"exit code {row.exit_code}")
    suite.set("failures", str(failures))
    ElementTree.indent(suite)
    return ElementTree.tostring(suite, encoding="unicode") + "\n"
