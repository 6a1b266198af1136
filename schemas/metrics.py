"""What a run measured (`RunMetrics`), what `verify` found (`Verification`), and what `report` publishes (`Metrics`)."""

import math
from typing import Annotated

from pydantic import BeforeValidator, Field, PlainSerializer

from coldpress.schemas.base import Count, PositiveCount, Record, Sha256, Share
from coldpress.schemas.sparsity import Tried

Measured = Annotated[
    float,
    Field(allow_inf_nan=True),
    BeforeValidator(lambda value: math.nan if value is None else value),
    PlainSerializer(lambda value: value if math.isfinite(value) else None, when_used="json"),
]
"""A figure that a ruined artifact may leave without a finite value; JSON has null for that."""


class RunMetrics(Record):
    """Counters of the store over the decoded tokens of one run; the prefill is counted apart."""

    num_tokens: Count
    hits: Count
    misses: Count
    evictions: Count
    reads: Count
    read_bytes: Count
    """Bytes moved from flash, pages included."""
    used_bytes: Count
    """Bytes of the units that were missed and used."""
    active_bytes: Count
    """Bytes of all units that were used, whether they were in DRAM or had to be read."""
    kept_bytes: Count
    """Bytes of the units that were read and kept, each copied to its slot."""
    modelled_flash_s: Measured = math.nan
    """What these reads take on the artifact's device, request by request (schemas/device.py); like the other two not a
    number, null in JSON, for a run that nobody attached a modelled clock to."""
    modelled_dram_s: Measured = math.nan
    """What computing and copying take there, by bytes over DRAM bandwidth (runtime/store/clock.py)."""
    modelled_s: Measured = math.nan
    """What the tokens take there: both, of which a request's run at once."""
    flash_s: float
    """What decoding waited for flash; with simulated flash, the seconds of the modelled device."""
    decode_s: float
    preload_reads: Count = 0
    """Of `reads`, those that were made before their units were asked for (ActiveFlow 3)."""
    preload_read_bytes: Count = 0
    """Of `read_bytes`, what they moved."""
    preloaded_bytes: Count = 0
    """Bytes of the units that they were made for."""
    preload_used_bytes: Count = 0
    """Of those units, the bytes of the ones that were asked for then; the rest was wasted."""
    prefill_reads: Count
    prefill_read_bytes: Count
    prefill_s: float
    first_token_s: float
    dram_budget_bytes: PositiveCount
    dram_used_bytes: PositiveCount
    """What the budget covers: resident, predictors, KV cache, buffers, slots."""
    whole_model_bytes: PositiveCount
    """The DRAM with which the plan would hold every unit and read nothing."""
    peak_rss_bytes: Count
    extents_sha256: Sha256 | None = None
    """Digest over all reads, in order (runtime/store/store.py): equal for a real run and its simulation."""
    direct_io: bool | None = None
    """Whether reads bypassed the page cache; if not, DRAM outside the budget may hold copies of the weights."""

    @property
    def hit_rate(self) -> float:
        """Hits over lookups; 0 without lookups."""
        lookups = self.hits + self.misses
        return self.hits / lookups if lookups else 0.0

    @property
    def preload_precision(self) -> float:
        """Share of the units read ahead that were asked for; 0 where none were."""
        return self.preload_used_bytes / self.preloaded_bytes if self.preloaded_bytes else 0.0

    @property
    def modelled_tokens_per_s(self) -> float:
        """Decoding speed on the artifact's device; 0 where nothing was decoded."""
        return self.num_tokens / self.modelled_s if self.num_tokens else 0.0


class DenseRun(Record):
    """A dense run under the same DRAM budget, with its own buffers, on the same device (compiler/dense_run.py)."""

    reads_per_token: Count
    flash_bytes_per_token: Count
    flash_s: float
    """Modelled seconds of a token in flash reads."""
    dram_s: float
    """Modelled seconds of a token in memory."""
    token_s: float
    """Modelled seconds of a token: both, of which a layer's run at once."""
    read_buffer_bytes: PositiveCount
    pinned_bytes: Count

    @property
    def tokens_per_s(self) -> float:
        """Modelled decoding speed."""
        return 1 / self.token_s


class LadderStep(Record):
    """One mechanism more, on the artifact's device, in modelled seconds of a decoded token
    (compiler/stages/verify/ladder.py)."""

    name: str
    tokens_per_s: float
    gain: float
    """Tokens per second over those of what was taken along before; 1 for the first."""
    kept: bool
    """Whether the steps behind it have it, too: where it gains, or they stand on it."""
    reads_per_token: float
    read_bytes_per_token: float
    hit_rate: Share


class MeasuredBlock(Record):
    """Mean negative log likelihood of a token of one block of test text, in nats."""

    nll_source: Measured
    nll_artifact: Measured
    nll_dense: Measured


class Sample(Record):
    """Text that the artifact wrote, and how it was asked to."""

    prompt: str
    text: str
    """What it continues the prompt with."""
    max_new_tokens: PositiveCount
    temperature: float
    seed: Count


