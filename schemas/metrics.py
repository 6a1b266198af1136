"""Figures of a run (`RunMetrics`), of `verify` (`Verification`), and those that `report` publishes (`Metrics`)."""

import math
from typing import Annotated

from pydantic import BeforeValidator, Field, PlainSerializer

from coldpress.schemas.base import Count, PositiveCount, Record, Sha256, Share
from coldpress.schemas.compute import Overlap, overlapped_seconds
from coldpress.schemas.families import FormatName
from coldpress.schemas.layout import DraftName
from coldpress.schemas.provenance import Provenance
from coldpress.schemas.sparsity import ByLayer, Tried

Measured = Annotated[
    float,
    Field(allow_inf_nan=True),
    BeforeValidator(lambda value: math.nan if value is None else value),
    PlainSerializer(lambda value: value if math.isfinite(value) else None, when_used="json"),
]
"""A figure that is NaN or infinite if an artifact is badly broken; JSON has null for it."""


def share_of_hits(hits: float, misses: float) -> float:
    """Returns hits over lookups; 0 without lookups."""
    return hits / (hits + misses) if hits + misses else 0.0


class RunMetrics(Record):
    """Counters of the store over the decoded tokens of one run; the prefill is counted separately."""

    num_tokens: Count
    hits: Count
    misses: Count
    evictions: Count
    reads: Count
    read_bytes: Count
    """Bytes moved from flash, pages included."""
    used_bytes: Count
    """Bytes of the units that were used and had to be read."""
    active_bytes: Count
    """Bytes of all units that were used, whether they were in DRAM or had to be read."""
    kept_bytes: Count
    """Bytes of the units that were read and kept, each copied to its slot."""
    modelled_flash_s: Measured = math.nan
    """Time of these reads on the artifact's device, request by request (schemas/device.py); like the other two not a
    number, null in JSON, for a run that nobody attached a modelled clock to."""
    modelled_dram_s: Measured = math.nan
    """Time of computing and copying there (runtime/store/computing.py); by bytes over DRAM bandwidth where the device's
    profile has no rates of computing."""
    modelled_s: Measured = math.nan
    """Seconds of the tokens there. A request reads and computes at the same time; all else adds up."""
    flash_s: float
    """Seconds that decoding waited for flash; with simulated flash, the seconds of the modelled device."""
    decode_s: float
    preload_reads: Count = 0
    """The part of `reads` that was preloaded (ActiveFlow 3)."""
    preload_read_bytes: Count = 0
    preloaded_bytes: Count = 0
    preload_used_bytes: Count = 0
    """The part of `preloaded_bytes` that was requested afterwards; the rest was wasted."""
    prefill_reads: Count
    prefill_read_bytes: Count
    prefill_s: float
    first_token_s: float
    dram_budget_bytes: PositiveCount
    dram_used_bytes: PositiveCount
    """DRAM that counts against the budget: resident tensors, predictors, KV cache, bookkeeping, buffers, slots."""
    whole_model_bytes: PositiveCount
    """The DRAM with which the plan would hold every unit and read nothing."""
    peak_rss_bytes: Count
    extents_sha256: Sha256 | None = None
    """Digest over all reads, in order (runtime/store/store.py): equal for a real run and its simulation."""
    direct_io: bool | None = None
    """True if reads bypassed the page cache; if not, DRAM outside the budget may hold copies of the weights."""

    @property
    def hit_rate(self) -> float:
        return share_of_hits(self.hits, self.misses)

    def modelled_seconds(self, overlap: Overlap) -> float:
        return overlapped_seconds(overlap, self.modelled_flash_s, self.modelled_dram_s, self.modelled_s)

    @property
    def preload_precision(self) -> float:
        """Returns the share of the units preloaded that were requested afterwards; 0 if none were preloaded."""
        return self.preload_used_bytes / self.preloaded_bytes if self.preloaded_bytes else 0.0

    @property
    def modelled_tokens_per_s(self) -> float:
        """Returns the modelled decoding speed on the artifact's device; 0 if nothing was decoded."""
        return self.num_tokens / self.modelled_s if self.num_tokens else 0.0


class DenseRun(Record):
    """A dense run under the same DRAM budget, with buffers to suit it, on the same device (compiler/dense_run.py)."""

    reads_per_token: Count
    flash_bytes_per_token: Count
    flash_s: float
    """Modelled seconds of a token in flash reads."""
    dram_s: float
    """Modelled seconds of a token in computing."""
    token_s: float
    """Modelled seconds of a token: flash and computing, which overlap within a layer."""
    read_buffer_bytes: PositiveCount
    preload_buffer_bytes: Count = 0
    """Buffer for the next layer's units: every layer then has as many pinned units. 0 where whole layers are pinned."""
    pinned_bytes: Count

    @property
    def tokens_per_s(self) -> float:
        return 1 / self.token_s

    def seconds(self, overlap: Overlap) -> float:
        return overlapped_seconds(overlap, self.flash_s, self.dram_s, self.token_s)


