"""Runs a test under each instruction set of this machine."""

from collections.abc import Iterator

import pytest

from coldpress.runtime import _native


@pytest.fixture(params=_native.cpus())
def cpu(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each instruction set of this machine in turn, in use."""
    before = _native.cpu()
    _native.use_cpu(request.param)
    yield request.param
    _native.use_cpu(before)
