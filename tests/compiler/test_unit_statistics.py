"""What selectors are fitted to: norms of the source's weights, a few rows at a time, for those that ask."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coldpress.compiler.activity import unit_statistics
from coldpress.compiler.activity.unit_statistics import UnitStatistics, unit_norms
from coldpress.compiler.checkpoint.tensors import read_role, read_rows
from coldpress.compiler.io import Workspace
from coldpress.compiler.stages import ingest
from coldpress.compiler.stages.ingest import IngestConfig
from coldpress.schemas.errors import CheckpointError
from tests.support.models import write_model
from tests.support.statistics import model_of


def test_norms_are_those_of_the_source_s_weights(tmp_path: Path) -> None:
    write_model(tmp_path / "tiny", num_hidden_layers=2, dtype="float16")
    source = ingest.run(IngestConfig(model=str(tmp_path / "tiny")), Workspace(tmp_path / "work", "test"))
    gate, up, down = (read_role(source, f"layers.1.{name}_proj.weight") for name in ("gate", "up", "down"))
    columns = np.linalg.norm(np.concatenate([gate, up]), axis=0)
    assert unit_norms(source, 1, "mlp_in") == pytest.approx(columns, rel=1e-6)
    assert unit_norms(source, 1, "mlp_mid") == pytest.approx(np.linalg.norm(down, axis=0), rel=1e-6)
    whole = np.sqrt((gate**2).sum(axis=1) + (up**2).sum(axis=1) + (down**2).sum(axis=0))
    assert unit_norms(source, 1, "neuron") == pytest.approx(whole, rel=1e-6)


def test_norms_need_a_few_rows_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path / "tiny", num_hidden_layers=2)
    source = ingest.run(IngestConfig(model=str(tmp_path / "tiny")), Workspace(tmp_path / "work", "test"))
    at_once = unit_norms(source, 0, "neuron")
    monkeypatch.setattr(unit_statistics, "CHUNK_VALUES", 700)
    largest = 0

    def counted(*arguments: Any) -> np.ndarray:
        nonlocal largest
        rows = read_rows(*arguments)
        largest = max(largest, rows.size)
        return rows

    monkeypatch.setattr(unit_statistics, "read_rows", counted)
    assert unit_norms(source, 0, "neuron") == pytest.approx(at_once, rel=1e-6)
    assert 0 < largest <= 700


def test_norms_are_computed_for_who_asks() -> None:
    """The model has no files."""
    known = UnitStatistics(model_of(2, 256, 1024), 0, "mlp_in", {"counts": np.zeros(3)})
    assert list(known) == ["counts", "unit_norms"]
    assert len(known) == 2
    assert "counts" in known
    assert "bits" not in known
    with pytest.raises(CheckpointError):
        known["unit_norms"]
