"""The report, and the comparison of two builds, in a real browser: on narrow and wide screens, light and dark."""

import pytest

from coldpress.cli.main import main
from coldpress.compiler.io import save_record
from coldpress.schemas.sparsity import Tried
from tests.support.browser import WIDER, opened
from tests.support.records import DRAFTS, Build, tiny_figures, tiny_verification
from tests.support.reports import candidate, report

WIDTHS = (360, 768, 1600)
READABLE = 4.5
"""Least contrast of text for WCAG 2, level AA."""
FRONT: tuple[Tried, ...] = (
    candidate("topk", 4000.0, 1.05),
    candidate("dip", 3100.0, 1.03),
    candidate("dense", 2000.0, 1.01),
)


def build_in(folder, method):
    """Writes a build with every part that a report may have."""
    build = Build(folder, method=method, name=f"{method}.coldpress")
    package = build.package()
    plans = tiny_figures(plan="2gb"), tiny_figures(ppl_ratio=1.25)
    found = tiny_verification(build.plans, package.manifest_sha256)
    found = found.model_copy(update={"plans": plans, "drafts": (DRAFTS,)})
    sparsity = build.sparsity.model_copy(update={"front": FRONT, "tried": FRONT[:1]})
    metrics, _ = report(build, folder, verification=found, sparsity=sparsity)
    save_record(metrics, folder / "metrics.json")
    return folder


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """The addresses of both pages."""
    folder = tmp_path_factory.mktemp("pages")
    one, other = (build_in(folder / method, method) for method in ("predictor", "topk"))
    both = folder / "both.html"
    assert main(["diff", str(one), str(other), "--html", str(both)]) == 0
    return {"report": (one / "report.html").as_uri(), "comparison": both.as_uri()}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["report", "comparison"])
@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_is_wider_than_the_screen_and_every_figure_is_seen(browser, pages, name, width):
    with opened(browser, pages[name], width) as shown:
        assert not shown.scrolls_sideways()
        assert shown.page.evaluate(WIDER) == []
        figures = shown.page.locator("figure, svg.chart, .bar").all()
        assert len(figures) > 10
        for figure in figures:
            box = figure.bounding_box()
            assert figure.is_visible()
            assert box["width"] > 100
            assert box["height"] > 20
        assert shown.errors == []
        assert shown.requests == [pages[name]], "the page is one file"


@pytest.mark.parametrize("name", ["report", "comparison"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_is_readable(browser, pages, name, scheme):
    with opened(browser, pages[name]) as shown:
        shown.page.emulate_media(color_scheme=scheme)
        shown.page.evaluate("() => document.querySelectorAll('details').forEach((one) => (one.open = true))")
        least, text = shown.least_contrast()
        assert least >= READABLE, text


def test_the_measure_of_contrast_notices_what_cannot_be_read(browser, pages):
    with opened(browser, pages["report"]) as shown:
        shown.page.evaluate("() => { document.querySelector('.lead').style.color = '#d0d0d0'; }")
        least, text = shown.least_contrast()
        assert least < 2
        assert "tiny runs on" in text


def test_the_first_sentence_is_on_the_first_screen_of_a_phone(browser, pages):
    with opened(browser, pages["report"], width=360, height=640) as shown:
        box = shown.page.locator(".lead").bounding_box()
        assert box["y"] + box["height"] < 640
        assert "tokens/s" in shown.page.locator(".lead").inner_text()
