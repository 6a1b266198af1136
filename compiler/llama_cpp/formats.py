"""Finds the storage format (runtime/quantization) that has the values and the layout of a type of GGUF."""

import functools
from collections.abc import Mapping

from coldpress.runtime.plugins import load, names
from coldpress.runtime.quantization import Format

PACKAGE = "coldpress.runtime.quantization"


@functools.cache
def formats() -> Mapping[str, str]:
    return {type_of(name): name for name in names(PACKAGE)}


def type_of(format_name: str) -> str:
    return load(PACKAGE, Format, format_name).GGUF_TYPE
