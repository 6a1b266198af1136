"""Compares an artifact's dense logits with those of the weights that were packed."""

import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from coldpress.runtime.artifact.reader import open_artifact
from coldpress.runtime.generate.likelihood import sum_nll
from coldpress.runtime.generate.session import Session
from coldpress.runtime.plan.budget import choose_plan
from coldpress.schemas.layout import Plan

COUNTED_OF_MIXTURES = 0.99
"""Quantile of the dense logits' errors that counts for a mixture of experts: among 2,048 tokens, one had two experts
with router logits 0.00001 apart, and its error was 30 times any other's, in fp16 (docs/experiments/product.md)."""

BUFFER_BYTES = 32 << 20
"""The read buffer of dense logits; the stage multiplies half of it at a time. A plan's buffer is made for the reads of
one token: it holds so few units that adding their products up takes a seventh of the pass
(docs/experiments/builds.md)."""


@dataclass(frozen=True)
class Compared:
    """Figures of the artifact against its source."""

    nll_source: tuple[float, ...]
    """Mean nats per token of each block."""
    nll_dense: tuple[float, ...]
    """The same for the artifact's dense logits."""
    max_logit_error: float


class DenseComparison:
    """Runs blocks through the artifact densely, and measures how well it and the source predict.

    Blocks come in any order, and from several threads: the source's logits of a block are computed once, for this and
    for whatever else compares with them.
    """

    def __init__(self, folder: str, blocks: np.ndarray, packed: Callable[[int], np.ndarray] | None = None) -> None:
        """Opens the artifact.

        Args:
            folder: The artifact.
            blocks: int32 [num_blocks, block_tokens].
            packed: Block -> logits of the packed weights, float32 [block_tokens, vocab_size]; None if they are the
                source's.
        """
        self._session, self._blocks, self._packed = Session(folder, plan=_reading_much(folder)), blocks, packed
        self._one_at_a_time = threading.Lock()
        self._errors, self._largest = np.full(blocks.shape, np.nan), np.full(len(blocks), np.nan)
        self._nll_source, self._nll_dense = np.full(len(blocks), np.nan), np.full(len(blocks), np.nan)

    def compared(self, source: Callable[[int], np.ndarray], index: int) -> np.ndarray:
        """Returns the source's logits of a block, float32 [block_tokens, vocab_size], after comparing it."""
        block, of_source = self._blocks[index], source(index)
        expected = of_source if self._packed is None else self._packed(index)
        with self._one_at_a_time:
            found = self._dense(block)
        self._errors[index] = np.abs(found - expected).max(axis=1)
        self._largest[index] = np.abs(expected).max()
        self._nll_source[index] = sum_nll(of_source[:-1], block[1:]) / (len(block) - 1)
        self._nll_dense[index] = sum_nll(found[:-1], block[1:]) / (len(block) - 1)
        return of_source

    def _dense(self, block: np.ndarray) -> np.ndarray:
        decoder = self._session.decoder
        decoder.begin(len(block))
        return decoder.prefill(block.astype(np.int64))

    def result(self) -> Compared:
        """Returns the figures of all blocks; NaN for a block that did not come."""
        counted = COUNTED_OF_MIXTURES if self._session.artifact.manifest.model.is_mixture else 1.0
        # both propagate NaN
        error = np.quantile(self._errors, counted, method="higher") / np.max(self._largest)
        return Compared(tuple(self._nll_source.tolist()), tuple(self._nll_dense.tolist()), float(error))


def _reading_much(folder: str) -> Plan:
    """Returns the artifact's largest plan with a read buffer of at least `BUFFER_BYTES` beside the rest of its
    budget."""
    plan = choose_plan(open_artifact(folder).manifest)
    buffer_bytes = max(BUFFER_BYTES, plan.read_buffer_bytes)
    budget_bytes = plan.dram_budget_bytes + buffer_bytes - plan.read_buffer_bytes
    return plan.model_copy(update={"read_buffer_bytes": buffer_bytes, "dram_budget_bytes": budget_bytes})
