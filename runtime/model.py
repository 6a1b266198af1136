"""The Python interface: an artifact as an object that continues text, chats, and reports what it cost.

    with coldpress.load("mistral-7b-pixel6.coldpress", dram="3GB") as model:
        print(model.generate("Once upon a time"))

Prompts are texts or token ids. All of it goes through one session (runtime/generate/session.py): one call at a time.
"""

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypedDict, overload

import numpy as np
from typing_extensions import Unpack

from coldpress.runtime.generate.batch import Prompt, Room, generate_each, room_of
from coldpress.runtime.generate.choice import asked_bytes, budget_at
from coldpress.runtime.generate.logprobs import TokenLogprobs, logprobs_of
from coldpress.runtime.generate.sampling import Sampling
from coldpress.runtime.generate.session import Session
from coldpress.runtime.generate.statistics import Token
from coldpress.runtime.generate.token_ids import token_array
from coldpress.runtime.kernels import FEW_TOKENS
from coldpress.runtime.text.chat import ChatTemplate, Message
from coldpress.runtime.text.stream import TextStream
from coldpress.runtime.text.tokenizer import TextCodec
from coldpress.schemas.errors import ColdpressError

MAX_NEW_TOKENS = 64
"""New tokens where nobody says how many, as for `coldpress generate`."""
Text = str | Sequence[int]
"""A prompt: text, or token ids of the artifact's vocabulary."""
Texts = list[str] | list[list[int]] | list[Text]
"""Several prompts."""


class Drawing(TypedDict, total=False):
    """How tokens are chosen; see runtime/generate/sampling.py for the meaning and the defaults, which are greedy."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    seed: int


@dataclass(frozen=True)
class Completion:
    """The continuation of one prompt; `str()` gives its text."""

    text: str
    """Without the prompt, without a stop string and what follows it; empty for an artifact without a tokenizer."""
    token_ids: tuple[int, ...]
    """The new tokens; one that ended the text is the last."""
    prompt_token_ids: tuple[int, ...]
    finish_reason: Literal["stop", "length"]
    """`stop` at a stop string or an end-of-sequence token, `length` at `max_new_tokens`."""
    stop: str | None
    """The stop string that was found."""
    logprobs: tuple[TokenLogprobs, ...] | None
    """One for each new token; None if they were not asked for."""

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Stats:
    """What a model has done since it was loaded, and the memory that it has."""

    prompt_tokens: int
    new_tokens: int
    seconds: float
    """Of prefills and of decoding."""
    decode_tokens_per_s: float
    """New tokens per second of decoding, without each prompt's first, which comes from the prefill; 0 without any."""
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


