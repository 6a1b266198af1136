"""Finds the storage format (runtime/quantization) that has the values and the layout of a type of GGUF."""

import functools
from collections.abc import Mapping

from coldpress.runtime.plugins import load, names
from coldpress.runtime.quantization import Format

PACKAGE = "coldpress.runtime.quantization"


@functools.cache
def formats() -> Mapping[str, str]:
    """Returns the format of each type that has one of the same values and layout."""
    found = {name: load(PACKAGE, Format, name).GGUF_TYPE for name in names(PACKAGE)}
    return {kind: name for name, kind in found.items() if kind is not None}
