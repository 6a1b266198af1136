"""verify: opens an unpublished artifact with the runtime that will run it, and holds it against its source.

Every byte is checked (hashes, pages, layout: runtime/artifact/reader.py and runtime/artifact/integrity.py have the
rules). Then test text is decoded token by token through selector, cache and flash, as in use: perplexity, agreement
with the source, and the reads that it took; dense logits are compared with the source's own. What is measured goes into
the record, whatever it is: `publish` judges it.
"""

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated

import numpy as np
from pydantic import Field

from compiler._io import load_arrays
from compiler._publishing import standing
from compiler.dense_run import dense_run
from runtime.artifact.integrity import verify_artifact
from runtime.artifact.reader import open_artifact
from runtime.budget import choose_plan
from runtime.generate import Quality, Session, sum_nll
from runtime.simulate import simulate
from runtime.trace import Recorder
from schemas.base import Record
from schemas.config import Key
from schemas.corpus import Corpus
from schemas.errors import ColdpressError
from schemas.manifest import Manifest
from schemas.metrics import DenseRun, RunMetrics, Verification
from schemas.model import Model
from schemas.package import Package

logger = logging.getLogger(__name__)
DECISIONS = ("hits", "misses", "evictions", "reads", "read_bytes", "used_bytes", "prefill_reads", "prefill_read_bytes")
"""What must not depend on whether flash is real or simulated; the digest over all extents joins them."""
SIMULATED_TOKENS = 128
"""Tokens of the first block that are decoded for that comparison: past the point where a cache is full and evicts, and
what the store was asked for fits in memory."""
LARGEST_NLL = 709.0
"""Nats whose exponential a float64 can hold."""


class VerifyConfig(Record):
    """Settings of `verify`."""

    artifact: str | None = Field(default=None, description="final name of the artifact; it stands there once published")
    test_tokens: Annotated[int, Key()] = Field(
        default=512, ge=2, description="tokens of test text that are decoded one by one"
    )


def run(config: VerifyConfig, model: Model, corpus: Corpus, package: Package) -> Verification:
    """Checks the artifact that `package` wrote, and measures it.

    Raises:
        ArtifactError: if it is damaged, naming the place.
        ColdpressError: if it stands neither where it was written nor under its final name.
    """
    folder = str(standing(package, config.artifact))
    artifact = open_artifact(folder)
    num_bytes = verify_artifact(artifact)
    logger.info("verify: %d bytes in %d files are as the manifest says", num_bytes, len(artifact.manifest.files))
    blocks = take_blocks(corpus, config.test_tokens, choose_plan(artifact.manifest).context_length)
    equal = simulation_equals(folder, blocks[:1, :SIMULATED_TOKENS])
    decoded = decode(folder, blocks)
    logger.info("verify: perplexity %.4f of the artifact", perplexity(decoded.quality.mean_nll))
    compared = compare(model, folder, blocks, decoded.first_choices)
    logger.info("verify: perplexity %.4f of the source", compared.ppl_source)
    return Verification(
        artifact_sha256=artifact.sha256,
        num_test_tokens=decoded.quality.num_predicted,
        ppl_source=compared.ppl_source,
        ppl_artifact=perplexity(decoded.quality.mean_nll),
        ppl_dense=compared.ppl_dense,
        dense=dense_of(model, artifact.manifest),
        max_logit_error=compared.max_logit_error,
        top1_agreement=compared.top1_agreement,
        simulated_equals_real=equal,
        run=decoded.quality.metrics,
    )


