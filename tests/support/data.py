"""Finds the folder of real checkpoints and corpora; without it, tests that need it are skipped with a reason."""

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def find_data_folder() -> Path | None:
    """Returns the folder that COLDPRESS_TEST_DATA names, else `shared/data` beside the checkout; None if absent."""
    named = os.environ.get("COLDPRESS_TEST_DATA")
    folder = Path(named) if named else ROOT.parent / "shared" / "data"
    return folder if folder.is_dir() else None


def data_folder() -> Path:
    """Returns the folder, or skips the test."""
    folder = find_data_folder()
    if folder is None:
        pytest.skip("no real test data: set COLDPRESS_TEST_DATA to its folder")
    return folder
