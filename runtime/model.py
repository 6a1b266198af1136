"""The Python interface: an artifact as an object that continues text, chats, and reports what it cost.

    with coldpress.load("mistral-7b-pixel6.coldpress", dram="3GB") as model:
        print(model.generate("Once upon a time"))

Prompts are texts or token ids. All of it goes through one session (runtime/generate/session.py): one call at a time.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypedDict, overload

import numpy as np
from typing_extensions import Unpack

from coldpress.runtime.generate.batch import generate_each, room_of
from coldpress.runtime.generate.choice import asked_bytes, budget_at
from coldpress.runtime.generate.completion import Completion, Continuation, Totals
from coldpress.runtime.generate.sampling import Sampling
from coldpress.runtime.generate.session import Session
from coldpress.runtime.generate.statistics import Token
from coldpress.runtime.generate.token_ids import token_array
from coldpress.runtime.kernels import FEW_TOKENS
from coldpress.runtime.text.chat import ChatTemplate, Message
from coldpress.runtime.text.process import LimitedEngine
from coldpress.runtime.text.tokenizer import TextCodec
from coldpress.schemas.errors import ColdpressError

MAX_NEW_TOKENS = 64
"""New tokens where nobody says how many, as for `coldpress generate`."""
Text = str | Sequence[int]
"""A prompt: text, or token ids of the artifact's vocabulary."""
Texts = list[str] | list[list[int]] | list[Text]
"""Several prompts."""


class Drawing(TypedDict, total=False):
    """Settings for choosing tokens; see runtime/generate/sampling.py for meanings and defaults, which are greedy."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    seed: int


@dataclass(frozen=True)
class Stats:
    """A model's work since it was loaded, and its memory."""

    prompt_tokens: int
    new_tokens: int
    seconds: float
    """Prefills and decoding together."""
    decode_tokens_per_s: float
    """New tokens per second of decoding, without each prompt's first, which comes from the prefill; 0 without any."""
    drafted_tokens: int
    accepted_tokens: int
    """Drafts that the model checked, and those that were right; 0 where a plan has none."""
    read_bytes: int
    """Bytes read from flash, prefills included."""
    hits: int
    """Units that decoding used and that were in DRAM."""
    misses: int
    hit_rate: float
    """Hits over hits and misses; 0 without any."""
    dram_budget_bytes: int
    dram_used_bytes: int
    """The part of the budget in use: resident tensors, KV cache, buffers, cached units, bookkeeping."""
    context_length: int
    """Most tokens of a prompt and its continuation together."""