class WholeInDram(Record):
    """A run that holds the whole model in DRAM in one format, and reads no flash: arithmetic, not a measurement."""

    format: FormatName
    """fp16 for the original."""
    is_mixed: bool = False
    """True if the matrices have several formats; `format` then names the coarsest."""
    dram_bytes: PositiveCount
    """Weights, KV cache and bookkeeping, as an artifact in that format would count them."""
    fits: bool
    """True if the device has that much DRAM for everything together."""
    dram_s: float
    """Modelled seconds of a token, all of them computing."""
    ppl_ratio: float | None
    """Its perplexity over the source's; None if nobody measured it."""
    is_estimate: bool = False
    """True if `ppl_ratio` is of calibration text with weights rounded to nearest, and not of the test text."""

    @property
    def tokens_per_s(self) -> float:
        return 1 / self.dram_s

    @property
    def title(self) -> str:
        return "the artifact's formats" if self.is_mixed else self.format


class LlamaCppRun(Record):
    """llama.cpp's decoding speed, which somebody measured with llama-bench and gave to the build."""

    build: int
    cpu: str
    model_type: str
    """Model and format, in llama.cpp's words."""
    model_bytes: PositiveCount
    num_threads: PositiveCount
    tokens_per_s: float = Field(gt=0)
    tokens_per_s_deviation: float = Field(ge=0)
    """Standard deviation over llama-bench's repetitions."""


class ReadLength(Record):
    least_bytes: PositiveCount
    """A power of two: the reads have this many bytes or more, and fewer than twice as many."""
    reads: PositiveCount
    read_bytes: PositiveCount


class LadderStep(Record):
    """One more mechanism on the device, in modelled seconds of a decoded token (compiler/stages/verify/ladder.py)."""

    name: str
    tokens_per_s: float
    gain: float
    """Tokens per second over those of the best step before it; 1 for the first step."""
    kept: bool
    """True if later steps include it: because it gains, or because they need it."""
    reads_per_token: float
    read_bytes_per_token: float
    hit_rate: Share


class MeasuredBlock(Record):
    """Mean negative log likelihood per token of one block of test text, in nats."""

    nll_source: Measured
    nll_artifact: Measured
    nll_dense: Measured


class Sample(Record):
    prompt: str
    text: str
    """The continuation of the prompt, or the answer to it."""
    max_new_tokens: PositiveCount
    temperature: float
    seed: Count
    is_chat: bool = False
    """True if the prompt was asked as a question, by the checkpoint's chat template."""


class Divergence(Record):
    """Differences of the artifact's distributions of the next token from the source's, in nats
    (compiler/stages/verify/divergence.py)."""

    mean_kld: Measured
    mean_kld_error: Measured
    p999_kld: Measured
    """99.9th percentile over tokens."""
    max_kld: Measured
    rms_delta_p: Measured
    """Root mean square of the change of the true token's probability."""
    rms_delta_p_error: Measured


class Protocol(Record):
    """Protocol of a measurement of quality: figures of two builds can be compared if their protocols are equal."""

    corpus: str
    text_sha256: Sha256
    """Digest of the text from which all splits were cut."""
    tokens_sha256: Sha256
    """Digest of the file with the test split's tokens."""
    context_length: PositiveCount
    """Tokens of a block; each token except the first is predicted from the block's tokens before it."""
    stride: PositiveCount
    """Tokens from the start of one block to the start of the next; blocks do not overlap if it equals their length."""


class PlanFigures(Record):
    """Cost and quality of one plan of an artifact, measured on the blocks of test text."""

    plan: str
    dram_budget_bytes: PositiveCount
    dram_used_bytes: PositiveCount
    method: str
    cache: str
    density: Share
    """Mean share of the bytes of all units that a token uses, by the plan."""
    holds_everything: bool
    """True if nothing is read once it is loaded."""
    ppl_artifact: Measured
    ppl_artifact_error: Measured
    ppl_ratio: Measured
    ppl_ratio_error: Measured
    top1_agreement: Share
    mean_kld: Measured
    """Nats from the source's distributions."""
    reads_per_token: float
    flash_bytes_per_token: float
    hit_rate: Share
    modelled_tokens_per_s: float
    simulated_equals_real: bool


class PlanDrafts(Record):
    """Drafts of a plan's own in a greedy continuation of test text (compiler/stages/verify/decoded.py)."""

    plan: str
    draft: DraftName
    drafted: tuple[Count, ...]
    """Drafts of each pass, in order."""
    accepted: tuple[Count, ...]
    """Number of them that the model accepted. Each pass gives one token more."""
    same_tokens: bool
    """True if the tokens are those of the same continuation without drafts."""

    @property
    def tokens_per_pass(self) -> float:
        return 1 + sum(self.accepted) / len(self.accepted)


