"""compiler/workflow/ending.py: the screen after a build, from the build's own records."""

import shlex
import sys
from pathlib import Path

import pytest

from coldpress.compiler.io import load_record, save_record
from coldpress.compiler.workflow import ending as summary
from coldpress.schemas.errors import ColdpressError
from coldpress.schemas.metrics import DenseRun, Metrics, Protocol, Sample, WholeInDram
from coldpress.schemas.package import Exported, Package
from coldpress.schemas.sparsity import Tried
from tests.support.records import DRAFTS, PROVENANCE, tiny_figures

IDENTITY = "0123456789abcdef" * 4
PROMPT = "It's a cat; $HOME"
NOTHING = dict.fromkeys(("read_lengths", "ladder", "tried", "front"), ())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    metrics = Metrics(
        model="demo",
        device="pixel6",
        artifact_sha256=IDENTITY,
        method="predictor",
        format="int8_group32",
        artifact_bytes=4_600_000,
        flash_bytes=3_000_000,
        resident_bytes=813_600,
        budget_bytes=2_200_000,
        whole_model_bytes=4_500_000,
        flash_bytes_per_token=123_456.0,
        reads_per_token=55.04,
        hit_rate=0.191,
        num_test_tokens=1020,
        num_measured_blocks=4,
        num_test_blocks=16,
        ppl_source=23.912,
        ppl_source_error=1.234,
        ppl_artifact=25.288,
        ppl_artifact_error=1.345,
        ppl_ratio_error=0.0123,
        tokens_per_s=46.4,
        tokens_per_s_deviation=3.6,
        modelled_tokens_per_s=1241.0,
        modelled_error=0.21,
        ppl_dense=23.94,
        dense=DenseRun(
            reads_per_token=24,
            flash_bytes_per_token=2_610_000,
            flash_s=0.0015,
            dram_s=0.0007,
            token_s=0.002,
            read_buffer_bytes=65536,
            pinned_bytes=500_000,
        ),
        in_dram=(WholeInDram(format="fp16", dram_bytes=8_900_000, fits=True, dram_s=0.0005, ppl_ratio=1.0),),
        flash_s_per_token=0.0006,
        dram_s_per_token=0.0003,
        dram_parts={"embeddings and head": 2_000_000, "unused": 200_000},
        process_bytes=61_000_000,
        **NOTHING,
        protocol=Protocol(corpus="text", text_sha256="f" * 64, tokens_sha256="b" * 64, context_length=256, stride=256),
        sample=Sample(prompt=PROMPT, text=" sat\ndown", max_new_tokens=48, temperature=0.6, seed=7),
        provenance=PROVENANCE,
    )
    package = Package(
        folder=str(tmp_path / "my demo.coldpress"),
        manifest_sha256=IDENTITY,
        artifact_bytes=4_600_000,
        flash_bytes=3_000_000,
        resident_bytes=813_600,
        predictor_bytes=0,
        provenance=PROVENANCE,
    )
    save_record(metrics, tmp_path / "metrics.json")
    save_record(package, tmp_path / "publish.json")
    return tmp_path


def changed(folder: Path, **figures: object) -> str:
    """The screen with other figures."""
    save_record(load_record(folder / "metrics.json", Metrics).model_copy(update=figures), folder / "metrics.json")
    return summary.show(folder)


def test_the_screen_has_text_figures_and_paths(folder: Path) -> None:
    text = summary.show(folder)
    assert "\n  prompt\n    It's a cat; $HOME\n\n  continuation\n     sat\n    down\n\n" in text
    for figure in ("4.6 MB", "814 kB", "2.2 MB", "123 kB", "55.0 reads", "19.1%", "46.4 ± 3.6 tokens/s", IDENTITY):
        assert figure in text, figure
    assert "25.29 ± 1.34; of the source 23.91 ± 1.23; ratio 1.0575 ± 0.0123" in text
    assert "1241 ± 261 tokens/s, simulated; ± is how far such figures were off on measured machines" in text
    assert "4 of 16 blocks of test text, 1,020 tokens" in text
    assert str(folder / "my demo.coldpress") in text
    assert str(folder / "report.html") in text


def test_quality_that_is_clearly_worse_comes_first(folder: Path) -> None:
    assert summary.show(folder).startswith("\nwarning: quality is clearly worse: perplexity is 5.8 % above")
    assert summary.show_all({"one": folder}).startswith("one\n    warning: quality is clearly worse")
    assert changed(folder, ppl_artifact=24.0).startswith("\ndemo on ")