class Model(AbstractContextManager["Model"]):
    """A loaded artifact; a context manager, which closes it. One call at a time."""

    def __init__(self, path: str | Path, dram: str | int | None = None, *, identity: str | None = None) -> None:
        """Opens the artifact, and loads what stays in DRAM.

        Args:
            path: The artifact's folder.
            dram: The DRAM budget, as text such as "3GB" or "50%" (of what it takes with everything in DRAM) or in
                bytes; None for the artifact's largest plan.
            identity: sha256 that the artifact's manifest must have; None takes any.

        Raises:
            ColdpressError: if the artifact is damaged, the budget is too small, or the identity is another one.
        """
        engine = LimitedEngine()  # it starts while the artifact is opened
        self._session = Session(path, dram_budget_bytes=budget_at(path, dram), identity=identity)
        self._codec = TextCodec.of(self._session.artifact, engine)
        self._template: ChatTemplate | None = None
        self._totals = Totals()

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the artifact's files; later calls are refused.

        Raises:
            ColdpressError: if a call is running.
        """
        self._session.close()

    def resize(self, dram: str | int) -> None:
        """Changes the DRAM budget, also while another thread's call runs; text such as "3GB" or "50%", or bytes.

        Raises:
            ColdpressError: if the budget cannot hold what must stay in DRAM; then nothing has changed.
        """
        self._session.resize(asked_bytes(self._session.artifact.manifest, dram))

    @property
    def stats(self) -> Stats:
        """Returns the counters of the run so far."""
        totals, plan = self._totals, self._session.plan
        return Stats(
            prompt_tokens=totals.prompt_tokens,
            new_tokens=totals.new_tokens,
            seconds=totals.prefill_s + totals.decode_s,
            decode_tokens_per_s=totals.decoded / totals.decode_s if totals.decode_s else 0.0,
            drafted_tokens=totals.drafted,
            accepted_tokens=totals.accepted,
            read_bytes=totals.read_bytes,
            hits=totals.hits,
            misses=totals.misses,
            hit_rate=totals.hit_rate,
            dram_budget_bytes=plan.dram_budget_bytes,
            dram_used_bytes=self._session.store.dram_used_bytes,
            context_length=plan.context_length,
        )

    def encode(self, text: str) -> list[int]:
        """Returns the token ids of a text as a prompt, special tokens included.

        Raises:
            ColdpressError: if the artifact has no tokenizer, or the text is not valid Unicode.
        """
        return self._known_codec().encode(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Returns the text of token ids, without special tokens.

        Raises:
            ColdpressError: if the artifact has no tokenizer.
        """
        return self._known_codec().decode(token_ids)

    def chat_ids(self, messages: Sequence[Message]) -> list[int]:
        """Returns the token ids of a chat by the checkpoint's chat template, up to where the next answer begins.

        They are a prompt for `generate` and `stream`.

        Args:
            messages: Such as [{"role": "user", "content": "Hello"}].

        Raises:
            ColdpressError: if the artifact has no chat template or no tokenizer, or the template refuses the chat.
        """
        if self._template is None:
            self._template = ChatTemplate(self._session.artifact)
        return self._known_codec().encode(self._template.render(messages), special=False)

    @overload
    def generate(
        self,
        prompt: Text,
        max_new_tokens: int = MAX_NEW_TOKENS,
        *,
        stop: Sequence[str] = (),
        logprobs: int | None = None,
        ignore_eos: bool = False,
        **drawing: Unpack[Drawing],
    ) -> Completion: ...

    @overload
    def generate(
        self,
        prompt: Texts,
        max_new_tokens: int = MAX_NEW_TOKENS,
        *,
        stop: Sequence[str] = (),
        logprobs: int | None = None,
        ignore_eos: bool = False,
        **drawing: Unpack[Drawing],
    ) -> list[Completion]: ...

    def generate(
        self,
        prompt: Text | Texts,
        max_new_tokens: int = MAX_NEW_TOKENS,
        *,
        stop: Sequence[str] = (),
        logprobs: int | None = None,
        ignore_eos: bool = False,
        **drawing: Unpack[Drawing],
    ) -> Completion | list[Completion]:
        """Continues a prompt, or each of a list of prompts; several run together and share their reads of flash.

        Args:
            prompt: A text or token ids, or a list of such prompts.
            max_new_tokens: New tokens of each prompt, at least 1.
            stop: Texts before which the continuation ends.
            logprobs: How many of the likeliest tokens to list in the place of each new token; None for none.
            ignore_eos: Go on after end-of-sequence tokens.
            drawing: temperature, top_p, top_k, min_p, repetition_penalty, seed. Of several prompts the first has the
                seed, the next one the seed plus 1.

        Raises:
            ColdpressError: for an empty prompt, an unknown id, more tokens than the context holds, a setting outside
                its limits, or a model that is closed or in use.
        """
        prompts, is_one = _prompts_of(prompt)
        sampling = Sampling(**drawing)
        runs = [self._begun(each, stop, logprobs, ignore_eos) for each in prompts]
        if is_one and logprobs is None:
            (run,) = runs
            self._session.generate(
                run.ids, max_new_tokens, sampling=sampling, ignore_eos=ignore_eos, on_token=partial(self._add, run)
            )
            return run.completion()
        self._run_together(runs, max_new_tokens, sampling, ignore_eos)
        found = [run.completion() for run in runs]
        return found[0] if is_one else found

    def stream(
        self,
        prompt: Text,
        max_new_tokens: int = MAX_NEW_TOKENS,
        *,
        stop: Sequence[str] = (),
        ignore_eos: bool = False,
        **drawing: Unpack[Drawing],
    ) -> Iterator[str]:
        """Continues a prompt, and yields its text in pieces as soon as they are certain.

        Joined, the pieces are the text of `generate`. The model is in use until the last piece, or until the iterator
        is closed. Arguments and errors are those of `generate`; the artifact must have a tokenizer.
        """
        self._known_codec()
        run, sampling = self._begun(prompt, stop, None, ignore_eos), Sampling(**drawing)
        return self._pieces(run, max_new_tokens, sampling, ignore_eos)

    def chat(
        self,
        messages: Sequence[Message],
        max_new_tokens: int = MAX_NEW_TOKENS,
        *,
        stop: Sequence[str] = (),
        logprobs: int | None = None,
        **drawing: Unpack[Drawing],
    ) -> Completion:
        """Answers a chat: `generate` of its `chat_ids`."""
        return self.generate(self.chat_ids(messages), max_new_tokens, stop=stop, logprobs=logprobs, **drawing)

    def _known_codec(self) -> TextCodec:
        return self._codec or TextCodec(self._session.artifact)  # which says that there is no tokenizer

    def _begun(self, prompt: Text, stop: Sequence[str], num_top: int | None, ignore_eos: bool) -> Continuation:
        if isinstance(stop, str):
            raise ColdpressError(f"stop is the text {stop!r}, expected a list of texts; write [{stop!r}]")
        if num_top is not None and num_top < 0:
            raise ColdpressError(f"logprobs is {num_top}, expected a whole number of at least 0, or None")
        ids = self.encode(prompt) if isinstance(prompt, str) else token_array(prompt).tolist()
        eos_ids = frozenset(() if ignore_eos else self._session.artifact.manifest.model.eos_token_ids)
        return Continuation(self._codec, ids, stop, num_top, eos_ids)

    def _add(self, run: Continuation, token: Token) -> bool:
        self._totals.add(token, len(run.ids))
        return run.add(token)

    def _run_together(
        self, runs: Sequence[Continuation], max_new_tokens: int, sampling: Sampling, ignore_eos: bool
    ) -> None:
        decoder = self._session.decoder
        for run in runs:
            decoder.check_tokens(np.array(run.ids, np.int64))
        lengths = [len(run.ids) + max_new_tokens for run in runs]
        if not lengths:
            return
        room = room_of(self._session, lengths, 1 if decoder.selection.sees_residency else FEW_TOKENS)
        prompts = [run.prompt(sampling.at(place)) for place, run in enumerate(runs)]

        def add(number: int, token: Token) -> bool:
            return self._add(runs[number], token)

        for _ in generate_each(self._session, prompts, max_new_tokens, room, ignore_eos=ignore_eos, on_token=add):
            pass

    def _pieces(self, run: Continuation, max_new_tokens: int, sampling: Sampling, ignore_eos: bool) -> Iterator[str]:
        steps = self._session.stream(run.ids, max_new_tokens, sampling=sampling, ignore_eos=ignore_eos)
        with closing(steps):
            for token in steps:
                ended = self._add(run, token)
                if run.piece:
                    yield run.piece
                if ended:
                    break
        if rest := run.remainder():
            yield rest


def _prompts_of(prompt: Text | Texts) -> tuple[list[Text], bool]:
    if isinstance(prompt, str):
        return [prompt], True
    given = list(prompt)
    numbers = [isinstance(each, int | np.integer) for each in given]
    if given and all(numbers):
        return [[int(each) for each in given if isinstance(each, int | np.integer)]], True
    if any(numbers):
        raise ColdpressError("the prompts mix token ids and prompts, expected a text, token ids, or a list of these")
    return [each for each in given if not isinstance(each, int | np.integer)], False


def load(path: str | Path, dram: str | int | None = None, *, identity: str | None = None) -> Model:
    """Loads an artifact; see `Model`."""
    return Model(path, dram, identity=identity)
