"""Compares the builds of a matrix with those that were accepted, and says in words what changed and why.

A build is worse if its perplexity ratio rose, its modelled speed fell or its artifact grew by more than the tolerance,
if it no longer builds, or if the same compiler made other bytes of the same inputs. What is better, new or gone is
shown, and fails nothing.
"""

from typing import Literal, NamedTuple

from coldpress.cli.matrix.results import FIGURES, BuildResult, MatrixResults
from coldpress.schemas.base import Record

TOLERANCES = {"ppl_ratio": 0.002, "modelled_tokens_per_s": 0.02, "artifact_bytes": 0.01}
"""The share by which a figure may be worse: smaller changes are noise, or worth nobody's attention."""
LARGER_IS_BETTER = {"modelled_tokens_per_s"}
Verdict = Literal["worse", "better", "equal", "new", "gone"]


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
    """Returns a sentence for each build that is worse."""
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
