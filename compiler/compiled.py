"""Compiles loops with numba, cached on disk where possible, and adds the bit counts that numba lacks. Compiled
functions release the interpreter lock, so that threads can share a layer's work."""

from collections.abc import Callable
from typing import Any

import numba
from numba import types
from numba.extending import intrinsic


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles `function` at its first call; caches it for later processes if a folder is writable."""
    try:
        return numba.njit(cache=True, nogil=True)(function)
    except RuntimeError:  # a read-only installation without a writable cache folder
        return numba.njit(nogil=True)(function)


@intrinsic
def _population_count(typing_context: Any, word: Any) -> Any:
    """Counts the set bits of a uint64 with the processor's instruction, in vector form where there is one."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.ctpop(arguments[0])

    return types.int64(types.uint64), generate


@intrinsic
def _trailing_zeros(typing_context: Any, word: Any) -> Any:
    """Returns the index of the lowest set bit of a uint64 that is not 0."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], context.get_constant(types.boolean, True))

    return types.int64(types.uint64), generate


# Call these with the word alone: the compiler adds the context.
population_count: Any = _population_count
trailing_zeros: Any = _trailing_zeros
