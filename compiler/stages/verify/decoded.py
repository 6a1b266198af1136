"""Decodes test text through selector, cache and flash, and checks that simulated flash makes the same decisions for its
first tokens.

Of much text only the first tokens are decoded one by one, as a user's are; reads, hits and seconds are theirs. The
others share passes, in which each token has the units that its selector picks for it. A selector that sees what is in
DRAM picks for one token after the other, so its blocks are divided among LANES runs side by side, each with a cache of
its own: the first run begins as an artifact is opened, the others after WARMING tokens of the block before theirs. The
number of cores changes no figure.

Nothing drafts for given text. So a plan with a draft of its own also continues the text greedily, as a user's run does,
and its drafts that the model accepts are counted pass by pass; and once more without drafts, to tell whether both write
the same tokens. Flash is simulated, so that no figure depends on a machine or its load.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from coldpress.compiler.block_statistics import perplexity
from coldpress.compiler.device.memory import free_dram_bytes
from coldpress.compiler.stages.verify.divergence import SourceComparison
from coldpress.compiler.stages.verify.ladder import climb
from coldpress.compiler.steps import Steps
from coldpress.runtime.artifact.reader import open_artifact
from coldpress.runtime.decoder.decoder import PREFILL_CHUNK_TOKENS
from coldpress.runtime.drafts import NO_DRAFT, Draft, Drafting
from coldpress.runtime.dram.budget import choose_plan, holds_everything
from coldpress.runtime.generate.choice import SIMULATED, draft_of
from coldpress.runtime.generate.likelihood import Quality
from coldpress.runtime.generate.session import DEFAULT_FLASH, Session
from coldpress.runtime.generate.statistics import Token
from coldpress.runtime.plugins import load
from coldpress.runtime.simulate import simulate
from coldpress.runtime.store.counters import DECODING
from coldpress.runtime.store.facts import Observer, Purpose
from coldpress.runtime.store.planner import ReadBatch
from coldpress.runtime.trace import Recorder
from coldpress.schemas.layout import Plan, by_budget, placed_parts
from coldpress.schemas.manifest import Manifest
from coldpress.schemas.metrics import LadderStep, PlanDrafts, PlanFigures, ReadLength, RunMetrics
from coldpress.schemas.model import Model

STAGE = "verify"
MAX_TOKENS = 128
"""Decoded tokens that are compared: enough for caches to fill and evict, and few enough for the recorded requests to
fit in memory."""
MAX_DENSE_TOKENS = 32
"""The same for a dense plan: all its tokens make the same requests."""
LANES = 4
"""Runs side by side of a selector that sees what is in DRAM: as many at a time as cores and free memory allow."""
SESSIONS = 2
"""Sessions that are in memory at a time: the one that is measured, and one run."""
WARMING = 128
"""Tokens that fill a run's cache before its first block."""
FEWEST_TOKENS = 2
"""The fewest tokens for a ladder: half of them fill the caches."""
DECISIONS = ("hits", "misses", "evictions", "reads", "read_bytes", "used_bytes", "prefill_reads", "prefill_read_bytes")
"""Figures that must be equal for real and simulated flash; the digest over all extents joins them."""
PROMPT_TOKENS, NEW_TOKENS = 64, 64
"""Most tokens of the prompt, in which `lookup` finds what to propose, and of its continuation."""


class ReplayedSession:
    """A session whose first tokens can be compared with simulated flash."""

    def __init__(self, folder: str, flash: str = DEFAULT_FLASH, plan: Plan | None = None) -> None:
        """Opens the artifact under `plan` or its largest; run `session` once, with this object as its `on_logits`."""
        self.max_tokens = MAX_DENSE_TOKENS if is_dense(folder, plan) else MAX_TOKENS
        self._recorder, self.lengths = Recorder(max_tokens=self.max_tokens), ReadLengths()
        # modelled for the report
        watching = {"recorder": self._recorder, "observers": (self.lengths,)}
        self.session = Session(folder, plan=plan, flash=flash, modelled=True, **watching)
        self._decisions: dict[str, object] = {}
        self._done = False

    def __call__(self, logits: np.ndarray) -> None:
        if not self._done:
            self._decisions = _decisions(self.session.store.metrics(self._recorder.num_tokens, 0.0, 0.0, 0.0))
            self._done = self._recorder.full

    def equals(self) -> bool:
        """Tells whether hits, misses, evictions, bytes and the extents of all reads equal the simulation's."""
        simulated = simulate(self.session.artifact, self.session.plan, self._recorder.events)
        return self._decisions == _decisions(simulated)

    def ladder(self, model: Model) -> tuple[LadderStep, ...]:
        """Returns the gain of each mechanism on these tokens; none if other settings would change the requests."""
        if self.session.decoder.selection.sees_residency or self._recorder.num_tokens < FEWEST_TOKENS:
            return ()
        return climb(self.session.artifact, self.session.plan, self._recorder.events, model)


