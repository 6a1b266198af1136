"""`coldpress diff A B --html FILE`: both builds' figures, plans, fronts and differences, from their records."""

import html
import re

import pytest

from coldpress.cli.main import main
from coldpress.compiler.headline import headline
from coldpress.compiler.io import save_record
from coldpress.runtime.quantities import show_bytes
from tests.support.records import Build
from tests.support.reports import candidate, report


@pytest.fixture(scope="module")
def builds(tmp_path_factory):
    """Two builds, one with a front; as folders, with their figures."""
    found = {}
    for method in ("predictor", "topk"):
        folder = tmp_path_factory.mktemp(method)
        build = Build(folder, method=method, name=f"{method}.coldpress")
        front = (candidate("topk", 4000.0, 1.05), candidate("dense", 2000.0, 1.01)) if method == "topk" else ()
        searched = build.sparsity.model_copy(update={"front": front, "tried": front[:1]})
        metrics, _ = report(build, folder, sparsity=searched)
        save_record(metrics, folder / "metrics.json")
        found[folder] = metrics
    return found


def text_of(page):
    """Its text, on one line."""
    return re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]*>", " ", page.partition("</style>")[2])))


@pytest.mark.slow
def test_one_page_has_both_builds_and_what_differs(builds, tmp_path, capsys):
    one, other = builds
    page = tmp_path / "both.html"
    assert main(["diff", str(one), str(other), "--html", str(page)]) == 0
    told = capsys.readouterr().out
    written = page.read_text(encoding="utf-8")
    text = text_of(written)
    for letter, metrics in zip("AB", builds.values(), strict=True):
        assert f" {letter} {headline(metrics, 'Tiny phone')} " in text
        assert f"{letter}: {show_bytes(metrics.budget_bytes)} by use" in text
        assert f"{letter}: What each mechanism brings" in text
        assert f"{letter}: Read lengths" in text
        assert metrics.artifact_sha256[:12] in text
    figures = dict(re.findall(r'<th scope="row">([^<]*)</th>(.*?)</tr>', written))
    cells = re.findall(r"<td[^>]*>([^<]*)</td>", figures["DRAM budget"])
    sizes = [metrics.budget_bytes for metrics in builds.values()]
    assert cells == [*map(show_bytes, sizes), f"× {sizes[1] / sizes[0]:.3f}"]
    assert "A has no front: its method was given." in text
    assert "B: 2 candidates" in text
    assert "plans.0.method predictor topk" in text
    assert "plans.0.method" in told, "the terminal has what it had without a page"
    assert told.startswith(f"A is {one}, B is {other}\n"), "paths are no columns"
    names = [line.split()[0] for line in told.splitlines()[3:] if line[:1].strip()]
    assert names[0].startswith("measured."), "quality, speed and sizes come first"
    assert not re.search("[0-9a-f]{13}", told), "digests are cut"
    for name in ("front, B", "chosen, B", "artifact, A", "artifact, B", "fp16 in DRAM"):
        assert f" {name} " in text, name
    assert "front, A" not in text
    assert not re.search(r"<script|<link|src=|https?:", written)


def test_a_page_needs_what_builds_measured(builds, tmp_path, capsys):
    one, _ = builds
    artifact = next(one.glob("*.coldpress"))
    alone = tmp_path / "alone"
    alone.mkdir()
    (alone / artifact.name).symlink_to(artifact)
    assert main(["diff", str(one), str(alone), "--html", str(tmp_path / "page.html")]) == 2
    assert f"{alone} has no metrics.json of its artifact, expected the folder of a finished build" in (
        capsys.readouterr().err
    )
    assert not (tmp_path / "page.html").exists()


def test_a_hostile_path_is_text(builds, tmp_path):
    one, other = builds
    named = tmp_path / "<b>x"
    named.symlink_to(other)
    page = tmp_path / "both.html"
    assert main(["diff", str(one), str(named), "--html", str(page)]) == 0
    written = page.read_text(encoding="utf-8")
    assert "&lt;b&gt;x" in written
    assert "<b>x" not in written
