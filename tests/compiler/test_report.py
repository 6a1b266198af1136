"""report: figures by hand, and one page that stands alone and says the same twice."""

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from coldpress.compiler import headline
from coldpress.compiler.cost_model import kv_cache_bytes, slice_bytes, weight_bytes
from coldpress.compiler.io import save_arrays
from coldpress.compiler.stages.report import charts, comparison, figures
from coldpress.runtime.quantities import show_bytes
from coldpress.schemas.activations import Activations, ExpertUses, FamilyStatistics, LayerStatistics
from coldpress.schemas.curves import Curves, FormatLoss
from coldpress.schemas.errors import ColdpressError
from coldpress.schemas.metrics import Sample
from coldpress.schemas.model import Distillation, DistillationPoint
from coldpress.schemas.placement import PinnedShare
from coldpress.schemas.predictors import SizesTried
from tests.support.llama_bench import write_llama_bench
from tests.support.records import DRAFTS, PROVENANCE, Build, tiny_activations, tiny_figures, tiny_verification
from tests.support.reports import candidate, report
from tests.support.statistics import sparsity_of


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    return Build(tmp_path_factory.mktemp("report"), method="predictor")


@pytest.fixture(scope="module")
def usual(build, tmp_path_factory):
    """The figures and the page of the build's own records."""
    return report(build, tmp_path_factory.mktemp("usual"))


class Elements(HTMLParser):
    """Tags, attributes and text; checks that every element is closed in turn."""

    VOID = ("meta", "br", "path", "use", "rect", "line")

    def __init__(self):
        super().__init__()
        self.tags, self.attributes, self.text, self.open = [], [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def shown(html):
    """The text of a page, on one line."""
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", html.replace("&#39;", "'")))


@pytest.mark.slow
def test_the_figures_by_hand(build, usual):
    metrics, _ = usual
    assert (metrics.flash_bytes_per_token, metrics.reads_per_token) == (40960.0, 5.0)
    assert metrics.hit_rate == 0.75
    assert metrics.tokens_per_s == 200.0
    assert (metrics.ppl_source, metrics.ppl_artifact) == (8.0, 8.2)
    assert metrics.budget_bytes == build.plans.plans[0].dram_budget_bytes
    assert metrics.modelled_tokens_per_s == pytest.approx(100 / 0.02)  # flash and memory, one after the other
    assert (metrics.modelled_error, build.device.compute) == (None, None)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["dense", "relu", "predictor", "topk"])
def test_the_budget_is_divided_without_rest(tmp_path, method):
    build = Build(tmp_path, method=method)
    layout = build.layout
    parts = figures.budget_parts(build.model, build.sparsity, layout, build.plans)
    assert sum(parts.values()) == build.plans.plans[0].dram_budget_bytes
    assert all(size > 0 for size in parts.values())


@pytest.mark.slow
def test_accepted_drafts_are_shown_by_pass(build, usual, tmp_path):
    """In a chart, a sentence and metrics.json; a build without drafts has none of them."""
    found = tiny_verification(build.plans, build.package().manifest_sha256).model_copy(update={"drafts": (DRAFTS,)})
    metrics, html = report(build, tmp_path, verification=found)
    assert metrics.drafts == (DRAFTS,)
    said = "drafts accepted 6 of 8 of lookup under plan default, 2.50 tokens per pass in 4 passes; the tokens are those"
    assert said in shown(html)
    assert "Accepted drafts by pass" in html
    other = found.model_copy(update={"drafts": (DRAFTS.model_copy(update={"same_tokens": False}),)})
    assert "the tokens are not those without drafts" in report(build, tmp_path, verification=other)[1]
    assert "drafts" not in shown(usual[1]).lower().replace("no drafts", "")


def test_hot_units_by_hand():
    curve = figures.FrequencyCurve(0, "neuron", np.array([0.5, 0.3, 0.1, 0.1, 0.0]))
    assert curve.hot_units == 0.4  # two of five make 0.8 of the sum 1.0


def test_the_page_stands_alone(usual, tmp_path):
    _, html = usual
    page = Elements()
    page.feed(html)
    assert page.open == []
    assert "http" not in html
    assert not {"script", "link", "img", "iframe", "a"} & set(page.tags)
    assert not [value for name, value in page.attributes if name in ("src", "href") and not value.startswith("#")]
    assert "url(#" in html
    assert not re.search(r"url\((?!#)|@import", html)
    targets = [value for name, value in page.attributes if name == "id"]
    assert len(targets) == len(set(targets))
    used = {value[1:] for name, value in page.attributes if name == "href"} | set(re.findall(r"url\(#([^)]+)\)", html))
    assert used <= set(targets)
    assert page.tags.count("svg") == 11
    assert "prefers-color-scheme: dark" in html
    assert not re.search(r"#0a0b0\w", html)  # every placeholder colour has become a variable
    assert str(tmp_path.parent) not in html


