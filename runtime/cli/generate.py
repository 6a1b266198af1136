"""`coldpress generate`: runs a session as the flags say, and prints the text token by token, or one JSON object.

Several prompts are continued at once (runtime/generate/batch.py), and printed in order when all have ended, those of a
file as soon as they and all earlier ones have ended.
"""

import heapq
import itertools
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeGuard

from safetensors import SafetensorError

from coldpress.runtime.artifact import strict_json
from coldpress.runtime.artifact.errors import short
from coldpress.runtime.cli import summary
from coldpress.runtime.cli.arguments import Generate
from coldpress.runtime.cli.flags import draft_plugin, open_session, prompts_of, sampling_of
from coldpress.runtime.drafts import DRAFT_TOKENS, NO_DRAFT
from coldpress.runtime.generate.batch import BatchRoom, Prompt, generate_batch, generate_each, room_of
from coldpress.runtime.generate.completion import Continuation
from coldpress.runtime.generate.session import Session
from coldpress.runtime.generate.statistics import Token
from coldpress.runtime.generate.token_ids import token_array
from coldpress.runtime.kernels import FEW_TOKENS
from coldpress.runtime.text.process import LimitedEngine
from coldpress.runtime.text.tokenizer import TextCodec
from coldpress.runtime.trace import Recorder
from coldpress.schemas.errors import ColdpressError

