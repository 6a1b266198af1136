"""JSON that came with a checkpoint: strict, capped in size, and refused with a sentence that names the file.

Refuses what Python's reader lets pass: duplicate keys, NaN and Infinity (also as 1e999), text that is not UTF-8 or
starts with a byte order mark, nesting or integers beyond reason.
"""

import json
import math
from pathlib import Path
from typing import Any

from schemas.errors import CheckpointError

MAX_DIGITS = 64  # tokenizer_config.json says model_max_length = 10**30 where there is no limit


def read_json(path: Path, max_bytes: int) -> Any:
    """The value of a strict JSON file of at most `max_bytes`.

    Raises:
        CheckpointError: if the file is larger, missing or anything but strict JSON.
    """
    try:
        size_bytes = path.stat().st_size
        if size_bytes > max_bytes:
            raise CheckpointError(f"{path.name}: found {size_bytes} bytes, expected at most {max_bytes}")
        return parse_json(path.read_bytes(), path.name)
    except OSError as error:
        raise CheckpointError(f"{path.name}: cannot be read ({error.strerror}); complete the checkpoint") from error


def read_object(path: Path, max_bytes: int) -> dict[str, Any]:
    """As `read_json`, for a file that holds one JSON object.

    Raises:
        CheckpointError: as `read_json`, or if the value is no object.
    """
    value = read_json(path, max_bytes)
    if not isinstance(value, dict):
        raise CheckpointError(f"{path.name}: found a JSON {type(value).__name__}, expected an object")
    return value


def parse_json(data: bytes, place: str) -> Any:
    """The value of strict JSON text; `place` names it in errors.

    Raises:
        CheckpointError: if the text is anything else.
    """
    reader = _Reader(place)
    try:
        return json.loads(
            data.decode("utf-8"),
            object_pairs_hook=reader.object,
            parse_int=reader.integer,
            parse_float=reader.number,
            parse_constant=reader.number,
        )
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{place}: not UTF-8 at byte {error.start}") from error
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{place}: not JSON ({error.msg} at character {error.pos})") from error
    except RecursionError as error:
        raise CheckpointError(f"{place}: JSON that is nested too deeply") from error


class _Reader:
    def __init__(self, place: str) -> None:
        self.place = place

    def object(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise CheckpointError(f"{self.place}: the key {twice[:80]!r} occurs twice, expected distinct keys")
        return result

    def integer(self, text: str) -> int:
        if len(text) > MAX_DIGITS:
            raise CheckpointError(f"{self.place}: an integer of {len(text)} digits, expected at most {MAX_DIGITS}")
        return int(text)

    def number(self, text: str) -> float:
        value = float(text)
        if not math.isfinite(value):
            raise CheckpointError(f"{self.place}: the number {text[:40]}, expected finite numbers")
        return value