def take_blocks(corpus: Corpus, num_tokens: int, context_length: int) -> np.ndarray:
    """The first test blocks with about `num_tokens` tokens, int32 [num_blocks, at most `context_length`].

    Raises:
        ColdpressError: if a block is too short for a token to be decoded and predicted.
    """
    tokens = load_arrays(corpus.split("test").arrays, "tokens")["tokens"][:, :context_length]
    if tokens.shape[1] < 3:
        raise ColdpressError(
            f"test blocks of {tokens.shape[1]} tokens leave nothing to decode, expected at least 3; "
            "raise context_length"
        )
    return tokens[: max(1, num_tokens // tokens.shape[1])]


@dataclass
class Decoded:
    """Test text through selector and store."""

    quality: Quality
    first_choices: np.ndarray
    """int64 [num_blocks, block_tokens - 1], the likeliest token after each but the last."""


@dataclass
class _Watch:
    """Takes down the likeliest token of every row of logits."""

    choices: list[np.ndarray] = field(default_factory=list)

    def __call__(self, logits: np.ndarray) -> None:
        self.choices.append(logits.argmax(axis=1))


def decode(folder: str, blocks: np.ndarray) -> Decoded:
    """Teacher-forced decoding of `blocks` int32 [num_blocks, block_tokens] under the artifact's own plan."""
    watch = _Watch()
    quality = Session(folder).perplexity(blocks, sparse=True, on_logits=watch)
    return Decoded(quality, np.concatenate(watch.choices).reshape(len(blocks), -1)[:, : blocks.shape[1] - 1])


def simulation_equals(folder: str, blocks: np.ndarray) -> bool:
    """Whether replaying a run on simulated flash makes the same hits, misses, evictions, extents and bytes."""
    recorder = Recorder()
    session = Session(folder, recorder=recorder)
    real = session.perplexity(blocks, sparse=True).metrics
    simulated = simulate(session.artifact, session.plan, recorder.events)
    return _decisions(real) == _decisions(simulated)


def _decisions(metrics: RunMetrics) -> dict[str, object]:
    return {name: getattr(metrics, name) for name in (*DECISIONS, "extents_sha256")}


@dataclass(frozen=True)
class Compared:
    """The artifact against its source."""

    ppl_source: float
    ppl_dense: float
    max_logit_error: float
    top1_agreement: float


def compare(model: Model, folder: str, blocks: np.ndarray, first_choices: np.ndarray) -> Compared:
    """Dense logits of the artifact against the source's, and the sparse first choices against the source's.

    Args:
        model: The source, run with transformers one layer at a time.
        folder: The artifact.
        blocks: int32 [num_blocks, block_tokens].
        first_choices: What the artifact chose, int64 [num_blocks, block_tokens - 1].
    """
    decoder = Session(folder).decoder
    errors, largest, nll, dense_nll, agreeing = [], [], 0.0, 0.0, 0
    for block, choices, expected in zip(blocks, first_choices, source_logits(model, blocks), strict=True):
        decoder.begin(len(block))
        found = decoder.prefill(block.astype(np.int64))
        errors.append(np.abs(found - expected).max())
        largest.append(np.abs(expected).max())
        nll += sum_nll(expected[:-1], block[1:])
        dense_nll += sum_nll(found[:-1], block[1:])
        agreeing += int((expected[:-1].argmax(axis=1) == choices).sum())
    count = first_choices.size
    error = float(np.max(errors) / np.max(largest))  # numpy's maximum hands on NaN, Python's does not
    return Compared(perplexity(nll / count), perplexity(dense_nll / count), error, agreeing / count)


def dense_of(model: Model, manifest: Manifest) -> DenseRun | None:
    """A dense run in the artifact's format, under its plan's budget, on its device."""
    plan = choose_plan(manifest)
    format_name = manifest.families[0].format
    return dense_run(model, format_name, plan.context_length, plan.dram_budget_bytes, manifest.device)


def perplexity(mean_nll: float) -> float:
    """exp of nats per token; infinite where that is beyond float64, NaN for NaN."""
    return float(np.exp(np.float64(mean_nll))) if not mean_nll > LARGEST_NLL else math.inf


def source_logits(model: Model, blocks: np.ndarray) -> Iterator[np.ndarray]:
    """The source's logits, float32 [block_tokens, vocab_size], block by block of int32 [num_blocks, block_tokens]."""
    from compiler.activity.forward import LayerStream  # here, since it loads torch

    stream = LayerStream(model)
    hidden = stream.last_hidden(blocks.astype(np.int64))
    for block in range(len(blocks)):
        yield stream.head(hidden[block : block + 1])[0].numpy()
