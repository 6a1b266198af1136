"""compiler/workflow/summary.py: the screen after a build, from the build's own records."""

from pathlib import Path

import pytest

from compiler._io import load_record, save_record
from compiler.workflow import summary
from schemas.metrics import DenseRun, Metrics
from schemas.package import Package


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    metrics = Metrics(
        model="demo",
        device="pixel6",
        method="predictor",
        format="int8_group32",
        artifact_sha256="0" * 64,
        artifact_bytes=4_600_000,
        flash_bytes=3_000_000,
        resident_bytes=813_600,
        budget_bytes=2_200_000,
        flash_bytes_per_token=123_456.0,
        reads_per_token=55.04,
        hit_rate=0.191,
        ppl_source=23.912,
        ppl_artifact=25.288,
        tokens_per_s=46.4,
        modelled_tokens_per_s=1241.0,
        ppl_dense=23.94,
        dense=DenseRun(
            reads_per_token=24,
            flash_bytes_per_token=2_610_000,
            flash_s=0.0015,
            dram_s=0.0005,
            read_buffer_bytes=65536,
            pinned_bytes=500_000,
        ),
    )
    package = Package(
        folder=str(tmp_path / "demo.coldpress"),
        manifest_sha256="0" * 64,
        artifact_bytes=4_600_000,
        flash_bytes=3_000_000,
        resident_bytes=813_600,
        predictor_bytes=0,
    )
    save_record(metrics, tmp_path / "metrics.json")
    save_record(package, tmp_path / "publish.json")
    return tmp_path


def test_the_screen_has_text_figures_and_paths(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(summary, "generate", lambda artifact, prompt, num_tokens: f" [{artifact.name} {num_tokens}]")
    text = summary.show(folder, "Once")
    assert "Once [demo.coldpress 48]" in text
    for figure in ("4.6 MB", "814 kB", "2.2 MB", "123 kB", "55.0 reads", "19.1%", "23.91", "25.29", "46 tokens/s"):
        assert figure in text, figure
    assert str(folder / "demo.coldpress") in text
    assert str(folder / "report.html") in text


def test_what_is_missing_is_said(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert summary.main([str(folder)]) == 2  # the artifact is not there: the runtime's own sentence
    assert capsys.readouterr().err.startswith("error: ")
    (folder / "metrics.json").unlink()
    assert summary.main([str(folder)]) == 2
    assert "no such Metrics record" in capsys.readouterr().err


def test_dense_stands_beside_the_choice(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slower than a dense run in the same DRAM: the screen gives both speeds and says what to do."""
    monkeypatch.setattr(summary, "generate", lambda artifact, prompt, num_tokens: "")
    metrics = load_record(folder / "metrics.json", Metrics)
    assert "500 tokens/s, 2.61 MB in 24 reads per token, perplexity 23.94; this artifact is 2.48" in summary.show(
        folder, ""
    )
    save_record(metrics.model_copy(update={"modelled_tokens_per_s": 250.0}), folder / "metrics.json")
    assert "0.50 times as fast: sparsity does not pay here, build with method=dense" in summary.show(folder, "")
    save_record(metrics.model_copy(update={"method": "dense"}), folder / "metrics.json")
    assert "this artifact is dense" in summary.show(folder, "")
    save_record(metrics.model_copy(update={"dense": None}), folder / "metrics.json")
    assert "does not fit" in summary.show(folder, "")
