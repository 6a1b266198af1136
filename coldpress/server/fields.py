"""Reads a request's body: closed records, so that a field which is not supported is refused by its name."""

import json
from collections.abc import Sequence as Several
from typing import Annotated, Any, Literal, Protocol, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from coldpress.schemas.errors import clipped
from coldpress.server.refusals import RefusalError

Fields = TypeVar("Fields", bound="Body")
Text = Annotated[str, Field(max_length=1 << 24)]
Stop = Text | Annotated[list[Text], Field(max_length=16)] | None
MAX_CHOICES, MAX_TOP = 32, 20


def _no_number(value: object) -> object:
    if not isinstance(value, bool):
        raise ValueError("false")
    return value


Never = Annotated[Literal[False], BeforeValidator(_no_number)]
"""False; a Literal alone takes 0, too."""


class Body(BaseModel):
    """A frozen, strict record of JSON. Fields that change nothing at their default are declared with that value."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)


class Asked(Body):
    """What all bodies share: the model, and what clients say for their own bookkeeping, which changes no token."""

    model: str | None = None
    """None is the one that is served."""
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    """Nothing is stored; a later request for it finds nothing."""
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None


class Drawing(Body):
    """How tokens are drawn, in the fields that all interfaces share."""

    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    """None is 1, the default of these interfaces."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None


class OpenDrawing(Drawing):
    """Further settings that open servers take, too."""

    top_k: Annotated[int, Field(ge=0)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] | None = None


def read(kind: type[Fields], body: bytes) -> Fields:
    """Parses a body.

    Raises:
        RefusalError: 400, naming the first field that is wrong.
    """
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        told = [(_name(each["loc"], body), each) for each in error.errors(include_url=False)]
    where, first = max(told, key=lambda each: each[0].count("."))  # of a field with alternatives, the nearest one
    if first["type"] == "missing":
        raise RefusalError(400, f"the field '{where}' is missing; give it", where)
    if not where:
        why = first["msg"] if first["type"] == "json_invalid" else f"it is {_found(first['input'])}"
        raise RefusalError(400, f"the body is not an object of JSON ({clipped(why)})")
    expected = [_expected(each) for name, each in told if name == where]
    if None in expected:
        raise RefusalError(400, f"the field '{where}' is not supported here; leave it out", where)
    words = " or ".join(dict.fromkeys(filter(None, expected)))
    raise RefusalError(400, f"the field '{where}' is {_found(first['input'])}, expected {words}", where)


TYPES = {
    "string": "text",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "list": "a list",
    "dict": "an object",
    "model": "an object",
    "finite_number": "a finite number",
}


def _expected(error: ErrorDetails) -> str | None:
    """Returns what a value should have been; None if the field may only be left out."""
    kind, context = error["type"], error.get("ctx", {})
    limits = {"greater_than_equal": "ge", "greater_than": "gt", "less_than_equal": "le", "less_than": "lt"}
    words = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}
    if kind in ("extra_forbidden", "none_required") or context.get("max_length") == 0:
        return None
    if kind == "less_than_equal" and context["le"] == 0:
        return "0, or to be left out"
    if kind in limits:
        return f"{words[limits[kind]]} {context[limits[kind]]}"
    if kind == "literal_error":
        return str(context["expected"])
    if kind == "value_error":
        return str(context["error"])
    if kind.endswith(("too_long", "too_short")):
        least, most = context.get("min_length"), context.get("max_length")
        thing = "text" if kind.startswith("string") else "a list"
        return f"{thing} of at most {most}" if least is None else f"{thing} of at least {least}"
    return TYPES.get(kind.removesuffix("_type"), error["msg"])


def _found(value: object) -> str:
    """Returns a value as the client wrote it."""
    return clipped(json.dumps(value, ensure_ascii=False))


def _name(parts: tuple[int | str, ...], body: bytes) -> str:
    """Returns the path of a field as the client wrote it, without the names of pydantic's alternatives."""
    from pydantic_core import from_json

    try:
        value: Any = from_json(body)
    except ValueError:
        return ""
    names = list[str]()
    for place, part in enumerate(parts):
        is_last = place == len(parts) - 1
        if isinstance(value, dict) and (part in value or is_last):
            names.append(str(part))
            value = value.get(part)  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
        elif isinstance(value, list) and isinstance(part, int):
            names.append(str(part))
            value = value[part]  # pyright: ignore[reportUnknownVariableType]
    return ".".join(names)


class HasText(Protocol):
    """A part of a message."""

    @property
    def text(self) -> str:
        """Returns its text."""
        ...


def text_in(content: str | Several[HasText] | None) -> str:
    """Returns the text of a message, which comes in one or in parts; an assistant's may have none."""
    return content if isinstance(content, str) else "".join(part.text for part in content or ())


def stops_of(stop: Stop) -> tuple[str, ...]:
    """Returns the stop strings of a field that takes one or several."""
    return () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)
