"""The folder of real checkpoints and corpora; tests that need it skip with a reason where it is absent."""

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def find_data_folder() -> Path | None:
    """COLDPRESS_TEST_DATA, else `shared/data` beside the checkout, else None."""
    named = os.environ.get("COLDPRESS_TEST_DATA")
    folder = Path(named) if named else ROOT.parent / "shared" / "data"
    return folder if folder.is_dir() else None


def data_folder() -> Path:
    """The folder, or a skipped test."""
    folder = find_data_folder()
    if folder is None:
        pytest.skip("no real test data: set COLDPRESS_TEST_DATA to its folder")
    return folder
