"""Reads records from YAML files that people write, such as profiles, and reports all mistakes of a file in one error.

YAML can do more than a profile needs, and a stranger's file must cost neither memory nor time. So aliases, tags, dates
and long numbers are refused, and a file has a largest size and depth. Amounts of memory may have a unit, as in `8GB`.
"""

import difflib
import json
import os
import stat
import types
import typing
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar, cast

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from coldpress.runtime.quantities import parse_bytes
from coldpress.schemas.base import Record
from coldpress.schemas.errors import ColdpressError, clipped

R = TypeVar("R", bound=Record)
MAX_FILE_BYTES = 1 << 18
"""The longest profile of this repository has 3 kB."""
MAX_DEPTH = 32
MAX_NUMBER_CHARS = 64
MAX_MISTAKES = 20
"""Most mistakes of one file that the error names; further ones become `and others`."""
MAX_SHOWN_CHARS = 60
TIMESTAMP = "tag:yaml.org,2002:timestamp"


def load_yaml(path: Path, kind: type[R]) -> R:
    """Reads a record from a YAML file; amounts of memory may be text, such as `8GB`. Raises `ColdpressError` if the
    file cannot be read, or is not such a record; the text names every mistake."""
    try:
        data = yaml.load(_read(path), Loader=_Loader)
        return kind.model_validate_json(json.dumps(_with_amounts(data)))
    except yaml.YAMLError as error:
        raise ColdpressError(f"{path}: not a YAML profile: {_problem(error)}") from error
    except ValidationError as error:
        mistakes = _mistakes(error.errors(), kind)
        told = list(islice(mistakes, MAX_MISTAKES))
        more = ["and others"] if next(mistakes, None) else []
        raise ColdpressError(f"{path}: {'; '.join(told + more)}") from error


def _read(path: Path) -> str:
    try:
        # O_NONBLOCK: else opening a pipe would wait for a writer, before fstat can say that it is a pipe
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise ColdpressError(f"{path}: not a file, expected a profile in YAML")
            data = file.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError as error:
        raise ColdpressError(f"{path}: no such profile") from error
    except OSError as error:
        raise ColdpressError(f"{clipped(str(path))}: the profile cannot be read ({error.strerror})") from error
    if len(data) > MAX_FILE_BYTES:
        raise ColdpressError(f"{path}: the file has more than {MAX_FILE_BYTES} bytes, which no profile needs")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ColdpressError(f"{path}: not a YAML profile: it is not UTF-8 at byte {error.start}") from error


class _Loader(yaml.SafeLoader):
    """SafeLoader for plain data: mappings with distinct keys, lists, text, numbers, true, false and null.

    PyYAML silently keeps the last of two equal keys; aliases can expand a few bytes to gigabytes; its constructors of
    tags and dates raise arbitrary errors.
    """

    yaml_implicit_resolvers = {  # noqa: RUF012
        first: [(tag, pattern) for tag, pattern in resolvers if tag != TIMESTAMP]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = cast(Any, self.peek_event())  # pyright: ignore[reportUnknownMemberType]  PyYAML gives it no type
        if isinstance(event, yaml.AliasEvent):
            raise _refused("an alias is used, expected the value itself", event)
        if getattr(event, "anchor", None) is not None:
            raise _refused("an anchor is set, which no profile needs", event)
        if getattr(event, "tag", None) is not None:
            raise _refused(f"the tag {clipped(event.tag, MAX_SHOWN_CHARS)} is given, expected plain values", event)
        if self.depth >= MAX_DEPTH:
            raise _refused(f"the values are nested more than {MAX_DEPTH} deep", event)
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise _refused("a key is a list or a mapping, expected a name", key)
            if key.value in seen:
                raise _refused(f"key {clipped(key.value, MAX_SHOWN_CHARS)!r} is given twice", key)
            seen.add(key.value)
        return super().construct_mapping(node, deep)

    def construct_number(self, node: yaml.ScalarNode) -> int | float:
        """Returns a number; refuses long ones, for which Python takes quadratic time or raises an error."""
        if len(node.value) > MAX_NUMBER_CHARS:
            raise _refused(f"a number has {len(node.value)} characters, expected {MAX_NUMBER_CHARS} at most", node)
        try:
            return self.construct_yaml_int(node) if node.tag.endswith("int") else self.construct_yaml_float(node)
        except ValueError as error:
            raise _refused(f"{node.value!r} is no number", node) from error


for _number in ("int", "float"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_number}", _Loader.construct_number)


def _problem(error: yaml.YAMLError) -> str:
    mark: yaml.Mark | None = getattr(error, "problem_mark", None)
    text = " ".join(str(getattr(error, "problem", None) or error).split())
    return clipped(text if mark is None else f"line {mark.line + 1}: {text}")


def _refused(what: str, where: Any) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=what, problem_mark=where.start_mark)


