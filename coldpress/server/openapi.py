"""Describes all paths in OpenAPI 3.1, from the records that bodies are read with."""

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple

from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import Response

from coldpress.server.fields import Body
from coldpress.server.served import Served

JSON, EVENTS = "application/json", "text/event-stream"
WRONG_KEY, UNKNOWN = {401: "the key is missing or wrong"}, {404: "there is no such model"}
OF_BODIES = {
    400: "a field is missing, wrong or not supported",
    413: "the body, a prompt, or a prompt with its new tokens is too long",
    415: "the body is not JSON",
    429: "the queue is full",
    503: "the server is stopping",
}
"""Status -> why a body may be refused."""
REFUSAL = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type"],
            "properties": {"message": {"type": "string"}, "type": {"type": "string"}},
        }
    },
}
"""What refusals have in common, whatever clients they are for."""


class Endpoint(NamedTuple):
    """A path, and what answers it."""

    path: str
    method: str
    handler: Callable[[Request, Served], Awaitable[Response]]
    is_guarded: bool = True
    """Whether it asks for the key."""
    body: type[Body] | None = None
    """The record of its body."""
    kinds: tuple[str, ...] = (JSON,)
    """Content types of the answer."""
    statuses: tuple[int, ...] = (200,)
    """Statuses of the answer, if it is no refusal."""

    @property
    def refusals(self) -> Mapping[int, str]:
        """Returns the statuses of refusals, and what they mean."""
        found = dict(WRONG_KEY) if self.is_guarded else {}
        if self.body or "{" in self.path:
            found |= UNKNOWN
        return found | (OF_BODIES if self.body else {})


def document(endpoints: Sequence[Endpoint], name: str, version: str) -> dict[str, Any]:
    """Returns the description of `endpoints`; `name` is that of the one model that is served."""
    bodies = [(one.body, "validation") for one in endpoints if one.body]
    refs, schemas = models_json_schema(bodies, ref_template="#/components/schemas/{model}")  # pyright: ignore[reportArgumentType]
    records = schemas["$defs"]
    for record in records.values():
        if "model" in record["properties"]:
            record["properties"]["model"]["enum"] = [name]
    paths: dict[str, dict[str, Any]] = {}
    for one in endpoints:
        path, body = one.path.replace(":path}", "}"), refs[one.body, "validation"] if one.body else None
        paths.setdefault(path, {})[one.method.lower()] = _operation(one, name, body)
    key = {"type": "http", "scheme": "bearer", "description": "the server's key, if it has one"}
    return {
        "openapi": "3.1.0",
        "info": {"title": "coldpress", "version": version},
        "paths": paths,
        "components": {"schemas": {**records, "Refusal": REFUSAL}, "securitySchemes": {"key": key}},
    }


def _operation(one: Endpoint, name: str, body: Mapping[str, Any] | None) -> dict[str, Any]:
    found: dict[str, Any] = {
        "summary": (inspect.getdoc(one.handler) or "").partition("\n")[0],
        "operationId": one.handler.__name__,
        "responses": {
            **{str(status): _answer("the answer", one.kinds, {}) for status in one.statuses},
            **{
                str(status): _answer(words, (JSON,), {"$ref": "#/components/schemas/Refusal"})
                for status, words in one.refusals.items()
            },
        },
    }
    if body is not None:
        found["requestBody"] = {"required": True, "content": {JSON: {"schema": body}}}
    if "{" in one.path:
        of = one.path.partition("{")[2].partition(":")[0]
        found["parameters"] = [
            {"name": of, "in": "path", "required": True, "schema": {"type": "string", "enum": [name]}}
        ]
    if one.is_guarded:
        found["security"] = [{"key": []}, {}]
    return found


def _answer(words: str, kinds: Sequence[str], schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"description": words, "content": {kind: {"schema": schema} for kind in kinds}}
