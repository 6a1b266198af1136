"""The endpoints that generate nothing: the model's name, tokens, health, numbers, and the DRAM budget."""

import asyncio
from typing import Annotated

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from coldpress.server.answers import body_of
from coldpress.server.fields import Body, Text, read
from coldpress.server.metrics import metrics_text
from coldpress.server.served import Served


async def models(request: Request, served: Served) -> Response:
    """Names the model that is served."""
    return JSONResponse({"object": "list", "data": [_described(served)]})


async def model(request: Request, served: Served) -> Response:
    """Describes the model that is served."""
    served.check_name(request.path_params["name"])
    return JSONResponse(_described(served))


def _described(served: Served) -> dict[str, object]:
    one = {"id": served.name, "object": "model", "created": served.created_s, "owned_by": "coldpress"}
    return {**one, "max_model_len": served.worker.context_length}  # as vLLM names it


class TokenizeRequest(Body):
    """The body of a request for token ids, as llama.cpp's server takes it."""

    content: Text
    add_special: bool | None = None
    """Whether to add the special tokens of a prompt; None is true, as for a prompt of /v1/completions."""
    with_pieces: Annotated[bool, Field()] | None = None
    """Whether to tell each token's text, too."""


async def tokenize(request: Request, served: Served) -> Response:
    """Returns the token ids of a text."""
    asked = read(TokenizeRequest, await body_of(request, served.settings.max_body_bytes))
    ids = await served.encoded(asked.content, special=asked.add_special is not False)
    tokens = [{"id": token, "piece": served.text_of(token)} for token in ids] if asked.with_pieces else ids
    return JSONResponse({"tokens": tokens})


async def health(request: Request, served: Served) -> Response:
    """Says whether the server takes requests."""
    if served.worker.is_stopping:
        return JSONResponse({"status": "stopping"}, status_code=503)
    return JSONResponse({"status": "ok"})


async def metrics(request: Request, served: Served) -> Response:
    """Returns what the worker has done."""
    return Response(metrics_text(served.worker), media_type="text/plain; version=0.0.4; charset=utf-8")


class DramRequest(Body):
    """The body of a request for another DRAM budget."""

    dram: str | Annotated[int, Field(ge=1)]
    """Bytes, or text such as "3GB" or "50%"."""


async def dram(request: Request, served: Served) -> Response:
    """Changes the DRAM budget between two passes."""
    asked = read(DramRequest, await body_of(request, served.settings.max_body_bytes))
    await asyncio.to_thread(served.worker.resize, asked.dram)
    budget_bytes, used_bytes = served.worker.memory()
    return JSONResponse({"dram_budget_bytes": budget_bytes, "dram_used_bytes": used_bytes})