HOSTILE = "x\x1b[2J\u202egpj.\u2066\x00|<b>"
"""Clears a terminal, turns the direction of writing, and would begin a cell or an element."""


def test_no_text_of_a_checkpoint_is_more_than_text(build, tmp_path):
    """Control characters and marks of direction stand as escapes, in the page and in the model card."""
    hostile = build.model.model_copy(update={"name": HOSTILE, "license": HOSTILE, "source": HOSTILE})
    found = tiny_verification(build.plans, build.package(model=hostile).manifest_sha256)
    card = (build.artifact / "README.md").read_text(encoding="utf-8")
    sample = Sample(prompt=HOSTILE, text=f"one\n{HOSTILE}", max_new_tokens=3, temperature=0.6, seed=7)
    found = found.model_copy(update={"sample": sample})
    _, html = report(build, tmp_path, model=hostile, package=build.record, verification=found)
    for text in (html, card):
        assert not [letter for letter in text if not (letter.isprintable() or letter == "\n")]
        assert "\\x1b[2J\\u202egpj.\\u2066\\x00" in text
    assert "&lt;b&gt;" in html
    assert "<b>" not in card.split("---\n", 2)[2]  # behind what is JSON
    assert "|<b>" not in html
    assert "one\n" in html
    rows = [line for line in card.splitlines() if line.startswith("| ")]
    assert {len(re.findall(r"(?<!\\)[|]", row)) for row in rows} == {3, 5}
    (licence,) = re.findall(r"^license: (.*)$", card, re.MULTILINE)
    assert json.loads(licence) == HOSTILE


@pytest.mark.slow
def test_the_page_fits_a_narrow_screen(usual):
    """360 px: nothing but what scrolls by itself is wider. Tables and charts lie in boxes that scroll."""
    _, html = usual
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in html
    for element in ("<table", "<svg "):
        assert html.count(element) == len(re.findall(rf'<div class="wide">\s*{element}', html)) > 0
    (style,) = re.findall(r"<style>(.*?)</style>", html, re.DOTALL)
    assert ".wide { overflow-x: auto; }" in style
    for least in re.findall(r"minmax\(([^;]*), 1fr\)", style):  # columns are never wider than the screen
        assert least.startswith("min(100%,")
    widths = dict(re.findall(r"([^{};]+)\{[^{}]*?min-width: (\d+)px", style))
    assert all(selector.split()[-1] == ".chart" for selector in widths)
    assert all(view.startswith("0 0 ") for view in re.findall(r'<svg [^>]*viewBox="([^"]*)"', html))
    assert not re.search(r"<svg [^>]*\b(width|height)=", html)
    assert "overflow-wrap: anywhere" in style


def test_the_page_shows_the_figures(build, usual):
    metrics, html = usual
    text = shown(html)
    for part in (
        "tiny on Tiny phone",
        f"{show_bytes(metrics.resident_bytes)} / {show_bytes(metrics.budget_bytes)}",
        "75.0 %",
        "200",
        "perplexity, source → artifact (+2.5 %)",
        "8.00 → 8.20",
        "5.0 reads of 8.19 kB on average",
        "10.24",
        "neuron in the model's order",
        "8.20 ± 0.66",
        "8.00 ± 0.64",
        "Its perplexity is 1.0250 ± 0.0020 times the original's, on 2 of 8 blocks of test text",
        "A cat's paw &lt;b&gt;",
        "coldpress generate tiny.coldpress --prompt='A cat'\"'\"'s' --max-new-tokens 3".replace('"', "&#34;"),
        "recall",
        build.package().manifest_sha256,
        "DRAM in use",
        "Sparsity pays: 1.25 times the speed of a dense run in the same DRAM.",
        "a build with method=dense, same DRAM and format",
        "the original, all in DRAM as fp16",
        f"per token: {0.15:.3f} ms of flash reads, {0.07:.3f} ms of computing and copying",
        "computing by DRAM bandwidth, a lower bound: the profile has no rates of computing",
        "50 tokens, tokenized with seed 0",
        "and what the predictors choose",
        build.corpus.text_sha256,
    ):
        assert part in text, part