MAX_LINE_BYTES = strict_json.ARTIFACT.size_bytes
EXPECTED = '{"prompt": "text"} or {"prompt_ids": [1, 2, 3]}'
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Control characters with which a stranger's tokenizer could move a terminal's cursor; tab and line feed may stay."""


def generate(flags: Generate) -> None:
    """Continues a prompt, reading weights from flash."""
    _check_flags(flags)
    recorder = _recorder(flags.trace)
    engine = LimitedEngine()  # it starts while the artifact is opened
    session = open_session(flags, flags.selector, flags.cache, recorder)
    codec = TextCodec.of(session.artifact, engine)
    if flags.prompts is not None:
        _generate_file(PromptFile(flags.prompts, session, codec, flags.max_new_tokens), flags, session, codec)
    elif len(flags.prompt or flags.prompt_ids) > 1:
        _generate_batch(flags, session, codec)
    else:
        _generate_one(flags, session, codec)
    if recorder and flags.trace:
        try:
            recorder.save(flags.trace)
        except SafetensorError as error:  # the library raises it when it cannot write a file
            raise ColdpressError(f"{flags.trace}: the trace cannot be written ({error})") from error


def _generate_one(flags: Generate, session: Session, codec: TextCodec | None) -> None:
    (prompt_ids,) = prompts_of(flags, session.artifact, codec)
    found = Continuation(codec, prompt_ids, flags.stop)

    def write(token: Token) -> bool:
        has_ended = found.add(token)
        # the prompt only now: the session has checked its ids before it gives a token
        before = _prompt_text(codec, prompt_ids) if len(found.token_ids) == 1 else ""
        print(_shown(before + (found.piece if codec else f" {token.id}")), end="", flush=True)
        return has_ended

    done = session.generate(
        prompt_ids,
        flags.max_new_tokens,
        sampling=sampling_of(flags),
        ignore_eos=flags.ignore_eos,
        draft=draft_plugin(flags.draft),
        draft_tokens=flags.draft_tokens or DRAFT_TOKENS,
        on_token=found.add if flags.json else write,
    )
    if not flags.json:
        print(_shown(found.remainder()) + "\n\n" + summary.render(done.metrics, done.tokens))
        return
    figures = {"metrics": done.metrics.model_dump(mode="json"), **summary.as_data(done.tokens)}
    print(json.dumps({**found.as_data(), **figures}))


def _generate_batch(flags: Generate, session: Session, codec: TextCodec | None) -> None:
    prompts, sampling = prompts_of(flags, session.artifact, codec), sampling_of(flags)
    found = [Continuation(codec, prompt_ids, flags.stop) for prompt_ids in prompts]
    done = generate_batch(
        session,
        prompts,
        flags.max_new_tokens,
        sampling=[sampling.at(place) for place in range(len(prompts))],
        ignore_eos=flags.ignore_eos,
        draft=draft_plugin(flags.draft),
        draft_tokens=flags.draft_tokens or DRAFT_TOKENS,
        on_token=lambda number, token: found[number].add(token),
    )
    if flags.json:
        each = [
            {**one.as_data(), "tokens": [asdict(token) for token in tokens]}
            for one, tokens in zip(found, done.sequences, strict=True)
        ]
        print(json.dumps({"sequences": each, **summary.batch_as_data(done)}))
        return
    for number, one in enumerate(found, start=1):
        after = one.completion().text if codec else f" {_spaced(one.token_ids)}"
        print(f"[{number}] {_shown(_prompt_text(codec, one.ids) + after)}\n")
    print(summary.render_batch(done))


def _generate_file(file: "PromptFile", flags: Generate, session: Session, codec: TextCodec | None) -> None:
    room, sampling = file.room(flags.batch or FEW_TOKENS), sampling_of(flags)
    begun: dict[int, Continuation] = {}

    def prompts() -> Iterator[Prompt]:
        for number, ids in enumerate(file.ids()):
            begun[number] = Continuation(codec, ids, flags.stop)
            yield begun[number].prompt(sampling.at(number))

    steps = generate_each(
        session,
        prompts(),
        flags.max_new_tokens,
        room,
        ignore_eos=flags.ignore_eos,
        draft=draft_plugin(flags.draft),
        draft_tokens=flags.draft_tokens or DRAFT_TOKENS,
        on_token=lambda number, token: begun[number].add(token),
    )
    with closing(steps):
        for number in itertools.count():
            try:
                next(steps)
            except StopIteration as done:
                if not flags.json:
                    print(summary.render(done.value), file=sys.stderr)
                return
            print(json.dumps(begun.pop(number).as_data()), flush=True)


class PromptFile:
    """Prompts as JSON lines, as in `EXPECTED`; blank lines are skipped. The file may have any length, and is never in
    memory as a whole: it is read first to check that the session can continue every prompt, and to find the longest
    ones, then while the prompts run."""

    def __init__(self, path: Path, session: Session, codec: TextCodec | None, max_new_tokens: int) -> None:
        """Checks that the file exists; reads nothing yet. Raises `ColdpressError` if the path is not a regular file."""
        if not path.is_file():
            raise ColdpressError(f"{path}: is not a regular file, expected prompts as JSON lines; name one")
        self._path, self._session, self._codec = path, session, codec
        self._max_new_tokens = max_new_tokens

    def room(self, most: int) -> BatchRoom:
        """Returns the limits for at most `most` sequences at once.

        The number of sequences is such that the DRAM budget holds the longest prompts of the file together. Raises
        `ColdpressError` naming the first line that the session cannot continue.
        """
        longest = heapq.nlargest(most, (len(ids) + self._max_new_tokens for ids in self._checked()))
        if not longest:
            raise ColdpressError(f"{self._path}: has no prompts, expected JSON lines such as {EXPECTED}")
        return room_of(self._session, longest, most)

    def ids(self) -> Iterator[list[int]]:
        return (ids for _, ids in self._lines())

    def _checked(self) -> Iterator[list[int]]:
        decoder = self._session.decoder
        for number, ids in self._lines():
            try:
                decoder.check_tokens(token_array(ids))
                decoder.check_context(len(ids) + self._max_new_tokens)
            except ColdpressError as error:
                raise type(error)(f"{self._path}, line {number}: {error}") from error
            yield ids

    def _lines(self) -> Iterator[tuple[int, list[int]]]:
        with self._path.open("rb") as file:
            number = 0
            while line := file.readline(MAX_LINE_BYTES + 1):
                number += 1
                if line.strip():
                    yield number, self._ids_of(line, number)

    def _ids_of(self, line: bytes, number: int) -> list[int]:
        def refuse(found: str, expected: str) -> ColdpressError:
            return ColdpressError(f"{self._path}, line {number}: it is {found}, expected {expected}")

        value = strict_json.parse(line, refuse, replace(strict_json.ARTIFACT, size_bytes=MAX_LINE_BYTES))
        ids = self._ids_in(value)
        if ids is None:
            raise refuse(short(value), EXPECTED)
        if not ids:
            raise refuse("a prompt without tokens", "at least one")
        return ids

    def _ids_in(self, value: Any) -> list[int] | None:
        match value:
            case {"prompt": str(text), **rest} if not rest:
                if self._codec is None:
                    raise ColdpressError(f"{self._path}: text needs a tokenizer, and the artifact has none; give ids")
                return self._codec.encode(text)
            case {"prompt_ids": ids, **rest} if not rest and _are_integers(ids):
                return ids
            case _:
                return None


def _are_integers(values: object) -> TypeGuard[list[int]]:
    return strict_json.is_array(values) and all(type(value) is int for value in values)


def _prompt_text(codec: TextCodec | None, ids: Sequence[int]) -> str:
    return codec.decode(ids) if codec else _spaced(ids)


def _spaced(ids: Sequence[int]) -> str:
    return " ".join(map(str, ids))


def _shown(text: str) -> str:
    return CONTROL.sub("\ufffd", text)


def _check_flags(flags: Generate) -> None:
    if flags.batch is not None and flags.prompts is None:
        raise ColdpressError("--batch needs a file of --prompts, and there is none; leave it out")
    if flags.batch is not None and flags.batch > FEW_TOKENS:
        raise ColdpressError(f"--batch is {flags.batch}, expected 1 to {FEW_TOKENS}; leave it out for all of them")
    if flags.draft in (None, NO_DRAFT) and flags.draft_tokens is not None:
        raise ColdpressError("--draft-tokens needs a --draft, and there is none; leave it out")


def _recorder(path: Path | None) -> Recorder | None:
    """Makes a recorder for `path`; refuses before the run a path that could not be written after it."""
    if path is not None and not path.parent.is_dir():
        raise ColdpressError(f"{path}: there is no folder {path.parent}; make it, or write the trace elsewhere")
    if path is not None and path.is_symlink() | (path.exists() and not path.is_file()):
        raise ColdpressError(f"{path}: is not a regular file, and a trace would replace it; write the trace elsewhere")
    if path is not None and not os.access(path.parent, os.W_OK):
        raise ColdpressError(f"{path}: {path.parent} is a folder that is not writable; write the trace elsewhere")
    return None if path is None else Recorder()
