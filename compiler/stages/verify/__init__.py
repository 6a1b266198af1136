"""verify: opens an unpublished artifact with the runtime that will run it, and compares it with its source.

Checks every byte (runtime/artifact/reader.py, runtime/artifact/integrity.py). Then decodes test text through selector,
cache and flash, as in use (decoded.py), and measures perplexity, divergence from the source, reads, and drafts. The
source is the checkpoint that the build began with, so the figures include the loss by `relufy` and `distill`; dense
logits are compared with those of the packed weights; a dense artifact decodes just these. `publish` judges the figures.
"""

import logging
import os
import subprocess
import sys
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from pydantic import Field

from coldpress.compiler.activity.source_logits import SourceLogits
from coldpress.compiler.block_statistics import deviation, perplexity
from coldpress.compiler.dense_run import dense_for
from coldpress.compiler.io import load_arrays
from coldpress.compiler.publishing import standing
from coldpress.compiler.stages.verify.decoded import SESSIONS, decode, drafts_of_all, figures_of, is_dense
from coldpress.compiler.stages.verify.divergence import (
    BUFFER_BYTES,
    Compared,
    DenseComparison,
    SourceComparison,
    of_dense_run,
)
from coldpress.runtime.artifact.integrity import verify_artifact
from coldpress.runtime.artifact.reader import open_artifact
from coldpress.runtime.cli import process_memory
from coldpress.runtime.dram.budget import choose_plan
from coldpress.runtime.generate.sampling import Sampling
from coldpress.runtime.generate.session import Session
from coldpress.runtime.text.chat import ChatTemplate
from coldpress.runtime.text.tokenizer import TextCodec
from coldpress.schemas.base import Record
from coldpress.schemas.config import Key
from coldpress.schemas.corpus import Corpus
from coldpress.schemas.errors import ColdpressError
from coldpress.schemas.layout import by_budget
from coldpress.schemas.manifest import Manifest
from coldpress.schemas.metrics import MeasuredBlock, PlanFigures, Protocol, Sample, Verification
from coldpress.schemas.model import Model
from coldpress.schemas.package import Package
from coldpress.schemas.preflight import StageNeeds

if TYPE_CHECKING:
    from coldpress.compiler.needs import Build

logger = logging.getLogger(__name__)
AFFORDABLE_WORK = 9_000_000_000_000
"""Parameters times tokens that are decoded where few blocks leave the quality uncertain: all of the default test text
for models of up to two billion parameters, a thousand tokens for seven billion: twelve minutes of one core, shared by
all there are."""
WORK_ONE_BY_ONE = 40_000_000_000
"""Parameters times tokens up to which all tokens are decoded one by one: some seconds on two cores."""
FEWEST_BLOCKS = 4
"""Blocks that are decoded even for the largest models: fewer blocks give a poor estimate of their own error."""
SMALL_ERROR = 0.01
"""Standard error of the perplexity over the source's with which FEWEST_BLOCKS are enough: both models see the same
text, so that the error of their ratio is a tenth of that of a perplexity."""
LOGIT_BYTES = 32
"""Bytes per logit of a block, in float32: the artifact's, and for this block and the next one the source's, those of
dense logits, and what compares the two."""
PROMPT_TOKENS, SAMPLE_TOKENS = 16, 48
QUESTION = "What is the capital of France?"
SAMPLE_TEMPERATURE, SAMPLE_SEED = 0.6, 7
"""Text is drawn, not greedy: greedily, a model of four million parameters soon repeats itself. An answer is greedy."""


class VerifyConfig(Record):
    """Settings of `verify`."""

    test_tokens: Annotated[
        int | None,
        Key(default="four blocks; more if the ratio of perplexities is uncertain by 1 %, for large models fewer"),
    ] = Field(
        default=None,
        ge=2,
        description="tokens of test text that are decoded, in whole blocks; more for a closer figure",
    )


