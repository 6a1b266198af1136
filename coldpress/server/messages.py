"""`/v1/messages` and `/v1/messages/count_tokens`: answers a chat (Anthropic's interface)."""

import secrets
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from coldpress.runtime.generate.sampling import TopK
from coldpress.server.answers import Answer, body_of, event
from coldpress.server.fields import Asked, Body, Drawing, Text, text_in
from coldpress.server.refusals import RefusalError, anthropic_error
from coldpress.server.run import joined
from coldpress.server.sequences import Piece, Wanted
from coldpress.server.served import Served


class TextBlock(Body):
    """A block of a message."""

    type: Literal["text"]
    text: Text
    cache_control: Any = None
    """Prompts are kept or not as the server's own settings say."""
    citations: None = None


class InputMessage(Body):
    """A message of a chat."""

    role: Literal["user", "assistant"]
    content: Text | list[TextBlock]


class Thinking(Body):
    """The setting for thinking before the answer."""

    type: Literal["disabled"]


class ToolChoice(Body):
    """The setting for tools."""

    type: Literal["none", "auto"]


class CountRequest(Asked):
    """The body of a request for the number of tokens."""

    messages: Annotated[list[InputMessage], Field(min_length=1)]
    system: Text | list[TextBlock] | None = None
    thinking: Thinking | None = None
    tools: Annotated[list[Any], Field(max_length=0)] | None = None
    tool_choice: ToolChoice | None = None

    def chat(self) -> list[dict[str, str]]:
        if self.messages[-1].role != "user":
            raise RefusalError(400, "the last message is the assistant's, expected the user's; add one", "messages")
        before = [] if self.system is None else [{"role": "system", "content": text_in(self.system)}]
        return before + [{"role": each.role, "content": text_in(each.content)} for each in self.messages]


class MessagesRequest(CountRequest, Drawing):
    """The body of a request."""

    max_tokens: Annotated[int, Field(ge=1)]
    top_k: TopK | None = None
    stop_sequences: Annotated[list[Text], Field(max_length=16)] | None = None
    stream: bool | None = None


async def count_tokens(request: Request, served: Served) -> Response:
    """Returns the number of tokens of a chat."""
    asked = await body_of(CountRequest, request, served)
    return JSONResponse({"input_tokens": len(await served.chat_ids(asked.chat()))})


async def messages(request: Request, served: Served) -> Response:
    """Answers a request."""
    asked = await body_of(MessagesRequest, request, served)
    sampling = served.sampling(asked)
    chat = asked.chat()
    with served.worker.places(1) as places:
        ids = await served.chat_ids(chat)
        most = served.num_new(ids, "messages", asked.max_tokens)
        run = served.submit(places, [Wanted(tuple(ids), sampling, most, tuple(asked.stop_sequences or ()))])
    return await _Answer(served, len(ids)).send(run, request, is_streamed=asked.stream)


class _Answer(Answer):
    def __init__(self, served: Served, num_prompt: int) -> None:
        super().__init__(served)
        self._num_prompt, self._id, self._last = num_prompt, f"msg_{secrets.token_hex(12)}", Piece()

    def _message(self, content: list[dict[str, str]], end: dict[str, str | None], num_new: int) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self.served.name,
            "content": content,
            **end,
            "usage": {"input_tokens": self._num_prompt, "output_tokens": num_new},
        }

    def whole(self, found: list[list[Piece]]) -> dict[str, Any]:
        (pieces,) = found
        content = [{"type": "text", "text": joined(pieces)}]
        return self._message(content, _end(pieces[-1]), pieces[-1].num_new)

    def begun(self) -> Iterator[str]:
        begun = self._message([], {"stop_reason": None, "stop_sequence": None}, 0)
        yield _named({"type": "message_start", "message": begun})
        yield _named({"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}})

    def events(self, number: int, piece: Piece) -> Iterator[str]:
        self._last = piece
        if piece.text:
            delta = {"type": "text_delta", "text": piece.text}
            yield _named({"type": "content_block_delta", "index": 0, "delta": delta})

    def ended(self) -> Iterator[str]:
        last = self._last
        yield _named({"type": "content_block_stop", "index": 0})
        yield _named({"type": "message_delta", "delta": _end(last), "usage": {"output_tokens": last.num_new}})
        yield _named({"type": "message_stop"})

    def failed(self, text: str) -> str:
        """Returns the event of an error, as clients of Anthropic's interface read it."""
        return event(anthropic_error(500, text), "error")


def _named(data: dict[str, Any]) -> str:
    return event(data, data["type"])


def _end(piece: Piece) -> dict[str, str | None]:
    reason = "max_tokens" if piece.finish == "length" else "stop_sequence" if piece.stop is not None else "end_turn"
    return {"stop_reason": reason, "stop_sequence": piece.stop}