@pytest.mark.slow
@pytest.mark.parametrize("method", ["dense", "topk", "relu"])
def test_every_method_has_a_page(tmp_path, method):
    build = Build(tmp_path, method=method)
    _, html = report(build, tmp_path)
    assert html.count("<svg") == 10


@pytest.mark.slow
def test_hot_units_of_parts_of_the_text(tmp_path):
    """Ten units, of which two are hottest: 0 and 1 overall; in the second context 1 and 2, in the only task 2 and 3."""
    contexts = np.array([[9, 8, 0, 0, 0, 0, 0, 0, 0, 0], [0, 3, 4, 1, 1, 1, 1, 0, 0, 0]], np.uint16)
    tasks = np.array([[0, 0, 4, 3, 0, 0, 0, 0, 0, 0], [0] * 10], np.int64)
    arrays = {"counts": contexts.sum(axis=0).astype(np.int64), "context_counts": contexts, "task_counts": tasks}
    saved = save_arrays(tmp_path / "neuron.safetensors", arrays)
    family = FamilyStatistics(family="neuron", num_units=10, density=0.3, arrays=saved)
    layer = LayerStatistics(layer=11, families=(family,), inputs=saved, input_similarity=None)
    activations = Activations(num_tokens=20, exact_zeros=True, layers=(layer,))
    (found,) = figures.hot_overlaps(activations, sparsity_of("relu", {"neuron": (1.0,) * 11 + (0.3,)}))
    assert (found.layer, found.context, found.task) == (11, 0.75, 0.0)


def experts_used(folder: Path, used: np.ndarray, layer: int) -> LayerStatistics:
    """Returns a layer whose tokens use experts: bool [T, E]."""
    arrays = save_arrays(folder / f"{layer}.safetensors", {"used": np.packbits(used.T, axis=1, bitorder="little")})
    uses = ExpertUses(num_experts=used.shape[1], predictability=None, arrays=arrays)
    return LayerStatistics(layer=layer, families=(), inputs=arrays, input_similarity=None, experts=uses)


def test_hot_experts_of_parts_of_the_text(tmp_path):
    """Of ten experts 0 and 1 are hottest overall, and in the first context; in the second one 1 and 2."""
    used = np.eye(10, dtype=bool)[[0] * 6 + [1] * 4 + [1] * 5 + [2] * 5]
    activations = Activations(
        num_tokens=20, block_tokens=10, exact_zeros=False, layers=(experts_used(tmp_path, used, 11),)
    )
    (found,) = figures.hot_overlaps(activations, sparsity_of("dense", {"neuron": (1.0,) * 12}))
    assert (found.layer, found.family, found.context, found.task) == (11, "experts", 0.75, None)


def test_the_most_attached_experts(tmp_path):
    """0 and 1 serve one half of the tokens, 2 and 3 the other: twice as often as by chance. In the other layer, whose
    experts are independent, once as often, but for a pair of experts that are too rare to count."""
    halves = np.repeat(np.array([[1, 1, 0, 0], [0, 0, 1, 1]], bool), 40, axis=0)
    free = np.array([[token & 1, token >> 1 & 1, token < 2, token < 2] for token in range(80)], bool)
    layers = tuple(experts_used(tmp_path, used, layer) for layer, used in ((3, halves), (11, free)))
    assert figures.most_together(Activations(num_tokens=80, exact_zeros=False, layers=layers)) == 1.5
    assert figures.most_together(Activations(num_tokens=80, exact_zeros=False, layers=())) is None


@pytest.mark.slow
def test_what_was_pinned_is_shown_with_what_was_tried(build, usual, tmp_path):
    tried = tuple(PinnedShare(share=i / 10, flash_s_per_token=0.01 * (11 - i)) for i in range(11))
    placement = build.placement.model_copy(update={"pinned_share": 0.7, "shares_tried": tried})
    _, html = report(build, tmp_path, placement=placement)
    assert "Pinned or cached" in html
    assert "70 % is pinned." in re.sub(r"\s+", " ", html)
    assert "Pinned or cached" not in usual[1]


@pytest.mark.slow
def test_what_each_mechanism_brings_is_drawn_from_where_the_best_before_led(build, usual, tmp_path):
    """Of 250, then 125 that are left out, then 375 tokens per second."""
    bars = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(charts, "waterfall", lambda _, found: bars.extend(found) or "<svg></svg>")
        metrics, html = report(build, tmp_path)
    assert bars == [("naive", 0.0, 250.0, True), ("+window", 250.0, 125.0, False), ("+ordering", 250.0, 375.0, True)]
    assert "What each mechanism brings" in html
    assert [step.name for step in metrics.ladder] == ["naive", "+window", "+ordering"]
    drawn = usual[1]
    assert "+ordering" in drawn
    assert "faster" in drawn
    assert "slower, left out" in drawn
    assert "later steps need it<" not in drawn  # no such step here
    none = tiny_verification(build.plans, build.package().manifest_sha256).model_copy(update={"ladder": ()})
    assert "What each mechanism brings" not in report(build, tmp_path, verification=none)[1]