def run(
    config: VerifyConfig, model: Model, original: Model, corpus: Corpus, package: Package, threads: int = 1
) -> Verification:
    """Checks the artifact that `package` wrote, and measures it.

    Args:
        model: The model whose weights were packed.
        original: The checkpoint as the user gave it; equal to `model` unless `relufy` or `distill` ran.
        threads: Cores to use; no figure but seconds depends on them.

    Raises:
        ArtifactError: if the artifact is damaged, naming the place.
        ColdpressError: if the artifact is not where it was written.
    """
    folder = str(standing(package))
    artifact = open_artifact(folder)
    num_bytes = verify_artifact(artifact)
    logger.info("verify: %d bytes in %d files are as the manifest says", num_bytes, len(artifact.manifest.files))
    every_block = blocks_of_test_text(corpus, choose_plan(artifact.manifest).context_length)
    most = num_measured(config, every_block.shape[1], model.num_parameters)
    few = most if config.test_tokens is not None else min(FEWEST_BLOCKS, most)
    text = _Text(folder, model, original, every_block[:few], threads)
    if few < min(most, len(every_block)) and not text.quality["ppl_ratio_error"] <= SMALL_ERROR:
        text = _Text(folder, model, original, every_block[:most], threads)
    blocks, decoded, watch, found = text.blocks, text.decoded, text.watch, text.quality
    sound = bool(np.isfinite(decoded.block_nll).all())
    top1_agreement, top1_error = watch.top1_agreement()

    logger.info("verify: perplexity %(ppl_artifact).4f of the artifact, %(ppl_source).4f of the source", found)
    return Verification(
        artifact_sha256=artifact.sha256,
        protocol=protocol_of(corpus, every_block.shape[1]),
        num_test_tokens=blocks[:, 1:].size,
        num_test_blocks=len(every_block),
        **found,
        dense=dense_for(model, artifact.manifest, choose_plan(artifact.manifest)),
        max_logit_error=text.compared.max_logit_error,
        top1_agreement=top1_agreement,
        top1_agreement_error=top1_error,
        divergence=watch.divergence(),
        simulated_equals_real=decoded.simulated_equals_real,
        sample=write_sample(folder, every_block[0]) if sound else None,
        ladder=decoded.ladder,
        run=decoded.run,
        read_lengths=decoded.read_lengths,
        process_bytes=process_bytes(folder),
        tokens_per_s_deviation=deviation(np.array(decoded.tokens_per_s)),
        plans=text.figures(artifact.manifest),
        drafts=drafts_of_all(folder, artifact.manifest, every_block[0]) if sound else (),
    )


class _Text:
    def __init__(self, folder: str, model: Model, original: Model, blocks: np.ndarray, threads: int) -> None:
        logger.info("verify: decoding %d blocks of %d tokens", *blocks.shape)
        self.blocks, self._folder, self._model, self._threads = blocks, folder, model, threads
        self._much = blocks.size * model.num_parameters > WORK_ONE_BY_ONE
        self._source = SourceLogits(original, blocks, threads)
        source, dense = self._source, None
        if model != original or model.spec.is_mixture or not is_dense(folder):
            packed = None if model == original else SourceLogits(model, blocks, threads)
            dense = DenseComparison(folder, blocks, packed, (packed or self._source).router_scores)
            source = partial(dense.compared, self._source)
        self.watch = SourceComparison(source, blocks, threads)
        self.decoded = decode(folder, model, blocks, self.watch, self._much, threads)
        self.compared = dense.result() if dense else of_dense_run(self.watch, self.decoded.block_nll)
        self.quality = _quality(self.decoded.block_nll, self.compared)

    def figures(self, manifest: Manifest) -> tuple[PlanFigures, ...]:
        """Returns the figures of all plans, the largest first; none if there is one plan alone."""
        largest, *others = by_budget(manifest.plans)[::-1]
        if not others:
            return ()
        found = [figures_of(manifest, largest, self.decoded, self.watch, self.compared.nll_source)]
        for plan in others:
            watch = SourceComparison(self._source, self.blocks, self._threads)
            given = choose_plan(manifest, plan.dram_budget_bytes)
            decoded = decode(self._folder, self._model, self.blocks, watch, self._much, self._threads, given)
            found.append(figures_of(manifest, plan, decoded, watch, self.compared.nll_source))
            logger.info("verify: plan %s: perplexity %.4f", plan.name, found[-1].ppl_artifact)
        return tuple(found)


def needs(build: "Build") -> StageNeeds:
    logits = LOGIT_BYTES * build.block_tokens * build.model.spec.vocab_size
    num_heads = 2 if build.has("relufy") or build.has("distill") else 1  # the source's, and that of what was packed
    held = SESSIONS * build.dram_budget_bytes + max(build.layer_weights_bytes, num_heads * build.head_bytes) + logits
    held += build.running_bytes(8) + BUFFER_BYTES
    spec = build.model.spec
    if spec.is_mixture:  # the scores of every token's routers are kept to be compared
        num_scores = spec.num_experts * (spec.num_hidden_layers - len(spec.dense_layers))
        held += 4 * num_heads * build.settings["tokenize"]["evaluation_tokens"] * num_scores
    return StageNeeds(stage="verify", ram_bytes=build.TORCH_BYTES + 2 * build.BLOCK_BYTES + held, disk_bytes=0)


