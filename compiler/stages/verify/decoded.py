"""Decodes test text through selector, cache and flash, and checks that simulated flash makes the same decisions for its
first tokens."""

from dataclasses import dataclass

import numpy as np

from coldpress.compiler.stages.verify.divergence import SourceComparison
from coldpress.compiler.stages.verify.ladder import climb
from coldpress.runtime.generate.likelihood import Quality
from coldpress.runtime.generate.session import DEFAULT_FLASH, Session
from coldpress.runtime.kernels import FEW_TOKENS
from coldpress.runtime.simulate import simulate
from coldpress.runtime.trace import Recorder
from coldpress.schemas.layout import Plan
from coldpress.schemas.metrics import LadderStep, RunMetrics
from coldpress.schemas.model import Model

MAX_TOKENS = 128
"""Decoded tokens that are compared: enough for caches to fill and evict, and few enough for the recorded requests to
fit in memory."""
FEWEST_TOKENS = 2
"""The fewest tokens for a ladder: half of them fill the caches."""
DECISIONS = ("hits", "misses", "evictions", "reads", "read_bytes", "used_bytes", "prefill_reads", "prefill_read_bytes")
"""Figures that must be equal for real and simulated flash; the digest over all extents joins them."""


class Replayed:
    """A session whose first tokens can be compared with simulated flash."""

    def __init__(self, folder: str, flash: str = DEFAULT_FLASH, plan: Plan | None = None) -> None:
        """Opens the artifact, under its largest plan or `plan`; run `session` once, with this object as its
        `on_logits`."""
        self._recorder = Recorder(max_tokens=MAX_TOKENS)
        # modelled for the report
        self.session = Session(folder, plan=plan, recorder=self._recorder, flash=flash, modelled=True)
        self._decisions: dict[str, object] = {}
        self._done = False

    def __call__(self, logits: np.ndarray) -> None:
        """Updates the recorded decisions, until the last of the compared tokens is decoded."""
        if not self._done:
            self._decisions = _decisions(self.session.store.metrics(self._recorder.num_tokens, 0.0, 0.0, 0.0))
            self._done = self._recorder.full

    def equals(self) -> bool:
        """Tells whether hits, misses, evictions, bytes and the extents of all reads equal the simulation's."""
        simulated = simulate(self.session.artifact, self.session.plan, self._recorder.events)
        return self._decisions == _decisions(simulated)

    def ladder(self, model: Model) -> tuple[LadderStep, ...]:
        """Returns the gain of each mechanism on these tokens; none if other settings would change the requests. `model`
        is the packed model."""
        if self.session.decoder.sees_residency or self._recorder.num_tokens < FEWEST_TOKENS:
            return ()
        return climb(self.session.artifact, self.session.plan, self._recorder.events, model)


@dataclass(frozen=True)
class Decoded:
    """Results of decoding test text through the store."""

    quality: Quality
    run: RunMetrics
    """Metrics of the tokens that were decoded one by one."""
    simulated_equals_real: bool
    ladder: tuple[LadderStep, ...]
    """The gain of each mechanism on the compared tokens."""
    tokens_per_s: tuple[float, ...]
    """Measured speed of `run`, block by block."""


def decode(
    folder: str,
    model: Model,
    blocks: np.ndarray,
    watch: SourceComparison,
    some_at_once: bool,
    plan: Plan | None = None,
) -> Decoded:
    """Decodes all blocks, each token with its own units.

    Args:
        folder: The artifact.
        model: The model whose weights the artifact has.
        blocks: int32 [num_blocks, block_tokens].
        watch: Receives all logits.
        some_at_once: Decodes only the first `MAX_TOKENS` one by one, to measure a run; then several tokens share a
            pass, which reads each unit used by any of them once. Ignored if the selector sees what is in DRAM.
        plan: The plan to decode with; None for the artifact's largest, the only one whose mechanisms are compared.
    """
    replayed = Replayed(folder, plan=plan)
    session = replayed.session

    def on_logits(logits: np.ndarray) -> None:
        watch(logits)
        replayed(logits)

    if session.plan.collapse == "adaptive":
        replayed = adapting(folder, blocks, plan)
    if some_at_once and not session.decoder.sees_residency:
        alone = session.perplexity(first_of(blocks), sparse=True, on_logits=replayed)
        equal = replayed.equals()
        quality = session.perplexity(blocks, sparse=True, tokens_per_pass=FEW_TOKENS, on_logits=watch)
    else:
        alone = quality = session.perplexity(blocks, sparse=True, on_logits=on_logits)
        equal = replayed.equals()
    steps = replayed.ladder(model) if plan is None else ()
    return Decoded(quality, alone.metrics, equal, steps, alone.block_tokens_per_s)


def adapting(folder: str, blocks: np.ndarray, plan: Plan | None = None) -> Replayed:
    """Runs a plan that adapts to the cost of reads, in modelled seconds, since measured ones never repeat."""
    replayed = Replayed(folder, flash="simulated", plan=plan)
    replayed.session.perplexity(first_of(blocks), sparse=True, on_logits=replayed)
    return replayed


def first_of(blocks: np.ndarray) -> np.ndarray:
    """Cuts the first blocks to `MAX_TOKENS` tokens decoded one by one: all but the first and last of a block."""
    return blocks[: -(-MAX_TOKENS // (blocks.shape[1] - 2)), : MAX_TOKENS + 2]


def _decisions(metrics: RunMetrics) -> dict[str, object]:
    return {name: getattr(metrics, name) for name in (*DECISIONS, "extents_sha256")}
