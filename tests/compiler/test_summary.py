"""compiler/workflow/summary.py: the screen after a build, from the build's own records."""

import shlex
import sys
from pathlib import Path

import pytest

from coldpress.compiler.io import load_record, save_record
from coldpress.compiler.workflow import summary
from coldpress.schemas.errors import ColdpressError
from coldpress.schemas.metrics import DenseRun, Metrics, Sample
from coldpress.schemas.package import Package

IDENTITY = "0123456789abcdef" * 4
PROMPT = "It's a cat; $HOME"


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
        modelled_tokens_per_s=1241.0,
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
        ladder=(),
        sample=Sample(prompt=PROMPT, text=" sat\ndown", max_new_tokens=48, temperature=0.6, seed=7),
    )
    package = Package(
        folder=str(tmp_path / "my demo.coldpress"),
        manifest_sha256=IDENTITY,
        artifact_bytes=4_600_000,
        flash_bytes=3_000_000,
        resident_bytes=813_600,
        predictor_bytes=0,
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
    assert "  It's a cat; $HOME sat\n  down\n" in text
    for figure in ("4.6 MB", "814 kB", "2.2 MB", "123 kB", "55.0 reads", "19.1%", "46 tokens/s", IDENTITY):
        assert figure in text, figure
    assert "25.29 ± 1.34; of the source 23.91 ± 1.23; ratio 1.0575 ± 0.0123" in text
    assert "4 of 16 blocks of test text, 1,020 tokens" in text
    assert str(folder / "my demo.coldpress") in text
    assert str(folder / "report.html") in text


def test_text_of_a_strange_model_moves_no_cursor(folder: Path) -> None:
    sample = Sample(prompt="a", text="\x1b[2J\rb\nc", max_new_tokens=1, temperature=0.6, seed=7)
    assert "\n  a\\x1b[2J\\rb\n  c\n" in changed(folder, sample=sample)


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
    assert f"\n  env/bin/python -m coldpress.runtime{end}" in summary.show(folder)
    beside.with_name("coldpress-run").touch()
    assert f"\n  env/bin/coldpress-run{end}" in summary.show(folder)
    monkeypatch.setenv("VIRTUAL_ENV", str(folder / "env"))
    assert f"\n  coldpress-run{end}" in summary.show(folder)


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
    assert "500 tokens/s, 2.61 MB in 24 reads per token, perplexity 23.94; this artifact is 2.48" in summary.show(
        folder
    )
    said = "0.50 times as fast: sparsity does not pay here, build with method=dense"
    assert said in changed(folder, modelled_tokens_per_s=250.0)
    assert "this artifact is dense" in changed(folder, method="dense")
    assert "does not fit" in changed(folder, dense=None)
