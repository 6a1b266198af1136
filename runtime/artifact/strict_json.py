"""The one strict JSON parser: what Python's own reader lets pass is refused here, for artifacts and checkpoints alike.

Refused: a byte order mark, text that is not UTF-8, duplicate keys, NaN and Infinity (also as 1e999), integers beyond a
limit, lone surrogates, nesting deeper than a limit. The size is capped before parsing, and time is linear in it.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from runtime.artifact.errors import short
from schemas.base import MAX_EXACT_INTEGER
from schemas.errors import ColdpressError

Refuse = Callable[[str, str], ColdpressError]
"""(what the text is, what was expected) -> the error to raise; phrases that follow `is` and `expected`."""


@dataclass(frozen=True)
class Limits:
    """What a text may be at most."""

    size_bytes: int
    depth: int
    integer: int
    """Largest absolute value of an integer."""


ARTIFACT = Limits(size_bytes=16 << 20, depth=32, integer=MAX_EXACT_INTEGER)
FOREIGN = Limits(size_bytes=16 << 20, depth=64, integer=10**64)
"""Settings that others wrote: tokenizer_config.json says model_max_length = 10**30 where there is no limit."""


def parse(data: bytes, refuse: Refuse, limits: Limits = ARTIFACT) -> Any:
    """The value of strict JSON text.

    Args:
        data: The text in UTF-8.
        refuse: Makes the error, of the class that fits the file, which it names.
        limits: Of size, depth and integers.

    Raises:
        ColdpressError: what `refuse` makes, if the text is anything else.
    """
    if len(data) > limits.size_bytes:
        raise refuse(f"{len(data)} bytes long", f"at most {limits.size_bytes}")
    reader = _Reader(refuse, limits)
    try:
        value = json.loads(
            data.decode("utf-8"),  # a byte order mark stays in, and is then no JSON
            object_pairs_hook=reader.object,
            parse_int=reader.integer,
            parse_float=reader.number,
            parse_constant=reader.number,
        )
        reader.check(value, 1)
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise refuse(f"not JSON ({error})", "strict JSON in UTF-8") from error
    except RecursionError as error:
        raise reader.too_deep() from error
    return value


def dump(value: Any) -> str:
    """JSON text of what `parse` returned, for a reader with types of its own."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


class _Reader:
    def __init__(self, refuse: Refuse, limits: Limits) -> None:
        self._refuse, self._limits = refuse, limits
        self._max_digits = len(str(limits.integer)) + 1  # and a sign; int() of more takes quadratic time

    def object(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for name, value in pairs:
            if name in result:
                raise self._refuse(f"an object with the key {short(name)} twice", "distinct keys")
            result[name] = value
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

    def too_deep(self) -> ColdpressError:
        return self._refuse("nested too deeply", f"at most {self._limits.depth} levels")

    def check(self, value: Any, depth: int) -> None:
        """Depth, and texts that cannot be written back as UTF-8."""
        if depth > self._limits.depth:
            raise self.too_deep()
        if isinstance(value, str) and not _is_encodable(value):
            raise self._refuse(f"text with the string {short(value)}", "strings without lone surrogates")
        if isinstance(value, dict):
            for key, inner in value.items():
                self.check(key, depth)
                self.check(inner, depth + 1)
        elif isinstance(value, list):
            for inner in value:
                self.check(inner, depth + 1)


def _is_encodable(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