def test_the_ladder_has_a_legend_and_says_how_it_differs_from_the_table(usual):
    text = shown(usual[1])
    assert "naive every unit is read for every token" in text
    assert "+window the units of the last tokens stay in DRAM" in text
    assert "It begins with dense runs" in text
    assert "the second half of the first decoded tokens, and the table above on all test tokens" in text


def test_the_whole_model_in_dram_is_a_row_for_each_format(build, usual):
    """By hand: at the bandwidth of DRAM, all weights and half the KV cache of a token pass once."""
    rows = re.findall(r'<tr><th scope="row">([^<]*, all in DRAM[^<]*)</th>(.*?)</tr>', usual[1])
    cells = {name: re.findall(r"<td[^>]*>([^<]*)</td>", row) for name, row in rows}
    assert list(cells) == [
        "the original, all in DRAM as fp16", "int8_group32, all in DRAM", "int4_group32, all in DRAM",
    ]  # fmt: skip
    plan, spec = build.plans.plans[0], build.model.spec
    for (name, row), format_name in zip(cells.items(), ("fp16", "int8_group32", "int4_group32"), strict=True):
        kv_cache = kv_cache_bytes(spec, plan.context_length, "fp16")
        passed = weight_bytes(build.model, format_name) + kv_cache // 2
        if not spec.tie_word_embeddings:
            passed -= spec.vocab_size * slice_bytes(spec.hidden_size, "fp16" if "original" in name else "int8_group32")
        assert row[3] == f"{build.device.dram_bytes_per_s.value / passed:,.0f}", name
        assert (row[1], row[2]) == ("0 B", "0.0")
    assert [row[-1] for row in cells.values()] == ["8.00 ± 0.64", "8.10", "not measured"]


@pytest.mark.slow
def test_llama_cpp_is_a_row_where_it_was_measured(build, usual, tmp_path):
    """Of the machine that llama-bench named; elsewhere the table has no such row."""
    file = write_llama_bench(tmp_path / "bench.json", {})
    metrics, html = report(build, tmp_path, llama_bench=str(file))
    assert [run.tokens_per_s for run in metrics.llama_cpp] == [5.123456]
    name = "llama.cpp 11549, llama 7B Q4_0, 4 threads, measured on Cortex-X1"
    row = re.search(rf'<tr><th scope="row">{name}</th>.*?</tr>', html)
    assert row
    assert re.findall(r"<td[^>]*>([^<]*)</td>", row[0])[3] == "5.123 ± 0.040, measured"
    assert "llama.cpp" not in usual[1]


def test_the_original_takes_more_dram_than_the_artifact_of_its_bytes(build, tmp_path):
    """Both count bookkeeping, or an artifact would seem to take more than its whole model."""
    whole = figures.all_in_dram(build.model, "int8_group32", 64, "fp16", build.device)
    parts = figures.budget_parts(build.model, build.sparsity, build.layout, build.plans)
    assert whole.dram_bytes > weight_bytes(build.model, "int8_group32") + parts["KV cache"]


@pytest.mark.slow
def test_the_plans_are_a_table_where_there_are_several_and_each_says_why(build, usual, tmp_path):
    reasons = build.plans.choices[0].reasons
    assert reasons
    html = shown(usual[1])
    assert all(reason in html for reason in reasons)
    assert "perplexity over the source's" not in html
    package = build.package()
    plans = tiny_figures(plan="2gb"), tiny_figures(ppl_ratio=1.25)
    found = tiny_verification(build.plans, package.manifest_sha256).model_copy(update={"plans": plans})
    metrics, html = report(build, tmp_path, verification=found)
    assert metrics.plans == plans
    assert "perplexity over the source's" in shown(html)
    for text in ("2gb", "1gb", "1.1000 ± 0.0030", "1.2500 ± 0.0030"):
        assert text in shown(html)


