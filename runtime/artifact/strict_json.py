"""Parses JSON strictly, for artifacts and for checkpoints: refuses what Python's own parser accepts.

Refused: a byte order mark, text that is not UTF-8, duplicate keys, NaN and Infinity (also as 1e999), integers beyond a
limit, lone surrogates, nesting deeper than a limit, more values than a limit. Size, depth and values are counted before
anything is built, so that time and memory are linear in what the limits allow.
"""

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import numpy as np

from coldpress.runtime.artifact.errors import short
from coldpress.schemas.base import MAX_EXACT_INTEGER
from coldpress.schemas.errors import ColdpressError

Refuse = Callable[[str, str], ColdpressError]
"""(found, expected) -> the error to raise; phrases that follow `is` and `expected`."""

SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


@dataclass(frozen=True)
class Limits:
    size_bytes: int
    depth: int
    integer: int
    """Largest absolute value of an integer."""
    values: int
    """Members of objects and elements of arrays, in the whole text."""
    names: int
    """Members of one object."""


ARTIFACT = Limits(size_bytes=16 << 20, depth=32, integer=MAX_EXACT_INTEGER, values=1 << 19, names=1 << 19)
MANIFEST = replace(ARTIFACT, names=1000)
FOREIGN = Limits(size_bytes=16 << 20, depth=64, integer=10**64, values=1 << 19, names=1 << 19)
"""For settings that others wrote: tokenizer_config.json says model_max_length = 10**30 for "no limit"."""
TOKENIZER = Limits(size_bytes=64 << 20, depth=32, integer=2**63 - 1, values=1 << 22, names=1 << 21)
"""For tokenizer.json: the largest in use, of 260,000 tokens and twice as many merges, takes half of each limit."""


def parse(data: bytes, refuse: Refuse, limits: Limits = ARTIFACT) -> Any:
    """Returns the value of strict JSON text in UTF-8. Raises what `refuse` makes if the text is not strict JSON or
    exceeds a limit."""
    if len(data) > limits.size_bytes:
        raise refuse(f"{len(data)} bytes long", f"at most {limits.size_bytes}")
    _check_structure(data, refuse, limits)
    reader = _Reader(refuse, limits)
    try:
        value = json.loads(
            data.decode("utf-8"),  # a byte order mark stays in, and is then no JSON
            object_pairs_hook=reader.object,
            parse_int=reader.integer,
            parse_float=reader.number,
            parse_constant=reader.number,
        )
        if SURROGATE.search(data):  # only an escape can bring in a lone surrogate; without one the walk is not needed
            reader.check(value)
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise refuse(f"not JSON ({error})", "strict JSON in UTF-8") from error
    return value


def _check_structure(data: bytes, refuse: Refuse, limits: Limits) -> None:
    """Refuses too much depth and too many values, counted as brackets and commas outside strings.

    It runs before parsing, so that the parser cannot run out of memory or stack. In text that is no JSON it may count
    wrongly; such text is refused anyway.
    """
    plain = data.replace(b"\\\\", b"").replace(b'\\"', b"")  # strings now end at the next quotation mark
    num_strings = plain.count(b'"') // 2
    if num_strings > 2 * limits.values:  # a name and what it names
        raise refuse(f"text with {num_strings} strings", f"at most {limits.values} values")
    outside = b"".join(plain.split(b'"')[::2])
    num_values = sum(map(outside.count, (b",", b"[", b"{")))
    if num_values > limits.values:
        raise refuse(f"text with about {num_values} values", f"at most {limits.values}")
    brackets = np.frombuffer(outside.translate(None, NOT_BRACKETS), np.uint8)
    steps = np.where(np.isin(brackets, list(b"[{")), np.int8(1), np.int8(-1))
    if np.cumsum(steps, dtype=np.int32).max(initial=0) > limits.depth:
        raise refuse("nested too deeply", f"at most {limits.depth} levels")


class _Reader:
    def __init__(self, refuse: Refuse, limits: Limits) -> None:
        self._refuse, self._limits = refuse, limits
        self._max_digits = len(str(limits.integer)) + 1  # one for the sign; int() of a longer text takes quadratic time

    def object(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(pairs) > self._limits.names:
            raise self._refuse(f"an object of {len(pairs)} members", f"at most {self._limits.names}")
        result = dict(pairs)
        if len(result) < len(pairs):
            seen: set[str] = set()
            name = next(name for name, _ in pairs if name in seen or seen.add(name))
            raise self._refuse(f"an object with the key {short(name)} twice", "distinct keys")
        return result

    def integer(self, text: str) -> int:
        if len(text) > self._max_digits or abs(int(text)) > self._limits.integer:
            raise self._refuse(f"text with the integer {short(text)}", f"integers up to {self._limits.integer}")
        return int(text)

    def number(self, text: str) -> float:
        value = float(text)
        if not math.isfinite(value):
            raise self._refuse(f"text with the number {short(text)}", "numbers that a double holds")
        return value

    def check(self, value: Any) -> None:
        """Refuses strings with lone surrogates, at any depth: UTF-8 cannot hold them."""
        if isinstance(value, str) and not is_encodable(value):
            raise self._refuse(f"text with the string {short(value)}", "strings without lone surrogates")
        if is_object(value):
            for name, inner in value.items():
                self.check(name)
                self.check(inner)
        elif is_array(value):
            for inner in value:
                self.check(inner)


def is_object(value: object) -> TypeGuard[dict[str, Any]]:
    return isinstance(value, dict)


def is_array(value: object) -> TypeGuard[list[Any]]:
    return isinstance(value, list)


def is_encodable(text: str) -> bool:
    """Returns whether UTF-8 can hold a text: it has no lone surrogates."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
