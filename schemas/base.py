"""The base of all records: frozen, strict, closed to unknown fields.

A record is written as JSON with sorted keys. Arrays never live inside a record: it names a safetensors file
(`ArrayFile`) whose path is absolute in memory and relative to the record's own folder on disk (compiler/io.py).
"""

import json
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, FailFast, Field, SerializerFunctionWrapHandler, model_serializer

T = TypeVar("T")

MAX_EXACT_INTEGER = 2**53 - 1  # beyond it, JSON readers that use doubles round

Count = Annotated[int, Field(ge=0, le=MAX_EXACT_INTEGER)]
PositiveCount = Annotated[int, Field(ge=1, le=MAX_EXACT_INTEGER)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]
Many = Annotated[tuple[T, ...], FailFast()]
"""A list of any length in a stranger's record. Validation stops at the first wrong element: an error for each of
millions would take gigabytes."""
Options = dict[str, bool | int | float | str]
"""Settings of a plug-in, by name; absent ones have the defaults of the plug-in's file."""
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Record(BaseModel):
    """A frozen, strict record; unknown fields are errors."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)

    def to_json(self) -> str:
        """Returns canonical JSON: sorted keys, two-space indent, one trailing newline."""
        return json.dumps(self.model_dump(mode="json"), indent=2, sort_keys=True, ensure_ascii=False) + "\n"


class Extended(Record):
    """A record with fields that came later.

    Each is left out of the file where it has its default, so that a record without them reads as it always did.
    """

    LATER: ClassVar[tuple[str, ...]] = ()

    @model_serializer(mode="wrap")
    def _without_defaults(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        kinds = type(self).model_fields
        unused = {name for name in self.LATER if getattr(self, name) == kinds[name].default}
        return {name: value for name, value in write(self).items() if name not in unused}


class ArrayFile(Record):
    """A safetensors file that belongs to a record.

    The field is called `array_file`, not `path`, so that loading can find and resolve it without knowing the record.
    """

    array_file: str
    sha256: Sha256