def test_formats_in_which_the_whole_model_fits_are_named(build, usual):
    """In a budget of the whole model's bytes, and in one a byte smaller."""
    metrics, html = usual
    needed = figures.all_in_dram(build.model, "int4_group32", 64, "fp16", build.device).dram_bytes
    found = [
        comparison.fitting_formats(metrics.model_copy(update={"budget_bytes": budget}))
        for budget in (needed, needed - 1)
    ]
    assert found == [[f"int4_group32 ({show_bytes(needed)})"], []]
    said = "The whole model fits this budget"
    assert (said in html) == bool(comparison.fitting_formats(metrics))


@pytest.mark.slow
def test_a_build_that_prunes_nothing_says_so(build, usual, tmp_path):
    whole = tuple(
        found.model_copy(update={"per_layer": (1.0,) * len(found.per_layer)}) for found in build.sparsity.densities
    )
    sparsity = build.sparsity.model_copy(update={"densities": whole})
    said = "Nothing is pruned at this budget: every token uses every unit."
    text = shown(report(build, tmp_path, sparsity=sparsity)[1])
    assert said in text
    assert "Sparsity pays" not in text
    assert said not in shown(usual[1])


def test_dram_is_shown_by_use_and_with_a_process_of_the_runtime(build, usual):
    """Not with the memory of the process that built, 80 MB in these figures."""
    metrics, html = usual
    text = shown(html)
    total = metrics.budget_bytes + 60_000_000
    assert f"the process itself 60 MB ({100 * 60_000_000 / total:.1f} %)" in text
    assert f"{show_bytes(total)}: a process that has opened the artifact" in text
    assert "80 MB" not in text
    assert sum(metrics.dram_parts.values()) == metrics.budget_bytes
    for name, size in metrics.dram_parts.items():
        assert f"{name} {show_bytes(size)} (" in text
    assert metrics.dram_parts.keys() <= set(charts.USES), "all of them are drawn"
    spec = build.model.spec
    rows = spec.vocab_size  # those of the head; embeddings lie on flash
    assert metrics.dram_parts["embeddings and head"] == rows * slice_bytes(spec.hidden_size, "int8_group32")


def test_the_first_sentence_says_what_the_build_is_worth(usual):
    """100 tokens in 0.02 s; a dense run of 4000; and by hand the original's weights and half its KV cache."""
    metrics, html = usual
    (said,) = re.findall(r'<p class="lead">(.*?)</p>', html)
    assert said.replace("&#39;", "'") == (
        f"tiny runs on Tiny phone in {show_bytes(metrics.budget_bytes)} of DRAM at no more than 5,000 tokens/s "
        "(flash and DRAM bandwidth; this profile has no figure for computing); a dense run in the same DRAM gives "
        f"4,000, and the original gives {1 / metrics.original.dram_s:,.0f} with all of its "
        f"{show_bytes(metrics.original.dram_bytes)} in DRAM; its perplexity is 2.5 % above the original's."
    )
    assert html.index(said) < html.index("<h2>")


@pytest.mark.parametrize(
    ("ratio", "words"),
    [(1.025, "2.5 % above"), (0.98, "2.0 % below"), (1.0004, "the same as"), (math.nan, "no number, unlike")],
)
def test_the_cost_in_quality_in_words(ratio, words):
    assert headline.cost(ratio) == words


@pytest.mark.parametrize(
    ("format_name", "method", "of_format", "ratio", "tries"),
    [
        ("int4_group32", "dense", 1.28, 1.28, "; try format=int8_group32"),
        ("int4_group32", "topk", 1.01, 1.2, "; try a higher density or dram_budget, or distill=true, or method=dense"),
        ("int8_group32", "dense", 1.06, 1.06, ""),
        ("fp16", "dense", 1.0, 1.05, None),
    ],
)
def test_a_build_that_is_clearly_worse_warns_with_what_applies(usual, format_name, method, of_format, ratio, tries):
    """Whatever the method: dense builds were published as a success at 1.28 times the perplexity."""
    metrics, _ = usual
    figures_of = {"ppl_source": 10.0, "ppl_dense": 10 * of_format, "ppl_artifact": 10 * ratio}
    changed = metrics.model_copy(update={"format": format_name, "method": method, **figures_of})
    worse = f"warning: quality is clearly worse: perplexity is {headline.cost(ratio)} the original's"
    assert headline.warning(changed) == ("" if tries is None else worse + tries)


