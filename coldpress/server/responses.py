"""`/v1/responses`: answers a text or a chat (OpenAI's newer interface); nothing is stored."""

import secrets
import time
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from coldpress.server.answers import Answer, body_of, event
from coldpress.server.fields import Asked, Body, Drawing, Never, Text, text_in
from coldpress.server.run import joined
from coldpress.server.sequences import Piece, Wanted
from coldpress.server.served import Served


class TextPart(Body):
    """A part of a message; one of an earlier answer comes with empty lists."""

    type: Literal["input_text", "output_text"]
    text: Text
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    logprobs: Annotated[list[Any], Field(max_length=0)] | None = None


class InputItem(Body):
    """A message of a chat; one of an earlier answer comes with its id."""

    type: Literal["message"] | None = None
    role: Literal["system", "developer", "user", "assistant"]
    content: Text | list[TextPart]
    id: str | None = None
    status: str | None = None

    def message(self) -> dict[str, str]:
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": text_in(self.content)}


class Format(Body):
    """The form of the text."""

    type: Literal["text"]


class TextSettings(Body):
    """Settings of the text."""

    format: Format | None = None


class StreamOptions(Body):
    """Further contents of a stream."""

    include_obfuscation: Never | None = None


class ResponsesRequest(Asked, Drawing):
    """The body of a request."""

    input: Text | Annotated[list[InputItem], Field(min_length=1)]
    instructions: Text | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    text: TextSettings | None = None
    truncation: Literal["disabled"] | None = None
    background: Never | None = None
    include: Annotated[list[str], Field(max_length=0)] | None = None
    parallel_tool_calls: bool | None = None
    """Without tools it changes nothing."""
    previous_response_id: None = None
    tools: Annotated[list[Any], Field(max_length=0)] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=0)] | None = None

    def chat(self) -> list[dict[str, str]]:
        before = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        if isinstance(self.input, str):
            return [*before, {"role": "user", "content": self.input}]
        return before + [item.message() for item in self.input]


async def responses(request: Request, served: Served) -> Response:
    """Answers a request."""
    asked = await body_of(ResponsesRequest, request, served)
    sampling = served.sampling(asked)
    with served.worker.places(1) as places:
        ids = await served.chat_ids(asked.chat())
        most = served.num_new(ids, "input", asked.max_output_tokens, "max_output_tokens")
        run = served.submit(places, [Wanted(tuple(ids), sampling, most)])
    return await _Answer(served, asked, len(ids)).send(run, request, is_streamed=asked.stream)


class _Answer(Answer):
    def __init__(self, served: Served, asked: ResponsesRequest, num_prompt: int) -> None:
        super().__init__(served)
        self._asked, self._num_prompt = asked, num_prompt
        self._id, self._item_id = f"resp_{secrets.token_hex(12)}", f"msg_{secrets.token_hex(12)}"
        self._created_s, self._num_events = int(time.time()), 0
        self._place = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        self._text, self._last = "", Piece()

    def whole(self, found: list[list[Piece]]) -> dict[str, Any]:
        (pieces,) = found
        return self.response(joined(pieces), pieces[-1])

    def response(self, text: str, last: Piece | None) -> dict[str, Any]:
        """Returns the answer; `last` is None as long as the sequence runs."""
        asked, num_new = self._asked, last.num_new if last else 0
        is_cut = last is not None and last.finish == "length"
        usage = {
            "input_tokens": self._num_prompt,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": num_new,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": self._num_prompt + num_new,
        }
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created_s,
            "status": "in_progress" if last is None else "incomplete" if is_cut else "completed",
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "model": self.served.name,
            "output": [] if last is None else [self._item(text, "incomplete" if is_cut else "completed")],
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "temperature": 1.0 if asked.temperature is None else asked.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": asked.tool_choice or "auto",
            "tools": [],
            "top_p": 1.0 if asked.top_p is None else asked.top_p,
            "truncation": "disabled",
            "usage": None if last is None else usage,
            "metadata": self._asked.metadata or {},
        }

    def _item(self, text: str | None, status: str) -> dict[str, Any]:
        content = [] if text is None else [_part(text)]
        return {"id": self._item_id, "type": "message", "role": "assistant", "status": status, "content": content}

    def failed(self, text: str) -> str:
        return self._event("error", code="server_error", message=text, param=None)

    def _event(self, kind: str, **fields: Any) -> str:
        found = event({"type": kind, "sequence_number": self._num_events, **fields}, kind)
        self._num_events += 1
        return found

    def begun(self) -> Iterator[str]:
        yield self._event("response.created", response=self.response("", None))
        yield self._event("response.in_progress", response=self.response("", None))
        yield self._event("response.output_item.added", output_index=0, item=self._item(None, "in_progress"))
        yield self._event("response.content_part.added", **self._place, part=_part(""))

    def events(self, number: int, piece: Piece) -> Iterator[str]:
        self._text, self._last = self._text + piece.text, piece
        if piece.text:
            yield self._event("response.output_text.delta", **self._place, delta=piece.text, logprobs=[])

    def ended(self) -> Iterator[str]:
        response = self.response(self._text, self._last)
        yield self._event("response.output_text.done", **self._place, text=self._text, logprobs=[])
        yield self._event("response.content_part.done", **self._place, part=_part(self._text))
        yield self._event("response.output_item.done", output_index=0, item=response["output"][0])
        yield self._event(f"response.{response['status']}", response=response)


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
