"""All tests of this folder run in one worker, because they share a build (tests/support/workflow.py)."""

from pathlib import Path

import pytest

from tests.support.workflow import GROUP


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(item.path).parent == Path(__file__).parent:
            item.add_marker(GROUP)