def test_whether_it_pays_is_answered(usual):
    """Against the same format with everything in DRAM."""
    metrics, html = usual
    whole = next(each for each in metrics.in_dram if each.format == metrics.format)
    gain = f"{whole.tokens_per_s / metrics.modelled_tokens_per_s:.1f} times as fast"
    assert headline.pays(metrics) == f"no: {whole.format} fits this budget without reading flash, and is {gain}"
    assert f"No: {whole.format} fits this budget" in shown(html)
    smaller = metrics.model_copy(update={"budget_bytes": whole.dram_bytes - 5000})
    said = (
        f"no, if 5 kB more DRAM can be spared: {whole.format} then reads nothing from flash and is {gain} (simulated)"
    )
    assert headline.pays(smaller) == said
    too_large = metrics.model_copy(update={"in_dram": (whole.model_copy(update={"fits": False}),)})
    assert headline.pays(too_large).startswith(f"yes: all in DRAM, {whole.format} needs {show_bytes(whole.dram_bytes)}")
    held = metrics.model_copy(update={"flash_bytes_per_token": 0.0, "budget_bytes": 10**9})
    assert headline.pays(held).startswith("nothing is read")
    used = f"in {show_bytes(metrics.whole_model_bytes)} of DRAM"  # and not in the gigabyte that nobody needs
    assert used in headline.headline(held, "phone")


def test_what_does_not_fit_the_device_is_said(build, tmp_path):
    """A phone with a byte less than the original takes."""
    whole = figures.all_in_dram(build.model, "fp16", 64, "fp16", build.device)
    needed = whole.dram_bytes
    budget = build.plans.largest_plan.dram_budget_bytes
    assert budget < needed
    small = {
        "dram_bytes": build.device.dram_bytes.model_copy(update={"value": needed - 1}),
        "dram_budget_bytes": build.device.dram_budget_bytes.model_copy(update={"value": budget}),
    }
    metrics, html = report(build, tmp_path, device=build.device.model_copy(update=small))
    assert [each.fits for each in metrics.in_dram] == [False, True, True]
    text = shown(html)
    assert f"and the original does not fit: it needs {show_bytes(needed)};" in text
    assert f"{show_bytes(needed)}, more than the device has" in text
    assert f"{1 / whole.dram_s:,.0f}, if it fitted" in text
    assert "Hollow triangles do not fit the device." in text


@pytest.mark.slow
def test_the_front_is_drawn_and_listed_with_the_chosen_candidate(build, usual, tmp_path):
    """The taken candidate has a reason, which those of the front lack."""
    front = candidate("topk", 4000.0, 1.05), candidate("dense", 2000.0, 1.01)
    tried = (candidate("topk", 4000.0, 1.05, reason="the fastest"), candidate("dense", 2000.0, 1.01))
    sparsity = build.sparsity.model_copy(update={"front": front, "tried": tried})
    metrics, html = report(build, tmp_path, sparsity=sparsity)
    assert metrics.front == front
    rows = re.findall(r'<tr><th scope="row">([^<]*)</th>(.*?)</tr>', html[html.index("<details>") :])[:2]
    cells = [(name, *re.findall(r"<td[^>]*>([^<]*)</td>", row)) for name, row in rows]
    assert cells == [
        ("topk, chosen", "int4_group32", "lfu", "fp16", "0.50", "1 MB", "4,000", "1.0500"),
        ("dense", "int4_group32", "lfu", "fp16", "0.50", "1 MB", "2,000", "1.0100"),
    ]
    text = shown(html)
    for name in ("front", "chosen", "artifact", "dense, same DRAM", "fp16 in DRAM", "int4_group32 in DRAM"):
        assert f" {name} " in text, name
    given = usual[1]
    assert "<details>" not in given
    assert "The method was given, so no search compared others" in shown(given)


@pytest.mark.slow
def test_points_of_the_front_lie_where_their_figures_say(build, tmp_path):
    """Speed grows to the right on a logarithmic axis; a higher perplexity lies higher."""
    drawn = []
    sparsity = build.sparsity.model_copy(
        update={"front": (candidate("topk", 4000.0, 1.05), candidate("dense", 2000.0, 1.01))}
    )
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(charts, "marks", lambda across, up, kinds: drawn.extend(kinds) or "<svg></svg>")
        metrics, _ = report(build, tmp_path, sparsity=sparsity)
    found = {kind.name: tuple(zip(*kind.points, strict=True)) for kind in drawn}
    assert found["front"] == (
        (pytest.approx(4000), pytest.approx(2000)), (pytest.approx(5), pytest.approx(1)), (10**6, 10**6),
    )  # fmt: skip
    assert found["artifact"] == ((pytest.approx(5000),), (pytest.approx(2.5),), (metrics.budget_bytes,))
    assert found["dense, same DRAM"][:2] == ((pytest.approx(4000),), (pytest.approx(1.25),))
    assert found["fp16 in DRAM"][1] == (0.0,)
    assert found["int8_group32 in DRAM"][1] == (pytest.approx(1.25),), "the artifact's own format, as verified"
    assert found["int4_group32 in DRAM"][1] == (None,)