class Divergence(Record):
    """How the artifact's distributions of the next token differ from the source's, in nats
    (compiler/stages/verify/divergence.py)."""

    mean_kld: Measured
    mean_kld_error: Measured
    p999_kld: Measured
    """99.9th percentile over tokens."""
    max_kld: Measured
    rms_delta_p: Measured
    """Root mean square of what the true token's probability has changed by."""
    rms_delta_p_error: Measured


class Protocol(Record):
    """What was predicted how: figures of two builds compare where these are equal."""

    corpus: str
    text_sha256: Sha256
    """Digest of the text that all splits were cut from."""
    tokens_sha256: Sha256
    """Digest of the file of the test split's tokens."""
    context_length: PositiveCount
    """Tokens of a block; every one but the first is predicted from those before it in the block."""
    stride: PositiveCount
    """Tokens from the start of one block to the start of the next: blocks do not overlap where it is their length."""


class Verification(Record):
    """What `verify` found on test text with an artifact that is not published yet; `publish` judges it.

    The source is the checkpoint that the build began with, before `relufy` and `distill`.
    A perplexity is exp of the mean over blocks; its error is the standard error of that mean, by the delta method
    (compiler/block_statistics.py), and null where one block alone was measured.
    """

    artifact_sha256: Sha256
    protocol: Protocol
    num_test_tokens: PositiveCount
    """Tokens that were predicted."""
    num_test_blocks: PositiveCount
    """Blocks of test text that there are, measured or not."""
    blocks: tuple[MeasuredBlock, ...]
    """Those that were measured, in order."""
    ppl_source: Measured
    ppl_source_error: Measured
    ppl_artifact: Measured
    ppl_artifact_error: Measured
    ppl_ratio_error: Measured
    """Of the artifact's over the source's, from the differences block by block: far smaller than either's own."""
    ppl_dense: Measured
    """Of the artifact's own weights with every unit used: what the format costs, without what sparsity costs."""
    dense: DenseRun | None
    """None where the budget holds no dense run."""
    max_logit_error: Measured
    """Largest difference of dense logits from those of the weights that were packed, over the largest logit's
    magnitude; of a mixture of experts all but the largest hundredth of tokens count, since a router between two equally
    good experts takes the other one for the smallest rounding."""
    top1_agreement: Share
    top1_agreement_error: Measured
    divergence: Divergence
    simulated_equals_real: bool
    sample: Sample | None
    """None where the artifact has no tokenizer."""
    ladder: tuple[LadderStep, ...]
    """Empty where every unit is used, or where the choice of units sees what is in DRAM."""
    run: RunMetrics
    tokens_per_s_deviation: Measured
    """Standard deviation of the measured decoding speed from block to block; null where one block was decoded."""

    @property
    def ppl_ratio(self) -> float:
        """The artifact's perplexity over the source's."""
        return self.ppl_artifact / self.ppl_source


class Metrics(Record):
    """metrics.json: the figures of the report."""

    model: str
    device: str
    method: str
    format: str
    artifact_sha256: Sha256
    """The artifact's identity: sha256 of its manifest."""
    artifact_bytes: PositiveCount
    flash_bytes: PositiveCount
    resident_bytes: PositiveCount
    budget_bytes: PositiveCount
    whole_model_bytes: PositiveCount
    """The DRAM with which the artifact would hold all weights and read nothing."""
    flash_bytes_per_token: float
    reads_per_token: float
    hit_rate: Share
    num_test_tokens: PositiveCount
    num_measured_blocks: PositiveCount
    num_test_blocks: PositiveCount
    """Blocks of test text that there are; `num_measured_blocks` of them were measured."""
    ppl_source: float
    ppl_source_error: Measured
    ppl_artifact: float
    ppl_artifact_error: Measured
    ppl_ratio_error: Measured
    ppl_dense: float
    tokens_per_s: float
    """On the machine that built the artifact, at its load: the only figure here that differs from run to run."""
    tokens_per_s_deviation: Measured
    """See `Verification`."""
    modelled_tokens_per_s: float
    """With the device profile's flash and DRAM bandwidth instead of this machine's: the simulator's figure."""
    dense: DenseRun | None
    """A dense run under the same budget; None where it holds none."""
    ladder: tuple[LadderStep, ...]
    """What each mechanism brings; see `Verification`."""
    tried: tuple[Tried, ...]
    """The methods that `auto` compared or skipped; empty where the method was given."""
    protocol: Protocol
    """The text that the perplexities are of."""
    sample: Sample | None

    @property
    def ppl_ratio(self) -> float:
        """The artifact's perplexity over the source's."""
        return self.ppl_artifact / self.ppl_source

    @property
    def gain_over_dense(self) -> float | None:
        """Modelled speed over the dense run's."""
        return None if self.dense is None else self.modelled_tokens_per_s / self.dense.tokens_per_s
