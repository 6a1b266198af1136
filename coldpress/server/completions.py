"""`/v1/completions`: continues prompts of text or token ids, one or many at a time (OpenAI's older interface).

With `echo` the answer repeats the prompt, and with `logprobs` it scores it: the log-probabilities of a prompt's tokens
are those of the dense prefill, those of new tokens come from the selector's choice of units. That is how evaluation
harnesses score answers.
"""

import secrets
import time
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from coldpress.runtime.generate.completion import TokenLogprobs
from coldpress.server.answers import Answer, body_of, event
from coldpress.server.fields import MAX_CHOICES, MAX_TOP, Asked, Body, Never, OpenDrawing, Stop, Text, stops_of
from coldpress.server.refusals import RefusalError
from coldpress.server.run import joined
from coldpress.server.sequences import Piece, Wanted
from coldpress.server.served import NO_TEXT, Served

DEFAULT_TOKENS = 16
"""New tokens where a request does not say how many, as OpenAI documents it."""


class StreamOptions(Body):
    """Further contents of a stream."""

    include_usage: bool | None = None
    include_obfuscation: Never | None = None


class OpenRequest(Asked, OpenDrawing):
    """Fields that completions and chat completions share."""

    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stop: Stop = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    frequency_penalty: Annotated[float, Field(ge=0, le=0)] | None = None
    presence_penalty: Annotated[float, Field(ge=0, le=0)] | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None

    def check_stream(self) -> None:
        if self.stream_options is not None and not self.stream:
            raise RefusalError(400, "stream_options needs stream=true; leave it out", "stream_options")


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
    asked = await body_of(CompletionRequest, request, served)
    asked.check_stream()
    prompts, count = asked.prompts, asked.n or 1
    if not prompts:
        raise RefusalError(400, "the field 'prompt' is empty, expected at least one prompt", "prompt")
    sampling = served.sampling(asked)
    with served.worker.places(len(prompts) * count) as places:
        wanted = list[Wanted]()
        for prompt in prompts:
            ids = await served.encoded(prompt) if isinstance(prompt, str) else prompt
            most = served.num_new(ids, "prompt", DEFAULT_TOKENS if asked.max_tokens is None else asked.max_tokens)
            one = Wanted(tuple(ids), sampling, most, stops_of(asked.stop), asked.logprobs, bool(asked.echo))
            wanted += served.choices(one, count)
        run = served.submit(places, wanted)
    return await _Answer(served, asked, wanted, count).send(run, request, is_streamed=asked.stream)


class OpenAnswer(Answer):
    def __init__(self, served: Served, asked: OpenRequest, num_prompt: int, kind: str, id_begins: str) -> None:
        """`num_prompt` is the prompts' number of tokens; `kind` names what `choices` are of in a stream."""
        super().__init__(served)
        self._asked, self._num_prompt, self._kind = asked, num_prompt, kind
        self._id, self._created_s = f"{id_begins}-{secrets.token_hex(12)}", int(time.time())
        self._num_new = dict[int, int]()

    def answer(self, choices: list[dict[str, Any]], num_new: int | None = None, kind: str | None = None) -> Any:
        """Returns choices in their frame, with the usage if `num_new` is given."""
        head = {"id": self._id, "object": kind or self._kind, "created": self._created_s, "model": self.served.name}
        if num_new is None:
            return {**head, "choices": choices}
        total = self._num_prompt + num_new
        usage = {"prompt_tokens": self._num_prompt, "completion_tokens": num_new, "total_tokens": total}
        return {**head, "choices": choices, "usage": usage}

    def ended(self) -> Iterator[str]:
        if self._asked.stream_options and self._asked.stream_options.include_usage:
            yield event(self.answer([], sum(self._num_new.values())))
        yield "data: [DONE]\n\n"


class _Answer(OpenAnswer):
    def __init__(self, served: Served, asked: CompletionRequest, wanted: list[Wanted], count: int) -> None:
        num_prompt = sum(len(one.ids) for one in wanted[::count])
        super().__init__(served, asked, num_prompt, "text_completion", "cmpl")
        self._echoes, self._wanted = bool(asked.echo), wanted
        self._offsets = [0] * len(wanted)
        """Characters of each choice's tokens so far."""

    def whole(self, found: list[list[Piece]]) -> dict[str, Any]:
        choices = [self._choice(number, pieces, first=True) for number, pieces in enumerate(found)]
        return self.answer(choices, sum(pieces[-1].num_new for pieces in found))

    def events(self, number: int, piece: Piece) -> Iterator[str]:
        first = number not in self._num_new
        self._num_new[number] = piece.num_new
        if piece.text or piece.tokens or piece.finish or (first and self._echoes):
            yield event(self.answer([self._choice(number, [piece], first)]))

    def _choice(self, number: int, pieces: list[Piece], first: bool) -> dict[str, Any]:
        wanted = self._wanted[number]
        codec = self.served.codec
        before = codec.decode(wanted.ids) if codec and first and self._echoes else ""
        logprobs = None
        if wanted.num_top is not None:
            told = [*((None, *pieces[0].prompt) if first and self._echoes else ())]
            told += [one for piece in pieces for one in piece.tokens]
            logprobs = self._logprobs(number, told)
        found = {"index": number, "text": before + joined(pieces), "logprobs": logprobs}
        return {**found, "finish_reason": pieces[-1].finish}

    def _logprobs(self, number: int, told: list[TokenLogprobs | None]) -> dict[str, Any]:
        """Returns the lists of a choice; of the prompt's first token nobody knows how likely it was."""
        ids = [self._wanted[number].ids[0] if one is None else one.id for one in told]
        offsets = list[int]()
        for token_id in ids:
            offsets.append(self._offsets[number])
            self._offsets[number] += sum(byte & 0xC0 != 0x80 for byte in self.served.bytes_of(token_id))
        return {
            "tokens": [self.served.text_of(token_id) for token_id in ids],
            "token_logprobs": [None if one is None else one.logprob for one in told],
            "top_logprobs": [None if one is None else self._top(one) for one in told],
            "text_offset": offsets,
        }

    def _top(self, one: TokenLogprobs) -> dict[str, float]:
        """Returns the likeliest tokens by text; of several with one text all but the likeliest by id."""
        found = dict[str, float]()
        for token_id, logprob in one.top:
            text = self.served.text_of(token_id)
            found[f"{NO_TEXT}{token_id}" if text in found else text] = logprob
        return found
