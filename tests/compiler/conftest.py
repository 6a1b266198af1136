"""Checkpoints that tests of several stages ingest."""

from pathlib import Path

import pytest

from tests.support.models import write_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint in one file."""
    return write_model(tmp_path / "tiny", num_hidden_layers=2, relu=True)


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A checkpoint in three files with an index."""
    return write_model(tmp_path / "tiny", num_hidden_layers=2, num_shards=3)
