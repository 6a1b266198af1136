"""Compares an artifact's dense logits with those of the weights that were packed.

In a mixture, two experts whose scores differ by no more than rounding may change places, and the token's logits with
them: a tie, no fault. So the artifact's routers are compared by their scores, and the logits under the experts that the
packed weights chose.
"""

import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from coldpress.compiler.stages.verify.divergence import SourceComparison
from coldpress.runtime.artifact.reader import open_artifact
from coldpress.runtime.generate.likelihood import sum_nll
from coldpress.runtime.generate.session import Session
from coldpress.runtime.plan.budget import choose_plan
from coldpress.runtime.routers import router_of
from coldpress.schemas.layout import Plan

log = logging.getLogger(__name__)

COUNTED_OF_MIXTURES = 0.99
"""Quantile of the errors that counts for a mixture of experts: a token whose own experts are tied in the packed weights
loses more to the format than others do."""

BUFFER_BYTES = 32 << 20
"""The read buffer of dense logits; the stage multiplies half of it at a time. A plan's buffer is made for the reads of
one token: it holds so few units that adding their products up takes a seventh of the pass
(docs/experiments/builds.md)."""


@dataclass(frozen=True)
class Compared:
    nll_source: tuple[float, ...]
    """Mean nats per token of each block."""
    nll_dense: tuple[float, ...]
    """The same for the artifact's dense logits."""
    max_logit_error: float


def of_dense_run(watch: SourceComparison, block_nll: tuple[float, ...]) -> Compared:
    """Returns the figures of a run that used every unit: its logits are the dense ones."""
    with np.errstate(invalid="ignore"):  # both propagate NaN, and logits that are all 0 lead to it
        error = float(watch.errors.max() / watch.largest.max())
    return Compared(tuple(watch.nll_source.mean(axis=1).tolist()), block_nll, error)


class DenseComparison:
    """Runs blocks through the artifact densely, and measures how well it and the source predict.

    Blocks come in any order, and from several threads: the source's logits of a block are computed once, for this and
    for whatever else compares with them.
    """

    def __init__(
        self,
        folder: str,
        blocks: np.ndarray,
        packed: Callable[[int], np.ndarray] | None = None,
        router_scores: Mapping[int, Sequence[np.ndarray]] = MappingProxyType({}),
    ) -> None:
        """Opens the artifact.

        Args:
            blocks: int32 [num_blocks, block_tokens].
            packed: Block -> logits of the packed weights, float32 [block_tokens, vocab_size]; None if they are the
                source's.
            router_scores: Layer -> of each block, the scores of the packed weights' router, float32 [block_tokens,
                num_experts]; of no layer that is not a mixture's.
        """
        self._session, self._blocks, self._packed = Session(folder, plan=_reading_much(folder)), blocks, packed
        self._one_at_a_time, self._router_scores = threading.Lock(), router_scores
        self._router_errors, self._ties = np.zeros(blocks.shape), 0
        self._errors, self._largest = np.full(blocks.shape, np.nan), np.full(len(blocks), np.nan)
        self._nll_source, self._nll_dense = np.full(len(blocks), np.nan), np.full(len(blocks), np.nan)

    def compared(self, source: Callable[[int], np.ndarray], index: int) -> np.ndarray:
        """Returns the source's logits of a block, float32 [block_tokens, vocab_size], after comparing it."""
        block, of_source = self._blocks[index], source(index)
        expected = of_source if self._packed is None else self._packed(index)
        with self._one_at_a_time:
            found, under_same = self._dense(block, index)
        self._errors[index] = np.abs(under_same - expected).max(axis=1)
        self._largest[index] = np.abs(expected).max()
        self._nll_source[index] = sum_nll(of_source[:-1], block[1:]) / (len(block) - 1)
        self._nll_dense[index] = sum_nll(found[:-1], block[1:]) / (len(block) - 1)
        return of_source

    def _dense(self, block: np.ndarray, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the artifact's logits, and those under the experts that the packed weights chose."""
        theirs = {layer: scores[index] for layer, scores in self._router_scores.items()}
        found, own = self._prefill(block)
        num_ties = sum(
            int((self._chosen(own[layer]) != self._chosen(theirs[layer])).any(axis=1).sum()) for layer in theirs
        )
        under_same = found
        if num_ties:
            self._ties += num_ties
            under_same, own = self._prefill(block, theirs)
        for layer, scores in theirs.items():
            error = np.abs(own[layer] - scores).max(axis=1) / np.abs(scores).max()
            self._router_errors[index] = np.maximum(self._router_errors[index], error)
        return found, under_same

    def _prefill(
        self, block: np.ndarray, forced: Mapping[int, np.ndarray] = MappingProxyType({})
    ) -> tuple[np.ndarray, dict[int, np.ndarray]]:
        """Returns logits, and layer -> its router's scores; layers in `forced` choose by these instead."""
        decoder, seen = self._session.decoder, defaultdict[int, list[np.ndarray]](list)

        def prior(layer: int, scores_TE: np.ndarray) -> np.ndarray:
            start = sum(map(len, seen[layer]))
            seen[layer].append(scores_TE.copy())
            return forced[layer][start : start + len(scores_TE)] if layer in forced else scores_TE

        decoder.begin(len(block))
        decoder.prefill_prior = prior
        try:
            logits = decoder.prefill(block.astype(np.int64))
        finally:
            decoder.prefill_prior = None
        return logits, {layer: np.concatenate(parts) for layer, parts in seen.items()}

    def _chosen(self, scores_TE: np.ndarray) -> np.ndarray:
        return router_of(self._session.decoder.spec).choose(scores_TE)

    def result(self) -> Compared:
        """Returns the figures of all blocks; NaN for a block that did not come."""
        if self._ties:
            log.info(
                "verify: %d times a token's experts differ from the packed weights'; the routers' scores by at most "
                "%.1e of the largest",
                self._ties,
                self._router_errors.max(),
            )
        counted = COUNTED_OF_MIXTURES if self._session.artifact.manifest.model.is_mixture else 1.0
        with np.errstate(invalid="ignore"):  # as above
            errors = np.maximum(self._errors / np.max(self._largest), self._router_errors)
        error = np.quantile(errors, counted, method="higher")
        return Compared(tuple(self._nll_source.tolist()), tuple(self._nll_dense.tolist()), float(error))


def _reading_much(folder: str) -> Plan:
    """Returns the largest plan with a read buffer of at least `BUFFER_BYTES` beside the rest of its budget."""
    plan = choose_plan(open_artifact(folder).manifest)
    buffer_bytes = max(BUFFER_BYTES, plan.read_buffer_bytes)
    budget_bytes = plan.dram_budget_bytes + buffer_bytes - plan.read_buffer_bytes
    return plan.model_copy(update={"read_buffer_bytes": buffer_bytes, "dram_budget_bytes": budget_bytes})