class Model:
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
        self._session = Session(path, dram_budget_bytes=budget_at(path, dram), identity=identity)
        self._codec = TextCodec.of(self._session.artifact)
        self._template: ChatTemplate | None = None
        self._cost = _Cost()

    def __enter__(self) -> "Model":
        """Returns the model itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Closes the model."""
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
        """Returns what the model has done so far."""
        cost, plan = self._cost, self._session.plan
        lookups = cost.hits + cost.misses
        return Stats(
            prompt_tokens=cost.prompt_tokens,
            new_tokens=cost.new_tokens,
            seconds=cost.prefill_s + cost.decode_s,
            decode_tokens_per_s=cost.decoded / cost.decode_s if cost.decode_s else 0.0,
            read_bytes=cost.read_bytes,
            hits=cost.hits,
            misses=cost.misses,
            hit_rate=cost.hits / lookups if lookups else 0.0,
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
        runs = [
            self._run(each, stop, logprobs, replace(sampling, seed=sampling.seed + place))
            for place, each in enumerate(prompts)
        ]
        if is_one and logprobs is None:
            (run,) = runs
            self._session.generate(
                run.ids, max_new_tokens, sampling=sampling, ignore_eos=ignore_eos, on_token=self._counted(run)
            )
            return run.completion(self._eos(ignore_eos))
        self._run_together(runs, max_new_tokens, ignore_eos)
        found = [run.completion(self._eos(ignore_eos)) for run in runs]
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
        run = self._run(prompt, stop, None, Sampling(**drawing))
        return self._pieces(run, max_new_tokens, ignore_eos)

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

    def _eos(self, ignore_eos: bool) -> frozenset[int]:
        return frozenset(() if ignore_eos else self._session.artifact.manifest.model.eos_token_ids)

    def _run(self, prompt: Text, stop: Sequence[str], num_top: int | None, sampling: Sampling) -> "_Run":
        if isinstance(stop, str):
            raise ColdpressError(f"stop is the text {stop!r}, expected a list of texts; write [{stop!r}]")
        if num_top is not None and num_top < 0:
            raise ColdpressError(f"logprobs is {num_top}, expected a whole number of at least 0, or None")
        codec = self._known_codec() if isinstance(prompt, str) or stop else self._codec
        ids = codec.encode(prompt) if codec and isinstance(prompt, str) else token_array(_ids(prompt)).tolist()
        return _Run(ids, TextStream(codec, ids, stop) if codec else None, num_top, sampling)

    def _run_together(self, runs: Sequence["_Run"], max_new_tokens: int, ignore_eos: bool) -> None:
        decoder = self._session.decoder
        for run in runs:
            decoder.check_tokens(np.array(run.ids, np.int64))
        lengths = [len(run.ids) + max_new_tokens for run in runs]
        if not lengths:
            return
        most = 1 if decoder.sees_residency else FEW_TOKENS
        room = Room(1, max(lengths), max(lengths)) if most == 1 else room_of(self._session, lengths, most)
        prompts = [Prompt(run.ids, run.sampling, on_logits=None if run.num_top is None else run.see) for run in runs]
        counted = [self._counted(run) for run in runs]

        def add(number: int, token: Token) -> bool:
            return counted[number](token)

        for _ in generate_each(self._session, prompts, max_new_tokens, room, ignore_eos=ignore_eos, on_token=add):
            pass

    def _counted(self, run: "_Run") -> "_Counting":
        return _Counting(run, self._cost)

    def _pieces(self, run: "_Run", max_new_tokens: int, ignore_eos: bool) -> Iterator[str]:
        add, text = self._counted(run), run.text
        assert text is not None
        steps = self._session.stream(run.ids, max_new_tokens, sampling=run.sampling, ignore_eos=ignore_eos)
        with closing(steps):
            for token in steps:
                ended = add(token)
                if run.piece:
                    yield run.piece
                if ended:
                    break
        if rest := text.remainder():
            yield rest


def _prompts_of(prompt: Text | Texts) -> tuple[list[Text], bool]:
    """Returns the prompts, and whether it is one alone."""
    if isinstance(prompt, str):
        return [prompt], True
    given = list(prompt)
    numbers = [isinstance(each, int | np.integer) for each in given]
    if given and all(numbers):
        return [[int(each) for each in given if isinstance(each, int | np.integer)]], True
    if any(numbers):
        raise ColdpressError("the prompts mix token ids and prompts, expected a text, token ids, or a list of these")
    return [each for each in given if not isinstance(each, int | np.integer)], False


def _ids(prompt: Text) -> Sequence[int]:
    assert not isinstance(prompt, str)
    return prompt


@dataclass
class _Cost:
    """What all runs cost so far."""

    prompt_tokens: int = 0
    new_tokens: int = 0
    decoded: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    read_bytes: int = 0
    hits: int = 0
    misses: int = 0

    def add(self, token: Token) -> None:
        """Adds a token's cost, which the first token of a pass carries for all."""
        self.new_tokens += 1
        self.read_bytes += token.read_bytes
        self.hits += token.hits
        self.misses += token.misses
        if token.pass_number:
            self.decoded += 1
            self.decode_s += token.seconds
        else:
            self.prefill_s += token.seconds


class _Run:
    """One prompt and what has followed it so far."""

    def __init__(self, ids: list[int], text: TextStream | None, num_top: int | None, sampling: Sampling) -> None:
        self.ids, self.text, self.num_top, self.sampling = ids, text, num_top, sampling
        self.token_ids, self.piece = list[int](), ""
        self._logprobs, self._logits = list[TokenLogprobs](), np.empty(0, np.float32)

    def see(self, position: int, logits: np.ndarray) -> None:
        """Keeps the logits that the next token is chosen from."""
        self._logits = logits[0]

    def add(self, token: Token) -> bool:
        """Adds a token, and returns whether a stop string was found."""
        self.token_ids.append(token.id)
        if self.num_top is not None:
            self._logprobs.append(logprobs_of(self._logits, token.id, self.num_top))
        self.piece = self.text.add(token.id) if self.text else ""
        return self.text is not None and self.text.stop is not None

    def completion(self, eos_ids: frozenset[int]) -> Completion:
        """Returns the ended run's result."""
        stop = self.text.stop if self.text else None
        return Completion(
            text=self.text.text() if self.text else "",
            token_ids=tuple(self.token_ids),
            prompt_token_ids=tuple(self.ids),
            finish_reason="stop" if stop is not None or self.token_ids[-1] in eos_ids else "length",
            stop=stop,
            logprobs=None if self.num_top is None else tuple(self._logprobs),
        )


class _Counting:
    """Adds tokens to a run, and their costs to the model's."""

    def __init__(self, run: _Run, cost: _Cost) -> None:
        self._run, self._cost = run, cost

    def __call__(self, token: Token) -> bool:
        if not self._run.token_ids:
            self._cost.prompt_tokens += len(self._run.ids)
        self._cost.add(token)
        return self._run.add(token)


def load(path: str | Path, dram: str | int | None = None, *, identity: str | None = None) -> Model:
    """Loads an artifact; see `Model`."""
    return Model(path, dram, identity=identity)
