"""Keeps what the builds of a matrix made: one row each, as JSON for programs and as JUnit for CI."""

from collections.abc import Mapping
from xml.etree import ElementTree

from pydantic import Field

from coldpress.schemas.base import Count, Record

FIGURES = ("ppl_ratio", "modelled_tokens_per_s", "artifact_bytes")


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
