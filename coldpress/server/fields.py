"""Reads a request's body: closed records, so that a field which is not supported is refused by its name."""

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from coldpress.schemas.errors import clipped
from coldpress.server.refusals import RefusalError

Fields = TypeVar("Fields", bound="Body")
Text = Annotated[str, Field(max_length=1 << 24)]
Stop = Text | Annotated[list[Text], Field(max_length=16)] | None
MAX_CHOICES, MAX_TOP = 32, 20


def _no_number(value: object) -> object:
    if not isinstance(value, bool):
        raise ValueError("Input should be false")
    return value


Never = Annotated[Literal[False], BeforeValidator(_no_number)]
"""False; a Literal alone takes 0, too."""


class Body(BaseModel):
    """A frozen, strict record of JSON. Fields that change nothing at their default are declared with that value."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)


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
        first = error.errors(include_url=False, include_context=False)[0]
    where = _name(first["loc"], body)
    if first["type"] == "extra_forbidden":
        raise RefusalError(400, f"the field '{where}' is not supported here; leave it out", where)
    if first["type"] == "missing":
        raise RefusalError(400, f"the field '{where}' is missing; give it", where)
    if not where:
        raise RefusalError(400, f"the body is not what is expected here ({clipped(first['msg'])})")
    found = clipped(repr(first["input"]))
    raise RefusalError(400, f"the field '{where}' is {found}, which is not supported ({first['msg']})", where)


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


def stops_of(stop: Stop) -> tuple[str, ...]:
    """Returns the stop strings of a field that takes one or several."""
    return () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)
