"""The application: which path has which answer, who may ask, and how refusals look."""

import hmac
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from coldpress.schemas.errors import ColdpressError
from coldpress.server import small
from coldpress.server.chat import chat_completions
from coldpress.server.completions import completions
from coldpress.server.messages import count_tokens, messages
from coldpress.server.refusals import RefusalError, anthropic_error, openai_error
from coldpress.server.responses import responses
from coldpress.server.run import ClientLeftError
from coldpress.server.served import Served

LOG = logging.getLogger("coldpress.server")
LOOPBACK = ("127.0.0.1", "localhost", "::1")
PAGE = Path(__file__).with_name("page.html")
Handler = Callable[[Request, Served], Awaitable[Response]]


async def _page(request: Request, served: Served) -> Response:
    return FileResponse(PAGE, headers={"content-security-policy": "default-src 'self' 'unsafe-inline'"})


ROUTES: tuple[tuple[str, str, Handler, bool], ...] = (
    ("/", "GET", _page, False),
    ("/health", "GET", small.health, False),
    ("/metrics", "GET", small.metrics, True),
    ("/v1/models", "GET", small.models, True),
    ("/v1/models/{name:path}", "GET", small.model, True),
    ("/tokenize", "POST", small.tokenize, True),
    ("/admin/dram", "POST", small.dram, True),
    ("/v1/completions", "POST", completions, True),
    ("/v1/chat/completions", "POST", chat_completions, True),
    ("/v1/responses", "POST", responses, True),
    ("/v1/messages", "POST", messages, True),
    ("/v1/messages/count_tokens", "POST", count_tokens, True),
)
"""(path, method, handler, whether it asks for the key)."""


def make_app(served: Served) -> Starlette:
    """Returns the application of a served artifact."""
    routes = [
        Route(path, _answered(handler, served, guarded), methods=[method]) for path, method, handler, guarded in ROUTES
    ]
    # a page of another site must not reach a server on this machine through a name of its own
    hosts = [*LOOPBACK, "[::1]"] if served.settings.host in LOOPBACK else ["*"]
    return Starlette(
        routes=routes,
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=hosts, www_redirect=False)],
        exception_handlers={HTTPException: _http_error},
    )


def _answered(handler: Handler, served: Served, guarded: bool) -> Callable[[Request], Awaitable[Response]]:
    """Wraps a handler: asks for the key, and turns errors into answers."""

    async def answer(request: Request) -> Response:
        try:
            if guarded:
                _check_key(request, served.settings.key)
            return await handler(request, served)
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


def refused(request: Request, status: int, text: str, field: str | None = None) -> Response:
    """Returns the answer to a request that is not served, in the form that its clients read."""
    is_anthropic = request.url.path.startswith("/v1/messages")
    body = anthropic_error(status, text) if is_anthropic else openai_error(status, text, field)
    headers = {"retry-after": "1"} if status in (429, 503) else {}
    if status == 413:
        headers["connection"] = "close"  # the rest of the body is not read
    return JSONResponse(body, status_code=status, headers=headers)


async def _http_error(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    known = ", ".join(path for path, _, _, _ in ROUTES)
    return refused(request, status, f"{request.method} {request.url.path} is not served here; known paths are {known}")
