"""Test text decoded through selector, cache and flash, and whether simulated flash makes of its first tokens what the
run made of them."""

from dataclasses import dataclass

import numpy as np

from coldpress.compiler.stages.verify.divergence import Watch
from coldpress.compiler.stages.verify.ladder import climb
from coldpress.runtime.generate.likelihood import Quality
from coldpress.runtime.generate.session import DEFAULT_FLASH, Session
from coldpress.runtime.kernels import FEW_TOKENS
from coldpress.runtime.simulate import simulate
from coldpress.runtime.trace import Recorder
from coldpress.schemas.metrics import LadderStep, RunMetrics
from coldpress.schemas.model import Model

MAX_TOKENS = 128
"""Decoded tokens that are compared: past the point where a cache is full and evicts, and what the store was asked for
fits in memory."""
FEWEST_TOKENS = 2
"""Of a ladder: half of them fill the caches."""
DECISIONS = ("hits", "misses", "evictions", "reads", "read_bytes", "used_bytes", "prefill_reads", "prefill_read_bytes")
"""What must not depend on whether flash is real or simulated; the digest over all extents joins them."""


class Replayed:
    """A session whose first tokens can be held against simulated flash."""

    def __init__(self, folder: str, flash: str = DEFAULT_FLASH) -> None:
        """Opens the artifact; `session` is to run once, with this as its `on_logits`."""
        self._recorder = Recorder(max_tokens=MAX_TOKENS)
        self.session = Session(folder, recorder=self._recorder, flash=flash, modelled=True)  # for the report
        self._decisions: dict[str, object] = {}
        self._done = False

    def __call__(self, logits: np.ndarray) -> None:
        """Keeps what has been decided until now, unless the last of these tokens is behind."""
        if not self._done:
            self._decisions = _decisions(self.session.store.metrics(self._recorder.num_tokens, 0.0, 0.0, 0.0))
            self._done = self._recorder.full

    def equals(self) -> bool:
        """Whether hits, misses, evictions, bytes and the extents of all reads are the same."""
        simulated = simulate(self.session.artifact, self.session.plan, self._recorder.events)
        return self._decisions == _decisions(simulated)

    def ladder(self, model: Model) -> tuple[LadderStep, ...]:
        """What each mechanism brings to them; nothing where other settings would have had other requests. `model` is
        the one that was packed."""
        if self.session.decoder.sees_residency or self._recorder.num_tokens < FEWEST_TOKENS:
            return ()
        return climb(self.session.artifact, self.session.plan, self._recorder.events, model)


@dataclass(frozen=True)
class Decoded:
    """What decoding test text through the store gave."""

    quality: Quality
    run: RunMetrics
    """Of tokens that were decoded one by one."""
    simulated_equals_real: bool
    ladder: tuple[LadderStep, ...]
    """What each mechanism brings to the tokens that were compared."""
    tokens_per_s: tuple[float, ...]
    """Measured speed of `run`, block by block."""


def decode(folder: str, model: Model, blocks: np.ndarray, watch: Watch, some_at_once: bool) -> Decoded:
    """Decodes all blocks, with each token's own units.

    Args:
        folder: The artifact.
        model: Whose weights it has.
        blocks: int32 [num_blocks, block_tokens].
        watch: Sees all logits.
        some_at_once: Only the first `MAX_TOKENS` go one by one and tell what a run takes; then several tokens share a
            pass, which reads what any of them uses once. Not where the choice of units sees what is in DRAM.
    """
    replayed = Replayed(folder)
    session = replayed.session

    def on_logits(logits: np.ndarray) -> None:
        watch(logits)
        replayed(logits)

    if session.plan.collapse == "adaptive":
        replayed = adapting(folder, blocks)
    if some_at_once and not session.decoder.sees_residency:
        alone = session.perplexity(first_of(blocks), sparse=True, on_logits=replayed)
        equal = replayed.equals()
        quality = session.perplexity(blocks, sparse=True, tokens_per_pass=FEW_TOKENS, on_logits=watch)
    else:
        alone = quality = session.perplexity(blocks, sparse=True, on_logits=on_logits)
        equal = replayed.equals()
    return Decoded(quality, alone.metrics, equal, replayed.ladder(model), alone.block_tokens_per_s)


def adapting(folder: str, blocks: np.ndarray) -> Replayed:
    """A run of a plan that adapts to what reads cost, in modelled seconds: measured ones are never the same again."""
    replayed = Replayed(folder, flash="simulated")
    replayed.session.perplexity(first_of(blocks), sparse=True, on_logits=replayed)
    return replayed


def first_of(blocks: np.ndarray) -> np.ndarray:
    """So much of the first blocks that `MAX_TOKENS` are decoded one by one: of a block all but the first and last."""
    return blocks[: -(-MAX_TOKENS // (blocks.shape[1] - 2)), : MAX_TOKENS + 2]


def _decisions(metrics: RunMetrics) -> dict[str, object]:
    return {name: getattr(metrics, name) for name in (*DECISIONS, "extents_sha256")}
