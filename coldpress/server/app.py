"""The application: paths and their answers, who may ask, how refusals look; and its description in OpenAPI 3.1."""

import hmac
import inspect
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic.json_schema import models_json_schema
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from coldpress.schemas import __version__
from coldpress.schemas.errors import ColdpressError
from coldpress.server import small
from coldpress.server.chat import ChatRequest, chat_completions
from coldpress.server.completions import CompletionRequest, completions
from coldpress.server.fields import Body
from coldpress.server.messages import CountRequest, MessagesRequest, count_tokens, messages
from coldpress.server.refusals import RefusalError, anthropic_error, openai_error
from coldpress.server.responses import ResponsesRequest, responses
from coldpress.server.run import ClientLeftError
from coldpress.server.served import Served

LOG = logging.getLogger("coldpress.server")
LOOPBACK = ("127.0.0.1", "localhost", "::1")
PAGE = Path(__file__).with_name("page.html")
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
"""The schema of all refusals, whatever clients they are for."""


class Endpoint(NamedTuple):
    """A path, and what answers it."""

    path: str
    method: str
    handler: Callable[[Request, Served], Awaitable[Response]]
    is_guarded: bool = True
    body: type[Body] | None = None
    kinds: tuple[str, ...] = (JSON,)
    statuses: tuple[int, ...] = (200,)
    """Statuses of the answer, if it is no refusal."""

    @property
    def refusals(self) -> Mapping[int, str]:
        found = dict(WRONG_KEY) if self.is_guarded else {}
        if self.body or "{" in self.path:
            found |= UNKNOWN
        return found | (OF_BODIES if self.body else {})


async def page(request: Request, served: Served) -> Response:
    """Returns the chat page."""
    return FileResponse(PAGE, headers={"content-security-policy": "default-src 'self' 'unsafe-inline'; img-src data:"})


async def openapi(request: Request, served: Served) -> Response:
    """Describes all paths."""
    return JSONResponse(_document(ENDPOINTS, served.name))


OR_EVENTS = (JSON, EVENTS)
ENDPOINTS = (
    Endpoint("/", "GET", page, is_guarded=False, kinds=("text/html",)),
    Endpoint("/openapi.json", "GET", openapi, is_guarded=False),
    Endpoint("/health", "GET", small.health, is_guarded=False, statuses=(200, 503)),
    Endpoint("/metrics", "GET", small.metrics, kinds=("text/plain",)),
    Endpoint("/v1/models", "GET", small.models),
    Endpoint("/v1/models/{name:path}", "GET", small.model),
    Endpoint("/tokenize", "POST", small.tokenize, body=small.TokenizeRequest),
    Endpoint("/admin/dram", "POST", small.dram, body=small.DramRequest),
    Endpoint("/v1/completions", "POST", completions, body=CompletionRequest, kinds=OR_EVENTS),
    Endpoint("/v1/chat/completions", "POST", chat_completions, body=ChatRequest, kinds=OR_EVENTS),
    Endpoint("/v1/responses", "POST", responses, body=ResponsesRequest, kinds=OR_EVENTS),
    Endpoint("/v1/messages", "POST", messages, body=MessagesRequest, kinds=OR_EVENTS),
    Endpoint("/v1/messages/count_tokens", "POST", count_tokens, body=CountRequest),
)


def make_app(served: Served) -> Starlette:
    routes = [Route(one.path, _answered(one, served), methods=[one.method]) for one in ENDPOINTS]
    # a page of another site must not reach a server on this machine through a name of its own
    hosts = [*LOOPBACK, "[::1]"] if served.settings.host in LOOPBACK else ["*"]
    return Starlette(
        routes=routes,
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=hosts, www_redirect=False)],
        exception_handlers={HTTPException: _http_error},
    )


def _answered(endpoint: Endpoint, served: Served) -> Callable[[Request], Awaitable[Response]]:

    async def answer(request: Request) -> Response:
        try:
            if endpoint.is_guarded:
                _check_key(request, served.settings.key)
            return await endpoint.handler(request, served)
        except RefusalError as error:
            return refused(request, error.status, str(error), error.field)
        except ClientLeftError:
            return Response(status_code=499)  # nobody reads it
        except ColdpressError as error:
            return refused(request, 400, str(error))
        except Exception:
            LOG.exception("%s failed", request.url.path)
            return refused(request, 500, "the server failed at this request; its log says why")

    return answer


def _check_key(request: Request, key: str | None) -> None:
    if key is None:
        return
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        given = request.headers.get("x-api-key", "")
    if not hmac.compare_digest(given.strip().encode(), key.encode()):
        raise RefusalError(401, "the key is missing or wrong; send 'Authorization: Bearer KEY' or 'x-api-key: KEY'")


def refused(
    request: Request, status: int, text: str, field: str | None = None, headers: Mapping[str, str] | None = None
) -> Response:
    """Returns the answer to a request that is not served, in the form that its clients read."""
    is_anthropic = request.url.path.startswith("/v1/messages")
    body = anthropic_error(status, text) if is_anthropic else openai_error(status, text, field)
    headers = {**(headers or {}), **({"retry-after": "1"} if status in (429, 503) else {})}
    if status == 413:
        headers["connection"] = "close"  # the rest of the body is not read
    return JSONResponse(body, status_code=status, headers=headers)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    known = ", ".join(one.path for one in ENDPOINTS)
    text = f"{request.method} {request.url.path} is not served here; known paths are {known}"
    return refused(request, error.status_code, text, headers=error.headers)  # a wrong method's say which are right


def _document(endpoints: Sequence[Endpoint], name: str) -> dict[str, Any]:
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
        "info": {"title": "coldpress", "version": __version__},
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