@dataclass(frozen=True)
class Decoded:
    block_nll: tuple[float, ...]
    """Mean negative log likelihood per token, in nats, of each block."""
    run: RunMetrics
    """Metrics of the tokens that were decoded one by one."""
    simulated_equals_real: bool
    ladder: tuple[LadderStep, ...]
    """The gain of each mechanism on the compared tokens."""
    tokens_per_s: tuple[float, ...]
    """Measured speed of `run`, block by block."""
    read_lengths: tuple[ReadLength, ...]


def decode(
    folder: str,
    model: Model,
    blocks: np.ndarray,
    watch: SourceComparison,
    much: bool,
    threads: int = 1,
    plan: Plan | None = None,
) -> Decoded:
    """Decodes all blocks, int32 [num_blocks, block_tokens], each token with its own units; with `much` text only the
    first tokens one by one, in one run. `plan` is None for the artifact's largest, the only one whose mechanisms are
    compared."""
    replayed = ReplayedSession(folder, plan=plan)
    session, lengths, adapts = replayed.session, replayed.lengths, replayed.session.plan.collapse == "adaptive"

    def on_logits(logits: np.ndarray) -> None:
        watch(logits)
        replayed(logits)

    if adapts:
        replayed = adapting(folder, blocks, plan)
    if not much:
        alone = _watched(session, blocks, on_logits)
        read_lengths, block_nll = lengths.found(), alone.block_nll
    else:
        alone = session.perplexity(first_of(blocks, replayed.max_tokens), sparse=True, on_logits=replayed)
        read_lengths = lengths.found()  # before the session decodes the other tokens
        if session.decoder.selection.sees_residency:
            # by measured seconds an adaptive gap would read, and so round sums, in another way each time
            flash = "simulated" if adapts else DEFAULT_FLASH
            affordable = free_dram_bytes() // (2 * session.plan.dram_budget_bytes)
            block_nll = _in_lanes(folder, blocks, watch, max(1, min(threads, affordable)), flash, plan)
        else:
            with watch.ahead() as compare:
                block_nll = _watched(session, blocks, compare, PREFILL_CHUNK_TOKENS).block_nll
    equal = replayed.equals()
    steps = replayed.ladder(model) if plan is None else ()
    return Decoded(block_nll, alone.metrics, equal, steps, alone.block_tokens_per_s, read_lengths)


def _watched(
    session: Session, blocks: np.ndarray, on_logits: Callable[[np.ndarray], None], tokens_per_pass: int = 1
) -> Quality:
    counted = _counted(on_logits, Steps(STAGE, blocks[:, 1:].size, "tokens"))
    return session.perplexity(blocks, sparse=True, tokens_per_pass=tokens_per_pass, on_logits=counted)


def _counted(on_logits: Callable[[np.ndarray], None], steps: Steps) -> Callable[[np.ndarray], None]:
    def counted(logits: np.ndarray) -> None:
        on_logits(logits)
        steps.add(len(logits))

    return counted


def _in_lanes(
    folder: str, blocks: np.ndarray, watch: SourceComparison, at_once: int, flash: str, plan: Plan | None
) -> tuple[float, ...]:
    """Decodes token after token in LANES runs; returns the blocks' mean nats per token."""
    steps = Steps(STAGE, blocks[:, 1:].size, "tokens")

    def run(own: np.ndarray) -> tuple[float, ...]:
        first = int(own[0])
        with Session(folder, plan=plan, flash=flash) as session:
            if first:
                session.perplexity(blocks[first - 1 : first, : WARMING + 2], sparse=True)
            counted = _counted(watch.begin(first), steps)
            return session.perplexity(blocks[own], sparse=True, on_logits=counted).block_nll

    lanes = [own for own in np.array_split(np.arange(len(blocks)), LANES) if own.size]
    with ThreadPoolExecutor(at_once) as pool:
        return tuple(nll for of_lane in pool.map(run, lanes) for nll in of_lane)


def adapting(folder: str, blocks: np.ndarray, plan: Plan | None = None) -> ReplayedSession:
    """Runs a plan that adapts to the cost of reads, in modelled seconds, since measured ones never repeat."""
    replayed = ReplayedSession(folder, flash="simulated", plan=plan)
    replayed.session.perplexity(first_of(blocks, replayed.max_tokens), sparse=True, on_logits=replayed)
    return replayed


def is_dense(folder: str, plan: Plan | None = None) -> bool:
    """Tells whether every token of a run uses every unit, under the artifact's largest plan or `plan`."""
    return (plan or choose_plan(open_artifact(folder).manifest)).method == "dense"