@pytest.mark.slow
def test_losses_of_formats_that_explore_measured_are_used(build, tmp_path):
    loss = FormatLoss(
        format="int4_group32", mean_kld=0.1, mean_kld_error=None, p999_kld=1.0, ppl_ratio=1.07, ppl_ratio_error=None
    )
    curves = Curves.model_construct(formats=(loss,))
    metrics, html = report(build, tmp_path, curves=curves)
    assert [(each.ppl_ratio, each.is_estimate) for each in metrics.in_dram] == [
        (1.0, False), (pytest.approx(8.1 / 8), False), (1.07, True),
    ]  # fmt: skip
    assert "× 1.070, rounded to nearest" in shown(html)


def test_a_token_s_time_is_parted_by_what_is_busy(build, tmp_path):
    """0.15 ms of flash and 0.07 ms of computing in 0.2 ms: 0.02 ms of both."""
    rows = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(charts, "parts", lambda _, found: rows.extend(found) or "<svg></svg>")
        report(build, tmp_path)
    by_name = dict(rows)
    parts = ("flash alone", "flash and computing", "computing alone")
    assert list(by_name) == ["this artifact", "dense, same DRAM", "fp16, all in DRAM"]
    assert [by_name["this artifact"][part] for part in parts] == pytest.approx([0.13, 0.02, 0.05])
    assert [by_name["dense, same DRAM"][part] for part in parts] == pytest.approx([0.15, 0.05, 0.05])
    assert by_name["fp16, all in DRAM"]["flash alone"] == 0


@pytest.mark.slow
def test_reads_are_drawn_by_length(build, tmp_path):
    drawn = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(charts, "side_by_side", lambda *given: drawn.append(given) or "<svg></svg>")
        report(build, tmp_path)
    ((_, _, places, series),) = drawn
    assert places == ["4", "16"]
    assert series == {"of the reads": [80.0, 20.0], "of the bytes": [pytest.approx(40), pytest.approx(60)]}
    none = tiny_verification(build.plans, build.package().manifest_sha256).model_copy(update={"read_lengths": ()})
    assert "Read lengths" not in report(build, tmp_path, verification=none)[1]


@pytest.mark.slow
def test_the_page_says_what_made_the_artifact(build, tmp_path):
    package = build.package().model_copy(update={"provenance": PROVENANCE})
    metrics, html = report(build, tmp_path, package=package)
    assert metrics.provenance == PROVENANCE
    text = shown(html)
    assert f"commit {'0123456789' * 4}, with changes that are not committed" in text
    assert "libraries numpy 2.4.6, torch 2.13.0" in text
    assert build.device.dram_bytes.source in text
    installed = PROVENANCE.model_copy(update={"commit": None, "dirty": False})
    package = package.model_copy(update={"provenance": installed})
    assert "the compiler did not run from a checkout" in shown(report(build, tmp_path, package=package)[1])


def test_a_narrow_screen_shows_every_column(usual):
    """Cells of the first table stand below each other there, each with the name of its column."""
    _, html = usual
    (style,) = re.findall(r"@media \(max-width: 480px\) \{(.*?)\n\}", html, re.DOTALL)
    assert ".stacked td { display: flex;" in style
    assert ".stacked td::before { content: attr(data-name);" in style
    (table,) = re.findall(r'<table class="stacked">(.*?)</table>', html, re.DOTALL)
    assert table.count("<td") == table.count("data-name=") == 5 * (table.count("<tr>") - 1)
    assert table.count('data-name="perplexity"') == table.count("<tr>") - 1


@pytest.mark.slow
def test_how_the_model_was_distilled_is_shown(build, usual, tmp_path):
    curve = tuple(
        DistillationPoint(step=step, loss=None if step == 0 else 1.0, validation_kl=found)
        for step, found in ((0, 0.5), (10, 0.125), (20, 0.25))
    )
    model = build.model.model_copy(update={"distillation": Distillation(recipe="lora", curve=curve)})
    _, html = report(build, tmp_path, model=model)
    assert "recipe lora trained: 0.500 before, 0.125 where the weights were kept." in re.sub(r"\s+", " ", html)
    assert "Distillation" not in usual[1]


