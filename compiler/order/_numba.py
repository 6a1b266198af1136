"""Compiled loops: numba, cached on disk where that is possible."""

from collections.abc import Callable
from typing import Any

import numba


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` compiled at its first call; kept for the next process unless no folder can be written to."""
    try:
        return numba.njit(cache=True)(function)
    except RuntimeError:  # a read-only installation without a writable cache folder
        return numba.njit(function)
