"""Compiled loops: numba, cached on disk where that is possible."""

from collections.abc import Callable
from typing import Any

import numba
from numba import types
from numba.extending import intrinsic


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` compiled at its first call; kept for the next process unless no folder can be written to."""
    try:
        return numba.njit(cache=True)(function)
    except RuntimeError:  # a read-only installation without a writable cache folder
        return numba.njit(function)


@intrinsic
def _population_count(typing_context: Any, word: Any) -> Any:
    """Set bits of a uint64 in compiled code: the processor's own instruction, in vector form where it has one."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.ctpop(arguments[0])

    return types.uint64(types.uint64), generate


population_count: Any = _population_count  # called with the word alone: the compiler adds the context
