"""`coldpress generate --prompts FILE`: continues the prompts of a file of any length, in bounded memory.

Results are JSON lines in the order of the prompts; a line is printed as soon as its prompt and all earlier ones have
ended. Figures go to standard error.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from coldpress.runtime.cli import summary
from coldpress.runtime.cli.arguments import Generate
from coldpress.runtime.cli.flags import sampling_of
from coldpress.runtime.cli.prompt_file import PromptFile
from coldpress.runtime.generate.batch import Prompt, generate_each
from coldpress.runtime.generate.session import Session
from coldpress.runtime.generate.statistics import Token
from coldpress.runtime.kernels import FEW_TOKENS
from coldpress.runtime.text.stream import TextStream
from coldpress.runtime.text.tokenizer import TextCodec
from coldpress.schemas.errors import ColdpressError


def generate_file(prompts_file: Path, flags: Generate, session: Session) -> None:
    """Continues every prompt of a file and prints the results."""
    codec = TextCodec.of(session.artifact)
    if codec is None and flags.stop:
        raise ColdpressError(f"{flags.artifact}: stop strings need a tokenizer, and the artifact has none")
    file = PromptFile(prompts_file, session, codec, flags.max_new_tokens)
    room = file.room(flags.batch or FEW_TOKENS)
    texts = _Texts(codec, flags.stop)
    sampling = sampling_of(flags)
    noted = enumerate(texts.noted(file.ids()))
    prompts = (Prompt(ids, replace(sampling, seed=sampling.seed + number)) for number, ids in noted)
    eos = flags.ignore_eos
    steps = generate_each(session, prompts, flags.max_new_tokens, room, ignore_eos=eos, on_token=texts.add)
    with closing(steps):
        while True:
            try:
                tokens = next(steps)
            except StopIteration as done:
                if not flags.json:
                    print(summary.render(done.value), file=sys.stderr)
                return
            print(json.dumps(texts.result(tokens)), flush=True)


@dataclass
class _Text:
    """The text of a prompt that has begun and is not printed yet."""

    prompt_ids: list[int]
    stream: TextStream | None
    """None without a tokenizer."""


class _Texts:
    """The texts of prompts, by the prompts' numbers."""

    def __init__(self, codec: TextCodec | None, stops: Sequence[str]) -> None:
        self._codec, self._stops = codec, stops
        self._texts: dict[int, _Text] = {}
        self._num_given = 0

    def noted(self, prompts: Iterator[list[int]]) -> Iterator[list[int]]:
        """Yields the prompts unchanged, and begins a text for each."""
        for number, ids in enumerate(prompts):
            self._texts[number] = _Text(ids, TextStream(self._codec, ids, self._stops) if self._codec else None)
            yield ids

    def add(self, number: int, token: Token) -> bool:
        """Adds a token to a text, and returns whether a stop string was found."""
        stream = self._texts[number].stream
        if stream is None:
            return False
        stream.add(token.id)
        return stream.stop is not None

    def result(self, tokens: Sequence[Token]) -> dict[str, Any]:
        """Returns the printed line of the next prompt, whose new tokens are `tokens`, and drops its text."""
        text = self._texts.pop(self._num_given)
        self._num_given += 1
        return {
            "prompt_token_ids": text.prompt_ids,
            "token_ids": [token.id for token in tokens],
            "text": text.stream.text() if text.stream else None,
            "stop": text.stream.stop if text.stream else None,
        }
