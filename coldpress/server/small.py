"""The endpoints that generate nothing: the model's name, tokens, health, numbers, and the DRAM budget."""

import asyncio
from collections.abc import Iterator
from typing import Annotated

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from coldpress.server.answers import body_of
from coldpress.server.fields import Body, Text
from coldpress.server.served import Served
from coldpress.server.worker import Worker


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
    """True adds the special tokens of a prompt; None is true, as for a prompt of /v1/completions."""
    with_pieces: Annotated[bool, Field()] | None = None


async def tokenize(request: Request, served: Served) -> Response:
    """Returns the token ids of a text."""
    asked = await body_of(TokenizeRequest, request, served)
    ids = await served.encoded(asked.content, special=asked.add_special is not False)
    tokens = [{"id": token, "piece": served.text_of(token)} for token in ids] if asked.with_pieces else ids
    return JSONResponse({"tokens": tokens})


async def health(request: Request, served: Served) -> Response:
    """Says whether the server takes requests."""
    if served.worker.is_stopping:
        return JSONResponse({"status": "stopping"}, status_code=503)
    return JSONResponse({"status": "ok"})


COUNTERS = {
    "sequences": "Sequences that ended.",
    "cancelled": "Sequences that ended because their client left.",
    "failed": "Sequences that ended with an error.",
    "prompt_tokens": "Tokens of prompts that were prefilled.",
    "new_tokens": "Tokens that were generated.",
    "prefills": "Prefills; prompts that begin together share one.",
    "passes": "Passes that decoded tokens of the running sequences.",
    "drafted": "Drafts of next tokens that passes checked.",
    "accepted": "Drafts that were right.",
    "prefill_s": "Seconds of prefills.",
    "decode_s": "Seconds of passes that decoded.",
    "flash_s": "The part of the seconds in which the model waited for flash.",
    "reads": "Reads from flash.",
    "read_bytes": "Bytes read from flash.",
    "hits": "Units that decoding used and that were in DRAM.",
    "misses": "Units that decoding used and that had to be read.",
}
PREFIX_COUNTERS = {
    "restored_tokens": "Tokens of prompts that were read instead of computed.",
    "read_bytes": "Bytes of kept prompts that were read.",
    "written_bytes": "Bytes of prompts that were written.",
    "damaged": "Files of kept prompts that were damaged, and removed.",
}
UNITS = {"_s": "_seconds", "_bytes": "_bytes"}
"""Ends of our names -> Prometheus's."""


class _Numbers(Collector):
    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def collect(self) -> Iterator[Metric]:
        waiting, running, totals = self._worker.counts()
        for name, text in COUNTERS.items():
            ends = next((name.removesuffix(end) + unit for end, unit in UNITS.items() if name.endswith(end)), name)
            yield CounterMetricFamily(f"coldpress_{ends}", text, value=getattr(totals, name))
        if prefixes := self._worker.prefixes:
            for name, text in PREFIX_COUNTERS.items():
                yield CounterMetricFamily(f"coldpress_prefix_{name}", text, value=getattr(prefixes.totals, name))
            kept_bytes = prefixes.kept_bytes()
            yield GaugeMetricFamily("coldpress_prefix_kept_bytes", "Bytes of kept prompts.", value=kept_bytes)
        budget_bytes, used_bytes = self._worker.memory()
        for name, text, value in (
            ("waiting", "Sequences that wait.", waiting),
            ("running", "Sequences that run.", running),
            ("hit_rate", "Hits over hits and misses since the start.", totals.hit_rate),
            ("dram_budget_bytes", "The DRAM budget.", budget_bytes),
            ("dram_used_bytes", "The part of the DRAM budget in use.", used_bytes),
        ):
            yield GaugeMetricFamily(f"coldpress_{name}", text, value=value)


async def metrics(request: Request, served: Served) -> Response:
    """Returns what the worker has done, as text that Prometheus reads."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Numbers(served.worker))
    return Response(generate_latest(registry), media_type="text/plain; version=0.0.4; charset=utf-8")


class DramRequest(Body):
    """The body of a request for another DRAM budget."""

    dram: str | Annotated[int, Field(ge=1)]
    """Bytes, or text such as "3GB" or "50%"."""


async def dram(request: Request, served: Served) -> Response:
    """Changes the DRAM budget between two passes."""
    asked = await body_of(DramRequest, request, served)
    await asyncio.to_thread(served.worker.resize, asked.dram)
    budget_bytes, used_bytes = served.worker.memory()
    return JSONResponse({"dram_budget_bytes": budget_bytes, "dram_used_bytes": used_bytes})
