"""Writes the index of a matrix: one page with a row for each build, linked to its report."""

from pathlib import Path

import jinja2

from coldpress.cli.matrix.gate import Finding
from coldpress.cli.matrix.results import MatrixResults
from coldpress.runtime.quantities import show_bytes


def index(results: MatrixResults, findings: list[Finding]) -> str:
    """Returns the page; figures of unfinished builds are empty."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=jinja2.StrictUndefined
    )
    environment.filters["bytes"] = lambda value: show_bytes(int(value))
    shown = [one for one in findings if one.verdict != "equal"]
    return environment.get_template("index.html.j2").render(results=results, findings=shown)
