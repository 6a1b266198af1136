"""JSON as an artifact may contain it: what Python's own reader lets pass is refused here.

Refused: a byte order mark, text that is not UTF-8, duplicate keys, NaN and Infinity (also as 1e999), integers that
doubles cannot hold, lone surrogates, nesting deeper than `MAX_DEPTH`. Sizes are capped before parsing.
"""

import json
import math
from typing import Any

from runtime.artifact.errors import JsonError, short
from schemas.base import MAX_EXACT_INTEGER

MAX_DEPTH = 32
MAX_BYTES = 16 << 20


def parse(data: bytes, file: str, field: str = "the text") -> Any:
    """The value of strict JSON text.

    Args:
        data: The text in UTF-8.
        file: Name of the file, for errors.
        field: What of the file the text is, for errors.

    Raises:
        JsonError: if the text is anything else.
    """
    if len(data) > MAX_BYTES:
        raise JsonError(file, field, f"{len(data)} bytes long", f"at most {MAX_BYTES}")
    reader = _Reader(file, field)
    try:
        value = json.loads(
            data.decode("utf-8"),  # a byte order mark stays in, and is then no JSON
            object_pairs_hook=reader.object,
            parse_int=reader.integer,
            parse_float=reader.number,
            parse_constant=reader.constant,
        )
        _check(value, reader, 1)
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise JsonError(file, field, f"not JSON ({error})", "strict JSON in UTF-8") from error
    except RecursionError as error:
        raise reader.error("nested too deeply", f"at most {MAX_DEPTH} levels") from error
    return value


def dump(value: Any) -> str:
    """JSON text of what `parse` returned, for a reader with types of its own."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


class _Reader:
    def __init__(self, file: str, field: str) -> None:
        self.file, self.field = file, field

    def error(self, found: str, expected: str) -> JsonError:
        return JsonError(self.file, self.field, found, expected)

    def object(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise self.error(f"an object with the key {short(twice)} twice", "distinct keys")
        return result

    def integer(self, text: str) -> int:
        if len(text) > 17 or abs(int(text)) > MAX_EXACT_INTEGER:
            raise self.error(f"text with the integer {short(text)}", f"integers up to {MAX_EXACT_INTEGER}")
        return int(text)

    def number(self, text: str) -> float:
        value = float(text)
        if not math.isfinite(value):
            raise self.error(f"text with the number {short(text)}", "numbers that a double holds")
        return value

    def constant(self, text: str) -> float:
        raise self.error(f"text with {text}", "finite numbers")


def _check(value: Any, reader: _Reader, depth: int) -> None:
    """Depth, and texts that cannot be written back as UTF-8."""
    if depth > MAX_DEPTH:
        raise reader.error("nested too deeply", f"at most {MAX_DEPTH} levels")
    if isinstance(value, str) and not _is_encodable(value):
        raise reader.error(f"text with the string {short(value)}", "strings without lone surrogates")
    if isinstance(value, dict):
        for key, inner in value.items():
            _check(key, reader, depth)
            _check(inner, reader, depth + 1)
    elif isinstance(value, list):
        for inner in value:
            _check(inner, reader, depth + 1)


def _is_encodable(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text) if not text.isascii() else True
