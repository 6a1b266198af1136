"""Several sequences generated at once: a pass decodes one token of each, and what any of them uses is read once.

A pass asks the store for the union of what its tokens select, so that a batch reads more than one sequence does, and
per token less; what is left of sparsity shrinks as the batch grows (PowerInfer 8.2, Fig. 14). Each sequence has a KV
cache, settings and an end of its own, and the tokens that it has alone: to the bit where everything is in DRAM, else up
to the rounding of sums, whose terms come in the order in which units arrive. Prompts are prefilled one by one.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from runtime._sampling import Chooser, Sampling
from runtime.generate import Session, token_array
from runtime.kernels import FEW_TOKENS
from runtime.model.decoder import Decoder
from runtime.token_statistics import Token
from schemas.errors import ColdpressError
from schemas.metrics import RunMetrics

OnToken = Callable[[int, Token], bool | None]
"""(sequence, its new token) -> whether the sequence ends behind it."""


@dataclass(frozen=True)
class Batch:
    """What became of some prompts, in their order."""

    sequences: tuple[tuple[Token, ...], ...]
    """New tokens of each. Those of one pass have its number; the first of them has what the pass took, the others
    nothing."""
    metrics: RunMetrics
    """Of all of them together."""

    @property
    def decoded(self) -> list[Token]:
        """Those that were decoded, which the first of each sequence is not, pass by pass."""
        behind_first = (token for tokens in self.sequences for token in tokens[1:])
        return sorted(behind_first, key=lambda token: token.pass_number)


def generate_batch(
    session: Session,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    sampling: Sequence[Sampling] | None = None,
    ignore_eos: bool = False,
    on_token: OnToken | None = None,
) -> Batch:
    """Continues several prompts at once.

    Args:
        session: Not in use.
        prompts: One to FEW_TOKENS of them, each of at least one token id.
        max_new_tokens: Of each sequence, at least 1.
        sampling: One for each prompt; None is greedy for all.
        ignore_eos: Go on behind end-of-sequence tokens.
        on_token: Called with every new token as soon as it is known; its time is not counted. The sequence ends behind
            a token for which it gives True.

    Raises:
        ColdpressError: as `Session.generate`; for more prompts; or for several under a selector that sees what is in
            DRAM, which would pick other units for them than for each alone.
        DoesNotFitError: if a sequence exceeds the plan's context, or the DRAM budget cannot hold all KV caches.
        CorruptPageError: if a page of flash.img is damaged.
    """
    _check(session, prompts, max_new_tokens, sampling)
    stop_ids = frozenset(() if ignore_eos else session.decoder.spec.eos_token_ids)
    settings = sampling or [Sampling()] * len(prompts)
    arrays = [token_array(prompt) for prompt in prompts]
    run = _Run(session.decoder, max_new_tokens, stop_ids, on_token)
    with session.batch([len(prompt) + max_new_tokens for prompt in prompts]) as timer:
        for prompt, its in zip(arrays, settings, strict=True):
            with session.step, timer.prefill():
                first = run.begin(prompt, Chooser(its, prompt.tolist()))
            run.take([len(run.tokens) - 1], timer.tokens([first]))
        while run.active:
            with session.step, timer.decode():
                chosen = run.step()
            run.take(list(run.active), timer.tokens(chosen))
        return Batch(tuple(map(tuple, run.tokens)), timer.metrics(session.store))


class _Run:
    """Sequences under way, by their numbers."""

    def __init__(
        self, decoder: Decoder, max_new_tokens: int, stop_ids: frozenset[int], on_token: OnToken | None
    ) -> None:
        self.active: list[int] = []
        self.tokens: list[list[Token]] = []
        self._choosers: list[Chooser] = []
        self._decoder, self._on_token = decoder, on_token
        self._max_new_tokens, self._stop_ids = max_new_tokens, stop_ids

    def begin(self, prompt: np.ndarray, chooser: Chooser) -> int:
        """The first token of one more sequence."""
        number = len(self.tokens)
        self.tokens.append([])
        self._choosers.append(chooser)
        self.active.append(number)
        return chooser.choose(self._decoder.prefill_last(prompt, number))

    def step(self) -> list[int]:
        """The next token of each active sequence."""
        last = np.array([self.tokens[number][-1].id for number in self.active])
        logits = self._decoder.decode_each(last, self.active)
        return [self._choosers[number].choose(row) for number, row in zip(self.active, logits, strict=True)]

    def take(self, numbers: Sequence[int], tokens: Iterable[Token]) -> None:
        """Hands out a token of each of these sequences; one that ends with it gives its KV cache back."""
        for number, token in zip(numbers, tokens, strict=True):
            self.tokens[number].append(token)
            told = self._on_token(number, token) if self._on_token else None
            if told or token.id in self._stop_ids or len(self.tokens[number]) == self._max_new_tokens:
                self.active.remove(number)
                self._decoder.end(number)


def _check(
    session: Session, prompts: Sequence[Sequence[int]], max_new_tokens: int, sampling: Sequence[Sampling] | None
) -> None:
    """Refuses what no batch is."""
    if not 1 <= len(prompts) <= FEW_TOKENS:
        raise ColdpressError(
            f"{len(prompts)} prompts are to be continued at once, expected 1 to {FEW_TOKENS}; run them in turns"
        )
    if sampling is not None and len(sampling) != len(prompts):
        raise ColdpressError(f"{len(sampling)} settings of sampling came with {len(prompts)} prompts, expected as many")
    if max_new_tokens < 1:
        raise ColdpressError(f"the number of new tokens is {max_new_tokens}, expected at least 1")
    if len(prompts) > 1:
        session.decoder.check_many()