@pytest.mark.slow
def test_activations_without_bits_leave_their_charts_out(build, tmp_path):
    found = tiny_activations(tmp_path, build.model, build.sparsity)
    layers = tuple(
        layer.model_copy(
            update={"families": tuple(entry.model_copy(update={"density": None}) for entry in layer.families)}
        )
        for layer in found.layers
    )
    _, html = report(build, tmp_path, activations=found.model_copy(update={"layers": layers}))
    assert "Activation frequency" not in html


@pytest.mark.slow
def test_same_records_same_page(build, tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    assert report(build, tmp_path / "a")[1] == report(build, tmp_path / "b")[1]


@pytest.mark.slow
def test_names_are_text_and_not_markup(build, tmp_path):
    model = build.model.model_copy(update={"name": "<b>&\"bold'"})
    _, html = report(build, tmp_path, model=model)
    assert "<b>&" not in html
    assert "&lt;b&gt;" in html


def test_a_verification_of_another_artifact(build, tmp_path):
    with pytest.raises(ColdpressError, match="verification is of artifact ffffffffffff"):
        report(build, tmp_path, verification=tiny_verification(build.plans, "f" * 64))


@pytest.mark.slow
def test_a_loss_is_said(build, tmp_path):
    found = tiny_verification(build.plans, build.package().manifest_sha256)
    slow = found.run.model_copy(update={"modelled_flash_s": 0.1, "modelled_s": 0.105})
    _, html = report(build, tmp_path, verification=found.model_copy(update={"run": slow}))
    assert "Sparsity does not pay here: 0.24 times" in html
    _, html = report(build, tmp_path, verification=found.model_copy(update={"dense": None}))
    assert "A dense run does not fit this budget" in html


@pytest.mark.slow
def test_units_used_are_those_that_were_asked_for(build, usual):
    """6,000 hits and 2,000 misses on 100 tokens, whatever density was planned."""
    _, html = usual
    total = sum(section.num_units for section in build.layout.sections)
    text = re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", html))
    assert f"units used {100 * 80 / total:.1f} % of all units" in text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({}, "Flash limits the speed: 0.15 of 0.2 ms of a token go to reads, most of it to waiting for each read"),
        (
            {"modelled_flash_s": 0.001},
            "Computing limits the speed: 0.07 of 0.2 ms of a token go to computing and copying, by DRAM",
        ),
        ({"reads": 20_000, "modelled_flash_s": 0.25}, "go to reads, most of it to the number of reads."),
        ({"read_bytes": 1 << 30, "modelled_flash_s": 0.6}, "go to reads, most of it to the bytes that are read."),
    ],
)
def test_what_limits_the_speed_is_said(build, tmp_path, changes, sentence):
    found = tiny_verification(build.plans, build.package().manifest_sha256)
    _, html = report(
        build, tmp_path, verification=found.model_copy(update={"run": found.run.model_copy(update=changes)})
    )
    assert sentence in html


@pytest.mark.slow
def test_the_reader_s_questions_come_before_diagnostics(usual):
    _, html = usual
    headings = ("Does it pay?", "What it writes", "How to run it", "DRAM by use", "Sparsity, placement and order")
    places = [html.index(f"<h2>{heading}</h2>") for heading in headings]
    assert places == sorted(places)


@pytest.mark.slow
def test_predictors_are_a_table_with_their_share_of_a_token(build, tmp_path):
    """By hand: 0.3 predicted of 0.2 active are 1.5; weights are read once per token, at the bandwidth of DRAM."""
    tried = tuple(SizesTried(predictor_bytes=size, ppl=ppl) for size, ppl in ((1 << 20, 11.0), (2 << 20, 10.1)))
    predictors = build.predictors.model_copy(update={"tried": tried, "ppl_without": 10.0})
    slow = build.device.dram_bytes_per_s.model_copy(
        update={"value": build.plans.plans[0].predictor_bytes / 0.0001}  # 0.1 ms of a token's 0.2 ms
    )
    device = build.device.model_copy(update={"dram_bytes_per_s": slow})
    _, html = report(build, tmp_path, predictors=predictors, device=device)
    elements = Elements()
    elements.feed(html)
    text = [part.strip() for part in elements.text if part.strip()]
    start = text.index("output cosine") + 1
    first = predictors.layers[0]
    assert text[start : start + 9] == [
        *("0", str(first.rank), f"{first.num_parameters:,}", show_bytes(first.nbytes)),
        *("20.0 %", "0.9000", "0.600", "1.50", "0.9900"),
    ]
    assert any("computing with them takes 50.0 % of a token's simulated time" in part for part in text)
    assert "Size of predictors" in text