def _with_amounts(data: Any, name: str = "") -> Any:
    """Returns `data` with amounts of memory as bytes: texts under a name in `_bytes`, or under its `value`."""
    if isinstance(data, dict):
        members = cast(dict[Any, Any], data)
        return {
            key: _with_amounts(value, name if key == "value" else "" if key == "source" else str(key))
            for key, value in members.items()
        }
    if isinstance(data, list):
        return [_with_amounts(value, name) for value in cast(list[Any], data)]
    if isinstance(data, str) and name.endswith("_bytes"):
        try:
            return parse_bytes(data)
        except ColdpressError:
            return data  # the record's own check names the place
    return data


def _mistakes(errors: Sequence[ErrorDetails], kind: type[Record]) -> Iterator[str]:
    """Yields a phrase for each mistake; it omits a missing key if a misspelt one stands in its place."""
    meant: set[tuple[int | str, ...]] = set()
    is_listed = False
    for error in (error for error in errors if error["type"] == "extra_forbidden"):
        *place, key = error["loc"]
        known = sorted(_fields_at(kind, place))
        near = difflib.get_close_matches(clipped(str(key)), known, n=1)
        meant |= {(*place, name) for name in near}
        told = f"; did you mean '{near[0]}'?" if near else "" if is_listed else f"; known are {', '.join(known)}"
        is_listed = is_listed or not near
        yield f"{_at(place)}unknown key '{clipped(str(key), MAX_SHOWN_CHARS)}'{told}"
    for error in errors:
        if error["type"] == "missing" and error["loc"] not in meant:
            yield f"{_at(error['loc'][:-1])}missing key '{error['loc'][-1]}'"
        elif error["type"] not in ("missing", "extra_forbidden", "default_factory_not_called"):
            yield _wrong(error)


def _wrong(error: ErrorDetails) -> str:
    names, found = [str(part) for part in error["loc"]], error["input"]
    if error["type"] == "value_error":
        text = error["msg"].removeprefix("Value error, ")
        return f"{_at(names[:-1] if names and text.startswith(names[-1]) else names)}{text}"
    expected = error["msg"]
    if not names:
        expected = "expected keys with values"
    elif names == ["name"] and error["type"] == "string_pattern_mismatch":
        expected = "expected small letters, digits and single hyphens between them"
    elif error["type"] == "int_type" and any(name.endswith("_bytes") for name in names[-2:]):
        expected = "expected bytes, or an amount of memory such as 8GB"
    return f"{_at(names)}{expected}, found {_shown(found)}"


def _shown(value: object) -> str:
    if isinstance(value, dict | list):
        return "a mapping" if isinstance(value, dict) else "a list"
    return clipped(repr(value), MAX_SHOWN_CHARS)


def _at(place: Sequence[int | str]) -> str:
    return f"{clipped('.'.join(map(str, place)))}: " if place else ""


def _fields_at(kind: Any, place: Sequence[int | str]) -> set[str]:
    kind = _record_of(kind)
    for part in place:
        if isinstance(part, str) and isinstance(kind, type) and issubclass(kind, Record):
            kind = _record_of(kind.model_fields[part].annotation if part in kind.model_fields else None)
    return set(kind.model_fields) if isinstance(kind, type) and issubclass(kind, Record) else set()


def _record_of(annotation: Any) -> Any:
    """Returns the record inside an annotation such as `Accelerator | None` or `tuple[ReadPoint, ...]`, else None."""
    if isinstance(annotation, type) and not isinstance(annotation, types.GenericAlias):
        return annotation if issubclass(annotation, Record) else None
    inner = (_record_of(part) for part in typing.get_args(annotation))
    return next((found for found in inner if found is not None), None)
