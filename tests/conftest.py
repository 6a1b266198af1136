"""Fixtures of tests in several folders, and the check that the mark `slow` is where it belongs."""

import os
from collections.abc import Iterator

import pytest

from tests.support.workflow import built, edited, tree, workflow

__all__ = ["built", "edited", "tree", "workflow"]
SLOW_S = 10
TOLERANCE = 3
"""Processors differ: an unmarked test fails only where it takes this many times as long as the mark says."""


TIME_LIMIT_S = 600
"""Of each test with its fixtures; shorter than faulthandler_timeout in pyproject.toml, which ends the process."""


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """An endless search fails one test, not the suite.

    Not in pyproject.toml, since pytest refuses to start on a setting of a plugin that an older environment lacks; there
    the process still ends by faulthandler_timeout.
    """
    if config.pluginmanager.hasplugin("timeout") and config.option.timeout is None:
        config.option.timeout = TIME_LIMIT_S


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes long begins first, or one process works on it alone at the end while the others have nothing left."""
    items.sort(key=lambda item: not any(item.get_closest_marker(name) for name in ("slow", "xdist_group")))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Fails a test that is slow and not marked so, by processor time, which other work on the machine does not change.

    What it waits for counts nothing, and neither do fixtures: several tests share them.
    """
    before = _processor_s()
    yield
    used = _processor_s() - before
    if used > TOLERANCE * SLOW_S and item.get_closest_marker("slow") is None:
        pytest.fail(f"it took {used:.0f} s of processor time; mark it slow, or make it quicker", pytrace=False)


def _processor_s() -> float:
    """Seconds of this process and of the ones that it has waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