def first_of(blocks: np.ndarray, num_tokens: int) -> np.ndarray:
    """Cuts the first blocks to so many tokens decoded one by one: all but the first and last of a block."""
    return blocks[: -(-num_tokens // (blocks.shape[1] - 2)), : num_tokens + 2]


def _decisions(metrics: RunMetrics) -> dict[str, object]:
    return {name: getattr(metrics, name) for name in (*DECISIONS, "extents_sha256")}


class ReadLengths(Observer):
    """Counts reads, of requests and of preloading, as a store begins them."""

    def __init__(self) -> None:
        self._counts = Counter[int]()

    def began(self, purpose: Purpose, batch: ReadBatch) -> None:
        if purpose in DECODING:
            self._counts.update(batch.extents.lengths.tolist())

    def found(self) -> tuple[ReadLength, ...]:
        """Returns the reads so far, the shortest first."""
        reads, read_bytes = Counter[int](), Counter[int]()
        for length, count in self._counts.items():
            least = 1 << (length.bit_length() - 1)
            reads[least] += count
            read_bytes[least] += count * length
        return tuple(
            ReadLength(least_bytes=least, reads=reads[least], read_bytes=read_bytes[least]) for least in sorted(reads)
        )


def figures_of(
    manifest: Manifest, plan: Plan, decoded: Decoded, watch: SourceComparison, nll_source: Sequence[float]
) -> PlanFigures:
    """`watch` has received the plan's logits; `nll_source`: mean nats per token of each block, of the source."""
    run, artifact, source = decoded.run, np.array(decoded.block_nll), np.array(nll_source)
    ppl_artifact, error = perplexity(artifact)
    ratio, ratio_error = perplexity(artifact - source)
    parts = placed_parts(plan, manifest.flash.sections)
    total = sum(section.num_units * section.unit_bytes for _, section in parts)
    used = sum(part.density * section.num_units * section.unit_bytes for part, section in parts)
    return PlanFigures(
        plan=plan.name,
        dram_budget_bytes=run.dram_budget_bytes,
        dram_used_bytes=run.dram_used_bytes,
        method=plan.method,
        cache=plan.cache,
        density=used / total,
        holds_everything=holds_everything(plan, manifest.flash.sections),
        ppl_artifact=ppl_artifact,
        ppl_artifact_error=error,
        ppl_ratio=ratio,
        ppl_ratio_error=ratio_error,
        top1_agreement=watch.top1_agreement()[0],
        mean_kld=watch.divergence().mean_kld,
        reads_per_token=run.reads / run.num_tokens,
        flash_bytes_per_token=run.read_bytes / run.num_tokens,
        hit_rate=run.hit_rate,
        modelled_tokens_per_s=run.modelled_tokens_per_s,
        simulated_equals_real=decoded.simulated_equals_real,
    )


def drafts_of_all(folder: str, manifest: Manifest, block: np.ndarray) -> tuple[PlanDrafts, ...]:
    """Returns the figures of each plan that drafts, the largest budget first; the first tokens of `block`, int32
    [block_tokens] of test text, are the prompt."""
    _, *others = by_budget(manifest.plans)[::-1]
    plans = [choose_plan(manifest), *(choose_plan(manifest, plan.dram_budget_bytes) for plan in others)]
    return tuple(_measured(folder, plan, block) for plan in plans if draft_of(plan, manifest)[0].PROPOSES)


def _measured(folder: str, plan: Plan, block: np.ndarray) -> PlanDrafts:
    assert plan.draft is not None
    prompt = block[: min(PROMPT_TOKENS, plan.context_length // 2)].tolist()
    drafting = _continued(folder, plan, prompt, None)
    alone = _continued(folder, plan, prompt, load("coldpress.runtime.drafts", Draft, NO_DRAFT))
    decoded = drafting[1:]  # the prefill gives the first
    accepted = Counter(token.pass_number for token in decoded if token.accepted)
    leading = [token for token in decoded if token.leads]
    return PlanDrafts(
        plan=plan.name,
        draft=plan.draft,
        drafted=tuple(token.drafted for token in leading),
        accepted=tuple(accepted[token.pass_number] for token in leading),
        same_tokens=[token.id for token in drafting] == [token.id for token in alone],
    )


def _continued(folder: str, plan: Plan, prompt: list[int], draft: Drafting | None) -> tuple[Token, ...]:
    """Returns the new tokens of a session of its own, so that both begin with the same units in DRAM."""
    count = min(NEW_TOKENS, plan.context_length - len(prompt))
    with Session(folder, plan=plan, flash=SIMULATED) as session:
        return session.generate(prompt, count, ignore_eos=True, draft=draft).tokens
