"""`/v1/completions`: continues prompts of text or token ids, one or many at a time (OpenAI's older interface).

With `echo` the answer repeats the prompt, and with `logprobs` it scores it: the log-probabilities of a prompt's tokens
are those of the dense prefill, those of new tokens come from the selector's choice of units. That is how evaluation
harnesses score answers.
"""

import secrets
import time
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from coldpress.runtime.generate.logprobs import TokenLogprobs
from coldpress.server.answers import DONE, KEEP_ALIVE, EventStream, body_of, event, openai_event
from coldpress.server.fields import MAX_CHOICES, MAX_TOP, Asked, Body, Never, OpenDrawing, Stop, Text, read, stops_of
from coldpress.server.refusals import RefusalError
from coldpress.server.run import Run, joined
from coldpress.server.sequences import Piece, Wanted
from coldpress.server.served import NO_TEXT, Served

DEFAULT_TOKENS = 16
"""New tokens where a request does not say how many, as OpenAI documents it."""


class StreamOptions(Body):
    """What a stream tells besides the text."""

    include_usage: bool | None = None
    include_obfuscation: Never | None = None


class OpenRequest(Asked, OpenDrawing):
    """What the bodies of completions and of chat completions share."""

    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stop: Stop = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    frequency_penalty: Annotated[float, Field(ge=0, le=0)] | None = None
    presence_penalty: Annotated[float, Field(ge=0, le=0)] | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None


class CompletionRequest(OpenRequest):
    """The body of a request."""

    prompt: Text | list[int] | list[Text] | list[list[int]]
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP)] | None = None
    best_of: Annotated[int, Field(ge=1, le=1)] | None = None
    suffix: Literal[""] | None = None

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts; one alone is a list of one."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [[each for each in self.prompt if isinstance(each, int)]]
        return self.prompt  # pyright: ignore[reportReturnType]  its first element is a text or a list


async def completions(request: Request, served: Served) -> Response:
    """Answers a request."""
    asked = read(CompletionRequest, await body_of(request, served.settings.max_body_bytes))
    served.check_name(asked.model)
    if asked.stream_options is not None and not asked.stream:
        raise RefusalError(400, "stream_options needs stream=true; leave it out", "stream_options")
    prompts, count = asked.prompts, asked.n or 1
    if not prompts:
        raise RefusalError(400, "the field 'prompt' is empty, expected at least one prompt", "prompt")
    sampling = served.sampling(asked)
    with served.worker.places(len(prompts) * count) as places:
        wanted = list[Wanted]()
        for prompt in prompts:
            ids = await served.encoded(prompt) if isinstance(prompt, str) else prompt
            served.check_ids(ids, "prompt")
            most = served.num_new(DEFAULT_TOKENS if asked.max_tokens is None else asked.max_tokens, len(ids))
            one = Wanted(tuple(ids), sampling, most, stops_of(asked.stop), asked.logprobs, bool(asked.echo))
            wanted += served.choices(one, count)
        run = served.run(wanted)
        served.worker.submit(places, run.sequences)
    answer = _Answer(served, asked, wanted, count)
    if asked.stream:
        return answer.stream(run)
    found = await run.all(served.worker, request.receive)
    return JSONResponse(answer.whole(found))


class _Answer:
    """The shapes of one answer, whole and streamed."""

    def __init__(self, served: Served, asked: CompletionRequest, wanted: list[Wanted], count: int) -> None:
        self._served, self._asked, self._wanted, self._count = served, asked, wanted, count
        self._id, self._created_s = f"cmpl-{secrets.token_hex(12)}", int(time.time())
        self._offsets = [0] * len(wanted)
        """Characters of each choice's tokens so far."""

    def _head(self) -> dict[str, Any]:
        kind = {"id": self._id, "object": "text_completion"}
        return {**kind, "created": self._created_s, "model": self._served.name}

    def whole(self, found: list[list[Piece]]) -> dict[str, Any]:
        """Returns the answer of ended sequences."""
        choices = [self._choice(number, pieces, first=True) for number, pieces in enumerate(found)]
        return {**self._head(), "choices": choices, "usage": self._usage(sum(pieces[-1].num_new for pieces in found))}

    def stream(self, run: Run) -> Response:
        """Returns the answer as a stream."""
        served = self._served
        return EventStream(run, served.worker, served.settings.keep_alive_s, self._events, openai_event)

    async def _events(self, pieces: AsyncIterator[tuple[int, Piece] | None]) -> AsyncIterator[str]:
        num_new = [0] * len(self._wanted)
        begun = set[int]()
        async for each in pieces:
            if each is None:
                yield KEEP_ALIVE
                continue
            number, piece = each
            num_new[number] = piece.num_new
            first = number not in begun
            begun.add(number)
            if piece.text or piece.tokens or piece.finish or (first and self._asked.echo):
                yield event({**self._head(), "choices": [self._choice(number, [piece], first)]})
        if self._asked.stream_options and self._asked.stream_options.include_usage:
            yield event({**self._head(), "choices": [], "usage": self._usage(sum(num_new))})
        yield DONE

    def _usage(self, num_new: int) -> dict[str, int]:
        num_prompt = sum(len(wanted.ids) for wanted in self._wanted[:: self._count])
        return {"prompt_tokens": num_prompt, "completion_tokens": num_new, "total_tokens": num_prompt + num_new}

    def _choice(self, number: int, pieces: list[Piece], first: bool) -> dict[str, Any]:
        """Returns a choice of the text of `pieces`; with `first`, of what the echo puts before it."""
        wanted = self._wanted[number]
        before = self._echo(wanted) if first and self._asked.echo else ""
        logprobs = None
        if wanted.num_top is not None:
            told = [*((None, *pieces[0].prompt) if first and self._asked.echo else ())]
            told += [one for piece in pieces for one in piece.tokens]
            logprobs = self._logprobs(number, told)
        found = {"index": number, "text": before + joined(pieces), "logprobs": logprobs}
        return {**found, "finish_reason": pieces[-1].finish}

    def _echo(self, wanted: Wanted) -> str:
        codec = self._served.codec
        return "" if codec is None else codec.decode(wanted.ids)

    def _logprobs(self, number: int, told: list[TokenLogprobs | None]) -> dict[str, Any]:
        """Returns the lists of a choice; of the prompt's first token nobody knows how likely it was."""
        ids = [self._wanted[number].ids[0] if one is None else one.id for one in told]
        offsets = list[int]()
        for token_id in ids:
            offsets.append(self._offsets[number])
            self._offsets[number] += sum(byte & 0xC0 != 0x80 for byte in self._served.bytes_of(token_id))
        return {
            "tokens": [self._served.text_of(token_id) for token_id in ids],
            "token_logprobs": [None if one is None else one.logprob for one in told],
            "top_logprobs": [None if one is None else self._top(one) for one in told],
            "text_offset": offsets,
        }

    def _top(self, one: TokenLogprobs) -> dict[str, float]:
        """Returns the likeliest tokens by text; of several with one text all but the likeliest by id."""
        found = dict[str, float]()
        for token_id, logprob in one.top:
            text = self._served.text_of(token_id)
            found[f"{NO_TEXT}{token_id}" if text in found else text] = logprob
        return found
