"""Fixtures of tests in several folders, what `make test` leaves out, and how much processor time each test took."""

import gc
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

# Before numpy and torch are loaded: on matrices as small as those of tests, their threads mostly wait for each other,
# and they spin as they wait. Jobs are told by their rule.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from tests.support.cpus import cpu
from tests.support.workflow import built, edited, forked_jobs, server, tree, workflow

__all__ = ["built", "cpu", "edited", "forked_jobs", "server", "tree", "workflow"]

TIME_LIMIT_S = 1800
"""Of each test with its fixtures, for one that never ends: on a busy machine a build takes many times as long.
faulthandler_timeout in pyproject.toml, which ends the process, is longer."""
NUM_LISTED = 10
"""How many tests the report of processor time names."""
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
USED = pytest.StashKey[float]()
"""Processor seconds of this process up to the last report."""


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """An endless search fails one test, not the suite.

    Not in pyproject.toml, since pytest refuses to start on a setting of a plugin that an older environment lacks; there
    the process still ends by faulthandler_timeout.
    """
    if config.pluginmanager.hasplugin("timeout") and config.option.timeout is None:
        config.option.timeout = TIME_LIMIT_S
    gc.disable()  # until all tests and modules are there, which stay: there is next to no garbage among them


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keeps tests together that share fixtures."""
    from tests.support.schedule import ByFile

    return ByFile(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts first what takes long, builds and then slow tests, and marks the cases that `make test` leaves out.

    At the end, one process would work on a build alone while the others have nothing left.
    """
    items.sort(key=lambda item: ("tree" not in getattr(item, "fixturenames", ()), not item.get_closest_marker("slow")))
    functions: dict[str, list[pytest.Function]] = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec") and not item.get_closest_marker("slow"):
            functions[item.nodeid.partition("[")[0]].append(item)
    for cases in functions.values():
        for item in _redundant(cases):
            item.add_marker("slow")


def _redundant(cases: Sequence[pytest.Function]) -> list[pytest.Function]:
    """The cases of a test that a few others stand for, in which each row of each of its parametrizations occurs.

    The few are chosen one by one, each with as many rows as possible that occur in none before.
    """
    rows = {item: set(_rows(item)) for item in cases}
    left, seen = list(cases), set[object]()
    while left:
        chosen = max(left, key=lambda item: len(rows[item] - seen))
        if rows[chosen] <= seen:
            break
        seen |= rows[chosen]
        left.remove(chosen)
    return left


def _rows(item: pytest.Function) -> Iterator[tuple[object, ...]]:
    """Which row a case has of each parametrization of its test, and of each fixture with parameters.

    The identities of its values tell a row from the others.
    """
    params = item.callspec.params
    names = [mark.args[0] for mark in item.iter_markers("parametrize")]
    together = [tuple(name.replace(" ", "").split(",")) if isinstance(name, str) else tuple(name) for name in names]
    single = params.keys() - {name for group in together for name in group}
    for group in (*together, *((name,) for name in sorted(single))):
        yield group, *(id(params[name]) for name in group)


def pytest_collection_finish(session: pytest.Session) -> None:
    """The time of the first test begins, and the search for garbage, which leaves out what is there by now."""
    gc.freeze()
    gc.enable()
    session.config.stash[USED] = _processor_s()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Notes the processor time since the last report: of a test, and of fixtures that it is the first to ask for."""
    report = yield
    used_s = _processor_s()
    report.processor_s = used_s - item.config.stash[USED]
    item.config.stash[USED] = used_s
    return report


def _processor_s() -> float:
    """Seconds of this process and of those that it has started, which on Linux need not have ended."""
    used_s = sum(os.times()[:4])
    with suppress(OSError):
        for child in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
            fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
            used_s += sum(map(int, fields[11:15])) / TICKS_PER_S
    return used_s


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Says how much processor time the tests took, and which took most of it. Other work on the machine changes it
    little, but nothing is held to it."""
    used_s: dict[str, float] = defaultdict(float)
    for reports in terminalreporter.stats.values():
        for report in reports:
            if hasattr(report, "processor_s"):
                used_s[report.nodeid] += report.processor_s
    if not used_s:
        return
    most = sorted(used_s, key=used_s.__getitem__, reverse=True)[:NUM_LISTED]
    terminalreporter.write_line(f"{sum(used_s.values()):.0f} s of processor time, most of it in:")
    for name in most:
        terminalreporter.write_line(f"{used_s[name]:8.1f} s  {name}")
