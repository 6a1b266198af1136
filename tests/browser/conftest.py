"""One browser for all tests of a process."""

import pytest

from tests.support.browser import chromium


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    with chromium(tmp_path_factory.mktemp("profile")) as context:
        yield context
