"""Reads prompts as JSON lines: `{"prompt": "text"}` or `{"prompt_ids": [1, 2, 3]}`; skips blank lines.

The file may have any length, and is never in memory as a whole. It is read twice: first to check that the session can
continue every prompt, and to find the longest ones, then while the prompts run.
"""

import heapq
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeGuard

from coldpress.runtime.artifact import strict_json
from coldpress.runtime.artifact.errors import short
from coldpress.runtime.generate.batch import Room, room_of
from coldpress.runtime.generate.session import Session
from coldpress.runtime.generate.token_ids import token_array
from coldpress.runtime.text.tokenizer import TextCodec
from coldpress.schemas.errors import ColdpressError

MAX_LINE_BYTES = strict_json.ARTIFACT.size_bytes
EXPECTED = '{"prompt": "text"} or {"prompt_ids": [1, 2, 3]}'


class PromptFile:
    """The prompts of a file; each call reads it again."""

    def __init__(self, path: Path, session: Session, codec: TextCodec | None, max_new_tokens: int) -> None:
        """Checks that the file exists; reads nothing yet. Raises `ColdpressError` if the path is not a regular file."""
        if not path.is_file():
            raise ColdpressError(f"{path}: is not a regular file, expected prompts as JSON lines; name one")
        self._path, self._session, self._codec = path, session, codec
        self._max_new_tokens = max_new_tokens

    def room(self, most: int) -> Room:
        """Returns the limits for at most `most` sequences at once.

        The number of sequences is such that the DRAM budget holds the longest prompts of the file together.

        Raises:
            ColdpressError: naming the first line that the session cannot continue.
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