def test_an_answer_is_shown_with_its_question(folder: Path) -> None:
    sample = Sample(prompt="Why?", text="So.", max_new_tokens=8, temperature=0.6, seed=7, is_chat=True)
    text = changed(folder, sample=sample)
    assert "\n  question\n    Why?\n\n  answer\n    So.\n\n" in text
    again, chat, serve = text.splitlines()[-3:]
    assert again.endswith("--max-new-tokens 8 --temperature 0.6 --seed 7")
    assert shlex.split(again)[:3] == ["echo", "Why?", "|"]
    artifact = str(folder / "my demo.coldpress")
    assert [shlex.split(line)[-2:] for line in (chat, serve)] == [["chat", artifact], ["serve", artifact]]


def test_what_counts_no_computing_is_an_upper_bound(folder: Path) -> None:
    text = " ".join(changed(folder, modelled_error=None, plans=(tiny_figures(),)).split())
    counted = "(flash and DRAM bandwidth; this profile has no figure for computing)"
    assert f"at most 1241 tokens/s {counted}" in text
    assert f"of DRAM at no more than 1,241 tokens/s {counted}; " in text
    assert "lfu: at most 7 tokens/s, simulated" in text
    assert "± 261" not in text
    assert "a build with method=dense, simulated: at most " in text


def test_text_of_a_strange_model_moves_no_cursor(folder: Path) -> None:
    sample = Sample(prompt="a", text="\x1b[2J\rb\nc", max_new_tokens=1, temperature=0.6, seed=7)
    assert "\n    \\x1b[2J\\rb\n    c\n" in changed(folder, sample=sample)


def test_the_last_line_is_a_command_for_a_shell(folder: Path) -> None:
    """Whatever prompt and path contain; a shell would split it into these words."""
    words = shlex.split(summary.show(folder).splitlines()[-1])
    start = words.index("generate")
    artifact = str(folder / "my demo.coldpress")
    assert words[start + 1 : start + 3] == [artifact, f"--prompt={PROMPT}"]
    assert words[start + 3 :] == ["--max-new-tokens", "48", "--temperature", "0.6", "--seed", "7"]
    assert "--prompt-ids 1 --max-new-tokens" in changed(folder, sample=None)