class Measurements(Record):
    """Figures that `verify` measures on test text, and that the report shows as they are.

    A perplexity is exp of the mean over blocks; its error is the standard error of that mean, by the delta method
    (compiler/block_statistics.py), and null if only one block was measured.
    """

    artifact_sha256: Sha256
    """The artifact's identity: sha256 of its manifest."""
    protocol: Protocol
    num_test_tokens: PositiveCount
    num_test_blocks: PositiveCount
    """All blocks of test text, measured or not."""
    ppl_source: Measured
    ppl_source_error: Measured
    ppl_artifact: Measured
    ppl_artifact_error: Measured
    ppl_ratio_error: Measured
    """Error of `ppl_ratio`, from differences block by block; so it is far smaller than those of the perplexities."""
    ppl_dense: Measured
    """Perplexity of the artifact's weights with every unit used: the cost of the format without that of sparsity."""
    dense: DenseRun | None
    """A dense run under the same budget; None if the budget holds none."""
    sample: Sample | None
    """None if the artifact has no tokenizer."""
    ladder: tuple[LadderStep, ...]
    """Empty if every unit is used, or if the selector sees what is in DRAM."""
    read_lengths: tuple[ReadLength, ...]
    """The reads of the run, the shortest first."""
    process_bytes: PositiveCount
    """Resident memory of a process that has opened the artifact and its tokenizer, on the machine that measured: the
    interpreter, libraries and tables. A run takes it beside its DRAM budget."""
    tokens_per_s_deviation: Measured
    """Standard deviation of the measured decoding speed from block to block; null if only one block was decoded."""
    plans: tuple[PlanFigures, ...] = ()
    """Every plan, the largest budget first, to which all other figures belong; empty if there is only one."""
    drafts: tuple[PlanDrafts, ...] = ()
    """Every plan that drafts, the largest budget first."""

    @property
    def ppl_ratio(self) -> float:
        return self.ppl_artifact / self.ppl_source


class Verification(Measurements):
    """The results of `verify`, with an artifact that is not published yet; `publish` judges them.

    The source is the checkpoint with which the build began, before `relufy` and `distill`.
    """

    blocks: tuple[MeasuredBlock, ...]
    max_logit_error: Measured
    """Largest difference between dense logits of the artifact and of the weights before packing, over the largest
    logit's magnitude. In a mixture of experts the largest hundredth of tokens does not count, since between two equally
    good experts the smallest rounding may change the router's choice."""
    top1_agreement: Share
    top1_agreement_error: Measured
    divergence: Divergence
    simulated_equals_real: bool
    run: RunMetrics


class Metrics(Measurements, ByLayer):
    """metrics.json: the figures of the report."""

    model: str
    device: str
    method: str
    format: str
    artifact_bytes: PositiveCount
    flash_bytes: PositiveCount
    resident_bytes: PositiveCount
    budget_bytes: PositiveCount
    whole_model_bytes: PositiveCount
    """The DRAM with which the artifact would hold all weights and read nothing."""
    flash_bytes_per_token: float
    reads_per_token: float
    hit_rate: Share
    num_measured_blocks: PositiveCount
    """Blocks of test text that were measured, of `num_test_blocks`."""
    ppl_source: float
    ppl_artifact: float
    ppl_dense: float
    tokens_per_s: float
    """Speed on the building machine, at its load: only this and `process_bytes` differ from run to run."""
    modelled_tokens_per_s: float
    """Speed with the device profile's flash and DRAM bandwidth instead of this machine's: the simulator's figure."""
    modelled_error: Share | None
    """Share by which it may be off (`DeviceProfile`); None for an upper bound: no rates of computing are known."""
    in_dram: tuple[WholeInDram, ...]
    """The whole model in the DRAM of the same device: the original first, then in smaller formats."""
    llama_cpp: tuple[LlamaCppRun, ...] = ()
    """Measurements of llama-bench, if the build was given any; of the machine that they name."""
    flash_s_per_token: float
    """Modelled seconds of a token in flash reads."""
    dram_s_per_token: float
    """Modelled seconds of a token in computing and copying; the two overlap."""
    dram_parts: dict[str, Count]
    """The uses of the DRAM budget, and the bytes of each; they sum to it."""
    tried: tuple[Tried, ...]
    """The methods that `auto` compared or skipped; empty if the method was given."""
    front: tuple[Tried, ...]
    """The Pareto front of speed, quality and DRAM, from which `auto` took the first of `tried`; else empty."""
    provenance: Provenance

    @property
    def original(self) -> WholeInDram:
        return self.in_dram[0]

    @property
    def gain_over_dense(self) -> float | None:
        """Returns the modelled speed over the dense run's; None without a dense run."""
        return None if self.dense is None else self.modelled_tokens_per_s / self.dense.tokens_per_s
