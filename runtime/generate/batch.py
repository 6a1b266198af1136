"""Generates several sequences at once: a pass decodes one token of each, and reads each unit once for all of them.

A pass asks the store for the union of the units that its tokens select. So a batch reads more than one sequence does,
but less per token; the larger the batch, the less sparsity is left (PowerInfer 8.2, Fig. 14). Each sequence has its own
KV cache, settings and end. A sequence gets the same tokens as alone: bit-identical logits where everything is in DRAM,
else equal up to the rounding of sums, since units arrive in another order. Prompts that begin together share a dense
pass over flash. Drafts (runtime/generate/speculation.py) share the passes, too: they fill a pass up to the length of
one sequence with all drafts of its plan.

There may be any number of prompts. The next ones begin when slots of the batch are free (as in Orca, Yu et al. 2022),
their keys and values have room, and waiting for more prompts to share a dense pass costs more than the pass
(runtime/generate/admission.py). A source of prompts that come while others run, such as a server's queue, yields None
when none waits; it is asked again before the next pass.
"""

import heapq
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import InitVar, dataclass, field
from functools import partial

import numpy as np

from coldpress.runtime.decoder.decoder import PREFILL_CHUNK_TOKENS, packed
from coldpress.runtime.drafts import DRAFT_TOKENS, Drafting
from coldpress.runtime.drafts.off import nothing
from coldpress.runtime.generate.admission import Admission, AtOnce
from coldpress.runtime.generate.prefixes import Prefixes
from coldpress.runtime.generate.sampling import Chooser, Sampling
from coldpress.runtime.generate.session import Session
from coldpress.runtime.generate.speculation import Drafts, Pass, Turn, decode
from coldpress.runtime.generate.statistics import Timer, Token
from coldpress.runtime.generate.token_ids import token_array
from coldpress.runtime.kernels import FEW_TOKENS
from coldpress.schemas.errors import ColdpressError, DoesNotFitError
from coldpress.schemas.metrics import RunMetrics

OnToken = Callable[[int, Token], bool | None]
"""(number of the prompt, its new token) -> whether the sequence ends after this token."""
OnLogits = Callable[[int, np.ndarray], None]
"""(position, logits float32 [n, vocab_size]): the logits that follow the tokens at `position` and the n - 1 after it;
position 0 is the prompt's first token. They are valid during the call."""


@dataclass(frozen=True)
class Prompt:
    ids: Sequence[int]
    """At least one token id."""
    sampling: Sampling = field(default_factory=Sampling)
    max_new_tokens: int | None = None
    """None for the run's."""
    on_logits: OnLogits | None = None
    """Called with the logits that each new token is chosen from, before the token is told."""
    scores_prompt: bool = False
    """True if `on_logits` is also called with the logits that follow each of the prompt's tokens."""
    is_left: Callable[[], bool] | None = None
    """Called before each pass of the prefill: True stops it, and `on_token` must then end the sequence at its first
    token, which is meaningless."""
    on_error: Callable[[ColdpressError], None] | None = None
    """Called if this sequence's logits are not finite; `on_token` must then end it at its next token, which is
    meaningless. None: all sequences fail."""


@dataclass(frozen=True)
class BatchRoom:
    sequences: int
    """1 to FEW_TOKENS."""
    longest: int
    """Most tokens of one sequence, prompt and new tokens together."""
    num_tokens: int
    """Most tokens of all running sequences together."""


@dataclass(frozen=True)
class Batch:
    """The continuations of several prompts, in the order of the prompts."""

    sequences: tuple[tuple[Token, ...], ...]
    """New tokens of each sequence. Tokens of one pass share its number; the first of them carries the cost of the pass,
    the others no cost."""
    metrics: RunMetrics

    @property
    def decoded(self) -> list[Token]:
        """Returns the decoded tokens, pass by pass, without each sequence's first, which comes from the prefill."""
        behind_first = (token for tokens in self.sequences for token in tokens[1:])
        return sorted(behind_first, key=lambda token: token.pass_number)


