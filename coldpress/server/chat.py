"""`/v1/chat/completions`: answers a chat (OpenAI's interface)."""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator
from starlette.requests import Request
from starlette.responses import Response

from coldpress.runtime.generate.completion import TokenLogprobs
from coldpress.server.answers import body_of, event
from coldpress.server.completions import OpenAnswer, OpenRequest
from coldpress.server.fields import MAX_TOP, Body, Text, stops_of, text_in
from coldpress.server.refusals import RefusalError
from coldpress.server.run import joined
from coldpress.server.sequences import Piece, Wanted
from coldpress.server.served import Served


class TextPart(Body):
    """A part of a message."""

    type: Literal["text"]
    text: Text
    cache_control: Any = None


class ChatMessage(Body):
    """A message of a chat."""

    role: Literal["system", "developer", "user", "assistant"]
    tool_calls: Annotated[list[Any], Field(max_length=0)] | None = None
    content: Annotated[Text | list[TextPart] | None, Field(validate_default=True)] = None
    name: str | None = None
    """The speaker's; templates do not ask for it."""
    refusal: str | None = None

    @field_validator("content")
    @classmethod
    def _has_text(cls, content: Any, told: ValidationInfo) -> Any:
        if content is None and told.data.get("role") != "assistant":
            raise ValueError("text")
        return content

    def message(self) -> dict[str, str]:
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": text_in(self.content)}


class ResponseFormat(Body):
    """The form of the answer."""

    type: Literal["text"]


class ChatRequest(OpenRequest):
    """The body of a request."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP)] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Any], Field(max_length=0)] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None
    """Without tools it changes nothing."""
    modalities: list[Literal["text"]] | None = None


async def chat_completions(request: Request, served: Served) -> Response:
    """Answers a request."""
    asked = await body_of(ChatRequest, request, served)
    asked.check_stream()
    if asked.top_logprobs is not None and not asked.logprobs:
        raise RefusalError(400, "top_logprobs needs logprobs=true; leave it out", "top_logprobs")
    if asked.max_tokens is not None and asked.max_completion_tokens is not None:
        raise RefusalError(400, "max_tokens and max_completion_tokens are the same; give one of them", "max_tokens")
    sampling, count = served.sampling(asked), asked.n or 1
    with served.worker.places(count) as places:
        ids = await served.chat_ids([message.message() for message in asked.messages])
        most = served.num_new(ids, "messages", asked.max_tokens or asked.max_completion_tokens)
        num_top = (asked.top_logprobs or 0) if asked.logprobs else None
        wanted = served.choices(Wanted(tuple(ids), sampling, most, stops_of(asked.stop), num_top), count)
        run = served.submit(places, wanted)
    return await _Answer(served, asked, len(ids)).send(run, request, is_streamed=asked.stream)


class _Answer(OpenAnswer):
    def __init__(self, served: Served, asked: ChatRequest, num_prompt: int) -> None:
        super().__init__(served, asked, num_prompt, "chat.completion.chunk", "chatcmpl")
        self._tells_logprobs, self._num_choices = bool(asked.logprobs), asked.n or 1

    def whole(self, found: list[list[Piece]]) -> dict[str, Any]:
        choices = [
            {
                "index": number,
                "message": {"role": "assistant", "content": joined(pieces), "refusal": None},
                "logprobs": self._logprobs([one for piece in pieces for one in piece.tokens]),
                "finish_reason": pieces[-1].finish,
            }
            for number, pieces in enumerate(found)
        ]
        return self.answer(choices, sum(pieces[-1].num_new for pieces in found), "chat.completion")

    def begun(self) -> Iterator[str]:
        for number in range(self._num_choices):
            yield self._chunk(number, {"role": "assistant", "content": ""})

    def events(self, number: int, piece: Piece) -> Iterator[str]:
        self._num_new[number] = piece.num_new
        if piece.text or piece.tokens:
            yield self._chunk(number, {"content": piece.text}, piece.tokens)
        if piece.finish:
            yield self._chunk(number, {}, finish=piece.finish)

    def _chunk(
        self, number: int, delta: dict[str, str], tokens: Sequence[TokenLogprobs] = (), finish: str | None = None
    ) -> str:
        logprobs = self._logprobs(tokens) if tokens else None
        choice = {"index": number, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        return event(self.answer([choice]))

    def _logprobs(self, tokens: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
        if not self._tells_logprobs:
            return None
        content = [
            {**self._one(told.id, told.logprob), "top_logprobs": [self._one(*each) for each in told.top]}
            for told in tokens
        ]
        return {"content": content, "refusal": None}

    def _one(self, token_id: int, logprob: float) -> dict[str, Any]:
        text, data = self.served.text_of(token_id), self.served.bytes_of(token_id)
        return {"token": text, "logprob": logprob, "bytes": list(data)}
