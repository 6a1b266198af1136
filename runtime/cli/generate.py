"""`coldpress generate`: runs a session as the flags say, and prints the text token by token, or one JSON object.

Several prompts are continued at once (runtime/generate/batch.py), and printed in order when all have ended.
runtime/cli/generate_file.py handles the prompts of a file.
"""

import io
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TextIO

from safetensors import SafetensorError

from coldpress.runtime import plugins
from coldpress.runtime.artifact.reader import open_artifact
from coldpress.runtime.cli import summary
from coldpress.runtime.cli.arguments import Generate
from coldpress.runtime.cli.flags import budget_of, draft_plugin, open_session, prompts_of, sampling_of
from coldpress.runtime.cli.generate_file import generate_file
from coldpress.runtime.drafts import DRAFT_TOKENS, NO_DRAFT
from coldpress.runtime.generate.batch import Batch, generate_batch
from coldpress.runtime.generate.draft_model import DraftModel, beside_draft
from coldpress.runtime.generate.session import Session
from coldpress.runtime.generate.statistics import Token
from coldpress.runtime.kernels import FEW_TOKENS
from coldpress.runtime.quantities import parse_bytes
from coldpress.runtime.text.stream import TextStream
from coldpress.runtime.text.tokenizer import TextCodec
from coldpress.runtime.trace import Recorder
from coldpress.schemas.errors import ColdpressError

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Control characters with which a stranger's tokenizer could move a terminal's cursor; tab and line feed may stay."""


def generate(flags: Generate) -> None:
    """Continues one or several prompts and prints the results."""
    _check_flags(flags)
    recorder = _recorder(flags.trace)
    if flags.prompts is not None:
        budget = budget_of(flags)
        generate_file(flags.prompts, flags, open_session(flags, flags.selector, flags.cache, budget, recorder))
    elif len(_prompts(flags)) > 1:
        _generate_batch(flags, recorder)
    else:
        _generate_one(flags, recorder)
    if recorder and flags.trace:
        _save_trace(recorder, flags.trace)


def _prompts(flags: Generate) -> Sequence[object]:
    return flags.prompt or flags.prompt_ids


def _generate_one(flags: Generate, recorder: Recorder | None) -> None:
    other = _draft_session(flags)
    budget = budget_of(flags)
    if other:
        budget = beside_draft(open_artifact(flags.artifact).manifest, other, budget)
    session = open_session(flags, flags.selector, flags.cache, budget, recorder)
    codec = TextCodec.of(session.artifact)
    (prompt_ids,) = prompts_of(flags, session.artifact)
    text = _text_stream(flags, prompt_ids, codec)
    done = session.generate(
        prompt_ids,
        flags.max_new_tokens,
        sampling=sampling_of(flags),
        ignore_eos=flags.ignore_eos,
        draft=DraftModel(other, session.artifact) if other else draft_plugin(flags.draft),
        draft_tokens=flags.draft_tokens or DRAFT_TOKENS,
        on_token=_writer(prompt_ids, codec, text, io.StringIO() if flags.json else sys.stdout),
    )
    if not flags.json:
        print(_shown(text.rest() if text else "") + "\n\n" + summary.render(done.metrics, done.tokens))
        if other:
            print(summary.render_draft(other.store))
        return
    print(
        json.dumps(
            {
                "prompt_token_ids": prompt_ids,
                "token_ids": list(done.token_ids),
                "text": text.text() if text else None,
                "stop": text.stop if text else None,
                "metrics": done.metrics.model_dump(mode="json"),
                **summary.as_data(done.tokens),
                "draft": other and summary.draft_as_data(other.store),
            }
        )
    )


def _generate_batch(flags: Generate, recorder: Recorder | None) -> None:
    session = open_session(flags, flags.selector, flags.cache, budget_of(flags), recorder)
    prompts, codec = prompts_of(flags, session.artifact), TextCodec.of(session.artifact)
    texts = [_text_stream(flags, prompt_ids, codec) for prompt_ids in prompts]

    def add(sequence: int, token: Token) -> bool:
        text = texts[sequence]
        if text:
            text.add(token.id)
        return text is not None and text.stop is not None

    sampling = sampling_of(flags)
    done = generate_batch(
        session,
        prompts,
        flags.max_new_tokens,
        sampling=[replace(sampling, seed=sampling.seed + place) for place in range(len(prompts))],
        ignore_eos=flags.ignore_eos,
        on_token=add,
    )
    _print_batch(flags, prompts, texts, done, codec)


def _print_batch(
    flags: Generate,
    prompts: list[list[int]],
    texts: list[TextStream | None],
    done: Batch,
    codec: TextCodec | None,
) -> None:
    found: list[dict[str, Any]] = [
        {
            "prompt_token_ids": prompt_ids,
            "token_ids": [token.id for token in tokens],
            "text": text.text() if text else None,
            "stop": text.stop if text else None,
            "tokens": [asdict(token) for token in tokens],
        }
        for prompt_ids, tokens, text in zip(prompts, done.sequences, texts, strict=True)
    ]
    if flags.json:
        print(json.dumps({"sequences": found, **summary.batch_as_data(done)}))
        return
    for number, of_one in enumerate(found, start=1):
        before = codec.decode(of_one["prompt_token_ids"]) if codec else _spaced(of_one["prompt_token_ids"])
        after = of_one["text"] if codec else f" {_spaced(of_one['token_ids'])}"
        print(f"[{number}] {_shown(before + after)}\n")
    print(summary.render_batch(done))


def _text_stream(flags: Generate, prompt_ids: list[int], codec: TextCodec | None) -> TextStream | None:
    if codec is None and flags.stop:
        raise ColdpressError(f"{flags.artifact}: stop strings need a tokenizer, and the artifact has none")
    return TextStream(codec, prompt_ids, flags.stop) if codec else None


def _writer(
    prompt_ids: list[int], codec: TextCodec | None, text: TextStream | None, out: TextIO
) -> Callable[[Token], bool]:
    """Returns a function that writes the prompt, then each new token, and returns whether a stop string was found."""
    begun = False

    def write(token: Token) -> bool:
        nonlocal begun
        before = ""
        if not begun:  # only now: the session has checked the prompt's ids before it gives a token
            before, begun = codec.decode(prompt_ids) if codec else _spaced(prompt_ids), True
        out.write(_shown(before + (text.add(token.id) if text else f" {token.id}")))
        out.flush()
        return text is not None and text.stop is not None

    return write


def _spaced(ids: list[int]) -> str:
    return " ".join(map(str, ids))


def _shown(text: str) -> str:
    return CONTROL.sub("\ufffd", text)


def _check_flags(flags: Generate) -> None:
    """Refuses flags of drafts and batches that would have no effect."""
    draft = flags.draft
    if flags.batch is not None and flags.prompts is None:
        raise ColdpressError("--batch needs a file of --prompts, and there is none; leave it out")
    if flags.batch is not None and flags.batch > FEW_TOKENS:
        raise ColdpressError(f"--batch is {flags.batch}, expected 1 to {FEW_TOKENS}; leave it out for all of them")
    if draft not in (None, NO_DRAFT) and (flags.prompts is not None or len(_prompts(flags)) > 1):
        raise ColdpressError(f"--draft '{draft}' is for one prompt, and there are several; leave it out")
    if draft in (None, NO_DRAFT) and flags.draft_tokens is not None:
        raise ColdpressError("--draft-tokens needs a --draft, and there is none; leave it out")
    if draft in (None, *plugins.names("coldpress.runtime.drafts")) and flags.draft_budget is not None:
        raise ColdpressError("--draft-budget needs a draft artifact, and there is none; leave it out")


def _draft_session(flags: Generate) -> Session | None:
    """Opens a session of the draft artifact; None if --draft names no artifact."""
    if flags.draft is None or flags.draft in plugins.names("coldpress.runtime.drafts"):
        return None
    budget = None if flags.draft_budget is None else parse_bytes(flags.draft_budget)
    return Session(
        flags.draft,
        dram_budget_bytes=budget,
        flash=flags.flash,
        activations=flags.activations,
        kv_cache=flags.kv_cache,
    )


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