def test_the_command_names_a_program_that_is_there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its name alone where the environment is active; paths are from the folder the user stands in."""
    monkeypatch.chdir(folder)
    beside = folder / "env" / "bin" / "python"
    beside.parent.mkdir(parents=True)
    monkeypatch.setattr(sys, "executable", str(beside))
    monkeypatch.setattr(sys, "prefix", str(folder / "env"))
    monkeypatch.delenv("VIRTUAL_ENV", raising=False)
    end = " generate 'my demo.coldpress' --prompt="
    assert f"\n  env/bin/python -m coldpress{end}" in summary.show(folder)
    beside.with_name("coldpress").touch()
    assert f"\n  env/bin/coldpress{end}" in summary.show(folder)
    monkeypatch.setenv("VIRTUAL_ENV", str(folder / "env"))
    assert f"\n  coldpress{end}" in summary.show(folder)


def test_figures_of_another_artifact_are_not_shown(folder: Path) -> None:
    with pytest.raises(ColdpressError, match=r"metrics\.json is of artifact ffffffffffff, what .* is 0123456789ab"):
        changed(folder, artifact_sha256="f" * 64)
    (folder / "metrics.json").unlink()
    with pytest.raises(ColdpressError, match="no such Metrics record"):
        summary.show(folder)


def test_one_block_has_no_error_bar(folder: Path) -> None:
    errors = dict.fromkeys(("ppl_source_error", "ppl_artifact_error", "ppl_ratio_error"), float("nan"))
    assert "25.29; of the source 23.91; ratio 1.0575\n" in changed(folder, **errors)


def test_dense_stands_beside_the_choice(folder: Path) -> None:
    """Slower than a dense run in the same DRAM: the screen gives both speeds and says what to do."""
    shown = summary.show(folder)
    assert "fits in 4,500,000 bytes, 2,300,000 more than the budget" in shown
    assert "fits in 4,500,000 bytes: flash is not needed" in changed(folder, budget_bytes=4_500_000)
    assert "500 tokens/s, 2.61 MB in 24 reads per token, perplexity 23.94; this artifact is 2.48" in summary.show(
        folder
    )
    assert "  dense, same DRAM  a build with method=dense, simulated: 500 tokens/s" in summary.show(folder)
    said = "0.50 times as fast: sparsity does not pay here, build with method=dense"
    assert said in changed(folder, modelled_tokens_per_s=250.0)
    plans = tiny_figures(density=1.0), tiny_figures()
    assert "sparsity does not pay" not in changed(folder, plans=plans), "its smaller budgets are sparse"
    assert said in changed(folder, plans=plans[1:])
    assert "this artifact is dense" in changed(folder, method="dense")
    assert "does not fit" in changed(folder, dense=None)


def test_the_budget_is_said_to_be_without_the_interpreter(folder: Path) -> None:
    text = summary.show(folder)
    assert "  DRAM              814 kB fixed, of a budget of 2.2 MB\n" in text
    assert "  process           63.2 MB = 2.2 MB of the budget + 61 MB Python and libraries\n" in text


def test_a_speed_of_one_block_has_no_spread(folder: Path) -> None:
    text = changed(folder, tokens_per_s_deviation=float("nan"))
    assert "speed here        46 tokens/s, measured at this machine's present load\n" in text


def test_what_auto_tried_is_a_line_for_each_method(folder: Path) -> None:
    """Why it took the first, the speeds of the others that it judged, and why it skipped the rest."""
    assert "auto tried" not in summary.show(folder)
    tried = (
        Tried(
            method="wina",
            format="int4_group32",
            cache="lfu",
            token_s=1 / 50,
            density=0.524,
            ppl_ratio=1.0449,
            reason="the fastest that keeps the quality",
        ),
        Tried(method="dense", format="int8_group32", cache="lfu", token_s=1 / 40, density=1.0, ppl_ratio=1.001),
        Tried(method="predictor", token_s=1 / 30),
        Tried(method="relu", skipped="a budget is too small; raise it", needed_bytes=11_300_000),
        Tried(method="topk", skipped="nothing is left out; use method=dense"),
    )
    lines = changed(folder, tried=tried).splitlines()
    first = next(number for number, line in enumerate(lines) if "auto took" in line)
    assert [line.split(maxsplit=2)[2] for line in lines[first : first + 2]] == [
        "wina: the fastest that keeps the quality",
        "wina: 50 tokens/s, estimated; int4_group32, lfu, density 0.52, perplexity × 1.045",
    ]
    assert [line.strip() for line in lines[first + 2 : first + 5]] == [
        "dense: 40 tokens/s, estimated; int8_group32, perplexity × 1.001",
        "predictor: 30 tokens/s, estimated",
        "relu needs 11.3 MB of 2.2 MB; topk was skipped: nothing is left out",
    ]


@pytest.mark.parametrize(("ratio", "is_told"), [(1.09, True), (1.054, False)])
def test_a_loss_beyond_what_auto_expected_is_told(folder: Path, ratio: float, is_told: bool) -> None:
    """Beyond two standard errors: 1.054 may be 1.046."""
    tried = (Tried(method="dense", format="int4_group32", token_s=1 / 40, density=1.0, ppl_ratio=1.046),)
    text = changed(folder, tried=tried, ppl_artifact=23.912 * ratio, ppl_ratio_error=0.0047)
    said = (
        "more is lost      perplexity × 1.0900 ± 0.0047 on test text, where auto expected × 1.046; with max_ppl_ratio"
    )
    assert (said in text) == is_told
    assert ("more is lost" in text) == is_told


def test_each_of_several_plans_has_a_line(folder: Path) -> None:
    assert "plan 1gb" not in changed(folder)
    text = changed(folder, plans=(tiny_figures(plan="2gb", holds_everything=True), tiny_figures()))
    assert (
        "plan 2gb          topk at density 0.10, lfu: 7 tokens/s, simulated; the whole model fits; perplexity" in text
    )
    assert "plan 1gb          topk at density 0.10, lfu: 7 tokens/s, simulated; 90 kB in 9.0 reads, 20.0% hits" in text


def test_accepted_drafts_have_a_line(folder: Path) -> None:
    assert "drafts, " not in changed(folder)
    said = "drafts, default   lookup: 6 of 8 accepted, 2.50 tokens per pass; the tokens are "
    assert f"{said}those without drafts\n" in changed(folder, drafts=(DRAFTS,))
    other = DRAFTS.model_copy(update={"same_tokens": False})
    assert f"{said}not those without drafts\n" in changed(folder, drafts=(other,))


def test_the_exported_file_is_named(folder: Path) -> None:
    """Where it is of this artifact, and still there."""
    assert "  exported  " not in summary.show(folder)
    file = folder / "demo.gguf"
    record = Exported(
        target="gguf",
        file=str(file),
        sha256="c" * 64,
        size_bytes=5_200_000,
        artifact_sha256=IDENTITY,
        rounded=("blk.0.ffn_down.weight",),
    )
    save_record(record, folder / "export.json")
    assert "  exported  " not in summary.show(folder)
    file.touch()
    assert f"exported          {file}, 5.2 MB, 1 tensors rounded again\n" in summary.show(folder)
    save_record(record.model_copy(update={"artifact_sha256": "d" * 64}), folder / "export.json")
    assert "  exported  " not in summary.show(folder)


def test_the_text_that_the_identity_depends_on_is_named(folder: Path) -> None:
    """The documentation that a Python carries differs from Python to Python."""
    assert "  text              text, sha256 ffffffffffff\n" in summary.show(folder)
    protocol = load_record(folder / "metrics.json", Metrics).protocol.model_copy(update={"corpus": "pydoc"})
    assert "pydoc, sha256 ffffffffffff; the documentation of this Python" in changed(folder, protocol=protocol)
