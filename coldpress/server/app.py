"""The application: which path has which answer, who may ask, and how refusals look."""

import hmac
import logging
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

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
from coldpress.server.messages import CountRequest, MessagesRequest, count_tokens, messages
from coldpress.server.openapi import EVENTS, JSON, Endpoint, document
from coldpress.server.refusals import RefusalError, anthropic_error, openai_error
from coldpress.server.responses import ResponsesRequest, responses
from coldpress.server.run import ClientLeftError
from coldpress.server.served import Served

LOG = logging.getLogger("coldpress.server")
LOOPBACK = ("127.0.0.1", "localhost", "::1")
PAGE = Path(__file__).with_name("page.html")


async def page(request: Request, served: Served) -> Response:
    """Returns the chat page."""
    return FileResponse(PAGE, headers={"content-security-policy": "default-src 'self' 'unsafe-inline'; img-src data:"})


async def openapi(request: Request, served: Served) -> Response:
    """Describes all paths."""
    return JSONResponse(document(ENDPOINTS, served.name, __version__))


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
    """Returns the application of a served artifact."""
    routes = [Route(one.path, _answered(one, served), methods=[one.method]) for one in ENDPOINTS]
    # a page of another site must not reach a server on this machine through a name of its own
    hosts = [*LOOPBACK, "[::1]"] if served.settings.host in LOOPBACK else ["*"]
    return Starlette(
        routes=routes,
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=hosts, www_redirect=False)],
        exception_handlers={HTTPException: _http_error},
    )


def _answered(endpoint: Endpoint, served: Served) -> Callable[[Request], Awaitable[Response]]:
    """Wraps a handler: asks for the key, and turns errors into answers."""

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