def generate_batch(
    session: Session,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    sampling: Sequence[Sampling] | None = None,
    ignore_eos: bool = False,
    draft: Drafting | None = None,
    draft_tokens: int = DRAFT_TOKENS,
    on_token: OnToken | None = None,
) -> Batch:
    """Continues several prompts at once.

    Args:
        prompts: One to FEW_TOKENS prompts, each of at least one token id.
        max_new_tokens: New tokens of each sequence, at least 1.
        sampling: Settings for each prompt; None is greedy for all.
        ignore_eos: Go on after end-of-sequence tokens.
        draft, draft_tokens: As in `generate_each`.
        on_token: Called with every new token as soon as it is known; its time is not counted. The sequence ends after
            a token for which it returns True.

    Raises:
        ColdpressError: as `Session.generate`; for more prompts than FEW_TOKENS; or for several prompts under a selector
            that sees what is in DRAM, which would choose other units for them than for each alone.
        DoesNotFitError: if a sequence exceeds the plan's context, or the DRAM budget cannot hold all KV caches.
        CorruptPageError: if a page of flash.img is damaged.
    """
    if sampling is not None and len(sampling) != len(prompts):
        raise ColdpressError(f"{len(sampling)} settings of sampling came with {len(prompts)} prompts, expected as many")
    settings = sampling or [Sampling()] * len(prompts)
    lengths = [len(prompt) + max_new_tokens for prompt in prompts]
    room = BatchRoom(len(prompts), max(lengths, default=0), sum(lengths))
    each = map(Prompt, prompts, settings)
    steps = generate_each(
        session,
        each,
        max_new_tokens,
        room,
        ignore_eos=ignore_eos,
        draft=draft,
        draft_tokens=draft_tokens,
        on_token=on_token,
    )
    found = list[tuple[Token, ...]]()
    while True:
        try:
            found.append(next(steps))
        except StopIteration as done:
            return Batch(tuple(found), done.value)


def room_of(session: Session, lengths: Iterable[int], most: int = FEW_TOKENS) -> BatchRoom:
    """Returns the limits with which `session` can run sequences of these lengths, in tokens, at most `most` at once:
    the DRAM budget must hold the KV caches of the longest ones together. Raises `ColdpressError` if there is no
    sequence."""
    longest = heapq.nlargest(most, lengths)
    if not longest:
        raise ColdpressError("there are no prompts to continue, expected at least one; give a prompt")
    while len(longest) > 1 and not session.has_kv_room(sum(longest)):
        longest.pop()
    return BatchRoom(len(longest), longest[0], sum(longest))


def generate_each(
    session: Session,
    prompts: Iterable[Prompt | None],
    max_new_tokens: int,
    room: BatchRoom,
    *,
    ignore_eos: bool = False,
    draft: Drafting | None = None,
    draft_tokens: int = DRAFT_TOKENS,
    on_token: OnToken | None = None,
    at_once: bool = False,
    prefixes: Prefixes | None = None,
) -> Generator[tuple[Token, ...], None, RunMetrics]:
    """Continues any number of prompts, as many at once as have room, in bounded memory.

    Yields the new tokens of each prompt, in the order of the prompts, as soon as they and those before them have ended;
    returns the metrics of all sequences together. Raises as `generate_batch`.

    Args:
        session: Must be free at the start; it is in use until the last sequence has ended or the generator is closed.
        prompts: Taken one by one as slots of the batch become free; the iterator may call `session.resize`. None
            stands for no prompt at present, and has no number; it ends the run if no sequence runs.
        max_new_tokens: New tokens of each sequence, at least 1.
        ignore_eos, on_token: As in `generate_batch`; prompts are numbered from 0.
        draft, draft_tokens: As in `Session.generate`, for a sequence that runs alone. A sequence that the draft model's
            KV cache has no room for beside the others runs without drafts.
        at_once: Whether waiting prompts begin after one decoding pass at most, whatever that costs (`AtOnce`).
        prefixes: Where the keys and values of prompts are kept and found; None for nowhere.
    """
    _check(session, room, max_new_tokens)
    stop_ids = frozenset(() if ignore_eos else session.decoder.spec.eos_token_ids)
    with session.batch(room.longest, room.num_tokens) as timer:
        admission = AtOnce() if at_once else Admission(PREFILL_CHUNK_TOKENS)
        draft, most_drafts = session.checked_draft(draft, draft_tokens)
        run = _Run(session, prompts, max_new_tokens, room, stop_ids, on_token, admission, prefixes, draft, most_drafts)
        with closing(run):
            while True:
                begun = run.admit()
                if begun:
                    with session.step, timer.prefill():
                        found = run.prefill(begun)
                elif run.active:
                    with session.step, timer.decode():
                        found = run.step()
                else:
                    return session.with_drafts(draft, timer.metrics(session.store))
                run.take(found, timer)
                yield from run.ended()


