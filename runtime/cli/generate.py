"""`coldpress generate`: runs a session as the flags say, and prints the text token by token, or one JSON object.

Several prompts are continued at once (runtime/generate/batch.py), and printed in order when all have ended. Those of a
file may be any number, in bounded memory: results are JSON lines in the order of the prompts, each printed as soon as
its prompt and all earlier ones have ended, and figures go to standard error.
"""

import itertools
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

from safetensors import SafetensorError

from coldpress.runtime.cli import summary
from coldpress.runtime.cli.arguments import Generate
from coldpress.runtime.cli.flags import budget_of, draft_plugin, open_session, prompts_of, sampling_of
from coldpress.runtime.cli.prompt_file import PromptFile
from coldpress.runtime.drafts import DRAFT_TOKENS, NO_DRAFT
from coldpress.runtime.generate.batch import Prompt, generate_batch, generate_each
from coldpress.runtime.generate.completion import Continuation
from coldpress.runtime.generate.statistics import Token
from coldpress.runtime.kernels import FEW_TOKENS
from coldpress.runtime.text.process import LimitedEngine
from coldpress.runtime.text.tokenizer import TextCodec
from coldpress.runtime.trace import Recorder
from coldpress.schemas.errors import ColdpressError

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Control characters with which a stranger's tokenizer could move a terminal's cursor; tab and line feed may stay."""


def generate(flags: Generate) -> None:
    _check_flags(flags)
    recorder = _recorder(flags.trace)
    engine = LimitedEngine()  # it starts while the artifact is opened
    if flags.prompts is not None:
        _generate_file(flags.prompts, flags, recorder, engine)
    elif len(_prompts(flags)) > 1:
        _generate_batch(flags, recorder, engine)
    else:
        _generate_one(flags, recorder, engine)
    if recorder and flags.trace:
        _save_trace(recorder, flags.trace)


def _prompts(flags: Generate) -> Sequence[object]:
    return flags.prompt or flags.prompt_ids


def _generate_one(flags: Generate, recorder: Recorder | None, engine: LimitedEngine) -> None:
    session = open_session(flags, flags.selector, flags.cache, budget_of(flags), recorder)
    codec = TextCodec.of(session.artifact, engine)
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


def _generate_batch(flags: Generate, recorder: Recorder | None, engine: LimitedEngine) -> None:
    session = open_session(flags, flags.selector, flags.cache, budget_of(flags), recorder)
    codec, sampling = TextCodec.of(session.artifact, engine), sampling_of(flags)
    prompts = prompts_of(flags, session.artifact, codec)
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


def _generate_file(prompts_file: Path, flags: Generate, recorder: Recorder | None, engine: LimitedEngine) -> None:
    session = open_session(flags, flags.selector, flags.cache, budget_of(flags), recorder)
    codec, sampling = TextCodec.of(session.artifact, engine), sampling_of(flags)
    file = PromptFile(prompts_file, session, codec, flags.max_new_tokens)
    room = file.room(flags.batch or FEW_TOKENS)
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


def _save_trace(recorder: Recorder, path: Path) -> None:
    try:
        recorder.save(path)
    except SafetensorError as error:  # the library raises it when it cannot write a file
        raise ColdpressError(f"{path}: the trace cannot be written ({error})") from error
