"""Reads a request's body: closed records, so that a field which is not supported is refused by its name."""

import json
from collections.abc import Sequence as Several
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from coldpress.runtime.generate.sampling import MinP, RepetitionPenalty, Seed, Temperature, TopK, TopP, expected
from coldpress.schemas.errors import clipped
from coldpress.server.refusals import RefusalError

Fields = TypeVar("Fields", bound="Body")
Text = Annotated[str, Field(max_length=1 << 24)]
Stop = Text | Annotated[list[Text], Field(max_length=16)] | None
MAX_CHOICES, MAX_TOP = 32, 20
UNSUPPORTED = ("extra_forbidden", "none_required")
"""Mistakes of a field that may only be left out."""


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
    """Fields of all bodies: the model, and clients' own bookkeeping, which changes no token."""

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
    """Settings of draws that all interfaces share."""

    temperature: Temperature | None = None
    """None is 1, the default of these interfaces."""
    top_p: TopP | None = None


class OpenDrawing(Drawing):
    """Further settings that open servers take, too."""

    top_k: TopK | None = None
    min_p: MinP | None = None
    repetition_penalty: RepetitionPenalty | None = None
    seed: Seed | None = None


def read(kind: type[Fields], body: bytes) -> Fields:
    """Parses a body. Raises `RefusalError`, 400, naming the first field that is wrong."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        told = [(_name(each["loc"], each["type"]), each) for each in error.errors(include_url=False)]
    where, first = max(told, key=lambda each: each[0].count("."))  # of a field with alternatives, the nearest one
    if first["type"] == "missing":
        raise RefusalError(400, f"the field '{where}' is missing; give it", where)
    if not where:
        why = first["msg"] if first["type"] == "json_invalid" else f"it is {_found(first['input'])}"
        raise RefusalError(400, f"the body is not an object of JSON ({clipped(why)})")
    here = [each for name, each in told if name == where]
    if any(each["type"] in UNSUPPORTED or each.get("ctx", {}).get("max_length") == 0 for each in here):
        raise RefusalError(400, f"the field '{where}' is not supported here; leave it out", where)
    words = " or ".join(dict.fromkeys(map(expected, here)))
    raise RefusalError(400, f"the field '{where}' is {_found(first['input'])}, expected {words}", where)


def _found(value: object) -> str:
    return clipped(json.dumps(value, ensure_ascii=False))


def _name(parts: tuple[int | str, ...], kind: str) -> str:
    """Returns the path of a field, without the names of pydantic's alternatives, such as `list[TextPart]` or `str`."""
    last = len(parts) - 1
    names = [
        str(part)
        for place, part in enumerate(parts)
        if isinstance(part, int)
        or (place == last and kind == "extra_forbidden")
        or (part.isidentifier() and part not in ("str", "int"))
    ]
    return ".".join(names)


def text_in(content: str | Several[Any] | None) -> str:
    """Returns the text of a message, which comes in one or in parts; an assistant's may have none."""
    return content if isinstance(content, str) else "".join(part.text for part in content or ())


def stops_of(stop: Stop) -> tuple[str, ...]:
    return () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)