@dataclass(frozen=True)
class _Found:
    """A sequence's part in a step: its new tokens, and the logits that they were chosen from, float32 [T, V]."""

    place: int
    added: Pass
    logits: np.ndarray


@dataclass
class _Sequence:
    """A running sequence, or an ended one whose tokens wait for an earlier prompt to end."""

    number: int
    prompt: np.ndarray
    """int64 [n]."""
    chooser: Chooser
    max_new_tokens: int
    asked: Prompt
    ids: list[int]
    """All tokens so far, prompt included."""
    drafts: Drafts = field(default_factory=lambda: Drafts(nothing))
    ended: ExitStack = field(default_factory=ExitStack)
    """Ends the drafts."""
    has_failed: bool = False
    tokens: list[Token] = field(default_factory=list[Token])
    restored: int = 0
    """Tokens of the prompt that were not computed."""
    arithmetic: str = ""
    """`Decoder.arithmetic` at its prefill: `resize` may change the plan before the sequence ends."""


@dataclass
class _Run:
    session: Session
    prompts: InitVar[Iterable[Prompt | None]]
    max_new_tokens: int
    room: BatchRoom
    stop_ids: frozenset[int]
    on_token: OnToken | None
    admission: Admission | AtOnce
    prefixes: Prefixes | None
    draft: Drafting
    most_drafts: int
    """Drafts in a pass of a sequence that runs alone."""

    def __post_init__(self, prompts: Iterable[Prompt | None]) -> None:
        self.active: dict[int, _Sequence] = {}
        self._ended: dict[int, _Sequence] = {}
        self._num_given = 0
        self._waiting = self._prepared(prompts)
        self._next = next(self._waiting, None)

    def close(self) -> None:
        for sequence in self.active.values():
            sequence.ended.close()

    def _prepared(self, prompts: Iterable[Prompt | None]) -> Iterator[_Sequence | None]:
        number = 0
        for prompt in prompts:
            if prompt is None:
                yield None
                continue
            ids, most = token_array(prompt.ids), prompt.max_new_tokens or self.max_new_tokens
            yield _Sequence(number, ids, Chooser(prompt.sampling, ids.tolist()), most, prompt, ids.tolist())
            number += 1

    def admit(self) -> list[int]:
        """Begins the next sequences if they have room, and returns their places in the decoder.

        It holds the session's `step` only while it calls the decoder: taking the next prompt from the caller's iterator
        may block, or call `session.resize`, which takes `step`.
        """
        free, begun = [place for place in range(self.room.sequences) if place not in self.active], list[int]()
        if free and self._next is None:
            self._next = next(self._waiting, None)  # there may be one by now
        if self._next is None or not free:
            return begun
        if self.active and not self.admission.pays(len(free) * len(self._next.prompt)):
            return begun
        if not self.active:
            with self.session.step:
                self.session.decoder.begin_batch([0] * self.room.sequences)
        used = sum(self._num_tokens(sequence) for sequence in self.active.values())
        for place in free:
            if self._next is None:
                break
            used += self._num_tokens(self._next)
            if self.active and used > self.room.num_tokens:
                break
            with self.session.step:
                self.session.decoder.renew(place, self._num_tokens(self._next))
                with suppress(DoesNotFitError):  # it runs without drafts
                    drafting = self.session.drafting(self.draft, self._num_tokens(self._next))
                    self._next.drafts = Drafts(self._next.ended.enter_context(drafting))
            self.active[place], self._next = self._next, next(self._waiting, None)
            begun.append(place)
        return begun

    def _num_tokens(self, sequence: _Sequence) -> int:
        return len(sequence.prompt) + sequence.max_new_tokens

    def prefill(self, places: Sequence[int]) -> list[_Found]:
        for place in places:
            self._restore(place)
        prompts = [self.active[place].prompt[self.active[place].restored :] for place in places]
        watched = {
            number: on_logits
            for number, place in enumerate(places)
            if (on_logits := self.active[place].asked.on_logits) and self.active[place].asked.scores_prompt
        }

        def is_left(number: int) -> bool:
            asked = self.active[places[number]].asked.is_left
            return asked is not None and asked()

        logits = self.session.decoder.prefill_each(prompts, places, watched, is_left)
        chosen = [self._choose(self.active[place], row) for place, row in zip(places, logits, strict=True)]
        return [
            _Found(*each) for each in zip(places, [Pass((one,), 0) for one in chosen], logits[:, None], strict=True)
        ]

    def _restore(self, place: int) -> None:
        """Restores the beginning of a prompt that was kept; a scored prompt needs the logits of all its tokens."""
        sequence = self.active[place]
        sequence.arithmetic = self.session.decoder.arithmetic
        if self.prefixes and not sequence.asked.scores_prompt:
            cache = self.session.decoder.kv_cache(place)
            sequence.restored = self.prefixes.restore(cache, sequence.prompt, sequence.arithmetic)

    def step(self) -> list[_Found]:
        most = (1 + self.most_drafts) // len(self.active) - 1
        turns = [self._turn(place, sequence, most) for place, sequence in self.active.items()]
        found = zip(turns, decode(self.session.decoder, turns), strict=True)
        return [_Found(turn.sequence, *each) for turn, each in found]

    def _turn(self, place: int, sequence: _Sequence, most: int) -> Turn:
        left = sequence.max_new_tokens - len(sequence.tokens)
        return Turn(place, sequence.ids, sequence.drafts, min(most, left - 1), partial(self._choose, sequence))

    def _choose(self, sequence: _Sequence, row: np.ndarray) -> int:
        try:
            return sequence.chooser.choose(row)
        except ColdpressError as error:
            if sequence.asked.on_error is None:
                raise
            sequence.has_failed = True
            sequence.asked.on_error(error)
            return 0

    def take(self, found: Sequence[_Found], timer: Timer) -> None:
        """Adds new tokens to their sequences; a sequence that ends frees its place and its KV cache."""
        self._note([one.place for one in found], timer.last)
        for number, one in enumerate(found):
            tokens = timer.tokens(one.added.token_ids, one.added.drafted, leads=number == 0)
            for token, row in zip(tokens, one.logits, strict=False):
                if self._take(one.place, token, row):
                    break

    def _take(self, place: int, token: Token, row: np.ndarray) -> bool:
        """Adds a token to a sequence; returns whether it ends the sequence."""
        sequence = self.active[place]
        asked = sequence.asked
        if asked.on_logits and not (asked.scores_prompt and not sequence.tokens):
            asked.on_logits(len(sequence.ids) - 1, row[None])
        sequence.tokens.append(token)
        sequence.ids.append(token.id)
        told = self.on_token(sequence.number, token) if self.on_token else None
        has_ended = bool(told) or token.id in self.stop_ids or len(sequence.tokens) == sequence.max_new_tokens
        if has_ended:
            self._end(place)
        return has_ended

    def _end(self, place: int) -> None:
        sequence = self.active.pop(place)
        self._ended[sequence.number] = sequence
        sequence.ended.close()
        cache = self.session.decoder.kv_cache(place)
        is_whole = cache.length >= len(sequence.prompt) and not sequence.has_failed  # no, if the prefill was stopped
        if self.prefixes and is_whole:
            # only now: nobody waits for a token of this sequence
            self.prefixes.save(cache, sequence.prompt, sequence.arithmetic)
        self.session.decoder.end(place)

    def _note(self, places: Sequence[int], cost: Token) -> None:
        """Notes the seconds of the step that gave each sequence at `places` tokens."""
        if cost.pass_number:
            return self.admission.decoded(len(places), cost.seconds, idle=len(places) < self.room.sequences)
        lengths = [len(self.active[place].prompt) - self.active[place].restored for place in places]
        self.admission.prefilled(sum(1 for _ in packed(lengths)), cost.seconds)

    def ended(self) -> Iterator[tuple[Token, ...]]:
        """Yields the tokens of the next prompts in order, up to the first prompt that has not ended."""
        while self._num_given in self._ended:
            yield tuple(self._ended.pop(self._num_given).tokens)
            self._num_given += 1


def _check(session: Session, room: BatchRoom, max_new_tokens: int) -> None:
    if not 1 <= room.sequences <= FEW_TOKENS:
        raise ColdpressError(
            f"{room.sequences} prompts are to be continued at once, expected 1 to {FEW_TOKENS}; run them in turns"
        )
    if max_new_tokens < 1:
        raise ColdpressError(f"the number of new tokens is {max_new_tokens}, expected at least 1")
    if room.sequences > 1:
        session.decoder.selection.check_batch()
