"""Decides which tests share a process of pytest-xdist: those of a file, and those that share one build."""

from typing import Any

from xdist.scheduler import LoadScopeScheduling

BUILDS = ("tests/workflow/", "tests/contracts/test_one_file.py")
"""Tests of the shared build (tests/support/workflow.py); they share a process, so that no other waits for the build."""
ALONE = "tests/contracts/test_benchmarks.py::test_a_benchmark_runs_"
"""Prefix of a test's cases that share nothing and take long together: each goes to any free process."""


class ByFile(LoadScopeScheduling):
    """Gives a process one file at a time, in the order of tests/conftest.py.

    So a file's shared fixtures are made once, and tests/runtime/test_emulation.py never runs in two processes at once.
    """

    def __init__(self, config: Any, log: Any) -> None:
        config.option.loadscopereorder = False
        super().__init__(config, log)

    def _split_scope(self, nodeid: str) -> str:
        if nodeid.startswith(ALONE):
            return nodeid
        return BUILDS[0] if nodeid.startswith(BUILDS) else nodeid.partition("::")[0]