def _quality(nll_artifact: tuple[float, ...], compared: Compared) -> dict[str, Any]:
    source, artifact, dense = map(np.array, (compared.nll_source, nll_artifact, compared.nll_dense))
    (ppl_source, source_error), (ppl_artifact, artifact_error) = perplexity(source), perplexity(artifact)
    return {
        "blocks": tuple(
            MeasuredBlock(nll_source=of_source, nll_artifact=of_artifact, nll_dense=of_dense)
            for of_source, of_artifact, of_dense in zip(
                compared.nll_source, nll_artifact, compared.nll_dense, strict=True
            )
        ),
        "ppl_source": ppl_source,
        "ppl_source_error": source_error,
        "ppl_artifact": ppl_artifact,
        "ppl_artifact_error": artifact_error,
        "ppl_ratio_error": perplexity(artifact - source)[1],
        "ppl_dense": perplexity(dense)[0],
    }


def num_measured(config: VerifyConfig, block_tokens: int, num_parameters: int) -> int:
    """Returns the number of test blocks to decode: as `test_tokens` says, or as many as a model of this size allows."""
    if config.test_tokens is not None:
        return max(1, config.test_tokens // block_tokens)
    return max(FEWEST_BLOCKS, AFFORDABLE_WORK // num_parameters // block_tokens)


def blocks_of_test_text(corpus: Corpus, context_length: int) -> np.ndarray:
    """Returns the blocks of test text, int32 [num_blocks, at most `context_length`]. Raises ColdpressError if blocks
    are too short to decode and predict a token."""
    tokens = load_arrays(corpus.split("test").arrays, "tokens")["tokens"][:, :context_length]
    if tokens.shape[1] < 3:
        raise ColdpressError(
            f"test blocks of {tokens.shape[1]} tokens leave nothing to decode, expected at least 3; "
            "raise context_length"
        )
    return tokens


def protocol_of(corpus: Corpus, block_tokens: int) -> Protocol:
    blocks = corpus.split("test")
    return Protocol(
        corpus=corpus.name,
        text_sha256=corpus.text_sha256,
        tokens_sha256=blocks.arrays.sha256,
        context_length=block_tokens,
        stride=blocks.block_tokens,
    )


def write_sample(folder: str, block: np.ndarray) -> Sample | None:
    """Answers a question if the model has a chat template, else continues the first words of a test block, int32
    [block_tokens]; None without a tokenizer. The prompt is encoded like a user's: the same text, options and artifact
    give the same continuation."""
    session = Session(folder)
    codec, template = TextCodec.of(session.artifact), ChatTemplate.of(session.artifact)
    if codec is None:
        return None
    if template is None:
        prompt = first_words(codec.decode(block[:PROMPT_TOKENS].tolist()))
        prompt_ids = codec.encode(prompt)
    else:
        prompt = QUESTION
        prompt_ids = codec.encode(template.render([{"role": "user", "content": prompt}]), special=False)
    count = min(SAMPLE_TOKENS, session.plan.context_length - len(prompt_ids))
    if not prompt_ids or count < 1:
        return None
    sampling = Sampling(temperature=0.0 if template else SAMPLE_TEMPERATURE, seed=SAMPLE_SEED)
    written = session.generate(prompt_ids, count, sampling=sampling)
    ends = session.artifact.manifest.model.eos_token_ids if template else ()
    text = codec.continuation(prompt_ids, [token for token in written.token_ids if token not in ends])
    return Sample(
        prompt=prompt,
        text=text.strip() if template else text,
        is_chat=template is not None,
        max_new_tokens=count,
        temperature=sampling.temperature,
        seed=sampling.seed,
    )


def first_words(text: str) -> str:
    """Returns the text on one line, without its last word, which may be cut off, and without unprintable characters."""
    words = "".join(char if char.isprintable() else " " for char in text).split()
    return " ".join(words[:-1] or words)


def process_bytes(folder: str) -> int:
    """Returns the resident memory of a process that has opened the artifact. Raises ColdpressError if it fails."""
    # one thread: the stacks of more are no memory of the runtime
    own = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", process_memory.__name__, folder]
    done = subprocess.run(command, capture_output=True, text=True, env=own)
    if done.returncode or not done.stdout.strip().isdigit():
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise ColdpressError(
            f"the process that measures its own memory ended with code {done.returncode} ({last}), expected a number "
            "of bytes; run verify again"
        )
    return int(done.stdout)
