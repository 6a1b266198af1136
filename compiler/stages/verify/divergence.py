"""Measures how far an artifact's next tokens are from its source's on the same text, where perplexity says little.

The figures are llama.cpp's KL statistics: Kullback-Leibler divergence of the artifact's distribution from the source's
(mean, 99.9th percentile, largest), the root mean square change of the true token's probability, and how often both
give the highest probability to the same token. Errors are those of a mean over blocks (compiler/block_statistics.py),
because the tokens of one block are not independent, which llama.cpp assumes.

An artifact's dense logits are compared with those of the weights that were packed. In a mixture, two experts whose
scores differ by no more than rounding may change places, and the token's logits with them: a tie, no fault. So the
artifact's routers are compared by their scores, and the logits under the experts that the packed weights chose.
"""

import logging
import math
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from scipy.special import log_softmax

from coldpress.compiler.block_statistics import standard_error
from coldpress.runtime.artifact.reader import open_artifact
from coldpress.runtime.dram.budget import choose_plan
from coldpress.runtime.generate.likelihood import sum_nll
from coldpress.runtime.generate.session import Session
from coldpress.runtime.routers import router_of
from coldpress.schemas.metrics import Divergence

LOG = logging.getLogger(__name__)
RARE = 99.9
"""Percentile of the divergence that stands for the worst tokens without depending on a single one."""
ROWS_AT_A_TIME = 16
"""Rows of logits that a core compares at once, in float64."""
COUNTED_OF_MIXTURES = 0.99
"""Quantile of the errors that counts for a mixture of experts: a token whose own experts are tied in the packed weights
loses more to the format than others do."""
BUFFER_BYTES = 32 << 20
"""The read buffer of dense logits; the stage multiplies half of it at a time. A plan's buffer is made for the reads of
one token: it holds so few units that adding their products up takes a seventh of the pass
(docs/experiments/builds.md)."""


@dataclass
class SourceComparison:
    """Compares the logits of a run over `blocks` with the source's, token by token.

    Call it with the logits of consecutive positions, float32 [any number, vocab_size], in order, all positions of a
    block but the last (runtime/generate/session.py: `Session.perplexity`).
    """

    source: Callable[[int], np.ndarray]
    """Maps a block to the source's logits, float32 [block_tokens, vocab_size]; called once for each block."""
    blocks: np.ndarray
    """int [num_blocks, block_tokens]."""
    threads: int = 1

    def __post_init__(self) -> None:
        shape = (len(self.blocks), self.blocks.shape[1] - 1)
        self.kld, self.delta_p, self.same = np.full(shape, np.nan), np.full(shape, np.nan), np.zeros(shape, bool)
        self.nll_source, self.errors, self.largest = (np.full(shape, np.nan) for _ in range(3))
        """Nats of the source per token, the largest difference of two logits, and the source's largest logit."""
        self._receive = self.begin(0)

    def __call__(self, logits: np.ndarray) -> None:
        self._receive(logits)

    @contextmanager
    def ahead(self) -> Iterator[Callable[[np.ndarray], None]]:
        """Yields what records the rows of a run over all blocks; several cores compute the source one block ahead."""
        if self.threads < 2:
            yield self.begin(0)
            return
        with ThreadPoolExecutor(1) as pool:
            following = {0: pool.submit(self.source, 0)}

            def source(block: int) -> np.ndarray:
                if block + 1 < len(self.blocks):
                    following[block + 1] = pool.submit(self.source, block + 1)
                return following.pop(block).result()

            yield self.begin(0, source)

    def begin(self, block: int, source: Callable[[int], np.ndarray] | None = None) -> Callable[[np.ndarray], None]:
        """Returns what records the rows of a run that begins at `block`; several runs may go on at once. `source` is
        called in place of the field, with one block after the other."""
        source = source or self.source
        done, expected = 0, np.empty((0, 0))

        def receive(logits: np.ndarray) -> None:
            nonlocal done, expected
            while len(logits):
                ahead, position = divmod(done, self.kld.shape[1])
                if position == 0:
                    expected = source(block + ahead)
                rows = logits[: self.kld.shape[1] - position]
                self._record(block + ahead, position, expected[position : position + len(rows)], rows)
                done, logits = done + len(rows), logits[len(rows) :]

        return receive

    def _record(self, block: int, first: int, expected: np.ndarray, found: np.ndarray) -> None:
        def some(start: int) -> None:
            part = slice(start, start + ROWS_AT_A_TIME)
            rows, place = found[part], slice(first + start, first + min(start + ROWS_AT_A_TIME, len(found)))
            targets = self.blocks[block, place.start + 1 : place.stop + 1, None]
            self.same[block, place] = expected[part].argmax(axis=1) == rows.argmax(axis=1)
            self.errors[block, place] = np.abs(rows - expected[part]).max(axis=1)
            self.largest[block, place] = np.abs(expected[part]).max(axis=1)
            with np.errstate(invalid="ignore"):  # logits of a ruined artifact give NaN, which the record keeps
                p, q = (log_softmax(logits.astype(np.float64), axis=1) for logits in (expected[part], rows))
                self.kld[block, place] = (np.exp(p) * (p - q)).sum(axis=1)
                of_source, of_artifact = (np.take_along_axis(logs, targets, 1)[:, 0] for logs in (p, q))
                self.nll_source[block, place] = -of_source
                self.delta_p[block, place] = np.exp(of_artifact) - np.exp(of_source)

        starts = range(0, len(found), ROWS_AT_A_TIME)
        if len(starts) == 1:
            return some(0)
        with ThreadPoolExecutor(self.threads) as pool:
            list(pool.map(some, starts))

    def top1_agreement(self) -> tuple[float, float]:
        """Returns the share of tokens whose most likely successor is the source's, and its error."""
        return _mean_of(self.same)

    def divergence(self) -> Divergence:
        mean, error = _mean_of(self.kld)
        mean_square, square_error = _mean_of(self.delta_p**2)
        rms = math.sqrt(mean_square)
        return Divergence(
            mean_kld=mean,
            mean_kld_error=error,
            p999_kld=float(np.percentile(self.kld, RARE)),
            max_kld=float(self.kld.max()),
            rms_delta_p=rms,
            rms_delta_p_error=square_error / (2 * rms) if rms else square_error,
        )


def _mean_of(values: np.ndarray) -> tuple[float, float]:
    """Returns the mean of [num_blocks, n], and the standard error of that mean over blocks."""
    of_block = values.mean(axis=1)
    return float(of_block.mean()), standard_error(of_block)


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
        """Opens the artifact. `blocks` is int32 [num_blocks, block_tokens]; `packed` maps a block to logits of the
        packed weights, float32 [block_tokens, vocab_size], None if they are the source's; `router_scores` a mixture's
        layer to the scores of the packed weights' router in each block, float32 [block_tokens, num_experts]."""
        plan = choose_plan(open_artifact(folder).manifest)
        buffer_bytes = max(BUFFER_BYTES, plan.read_buffer_bytes)  # beside the rest of the plan's budget
        budget_bytes = plan.dram_budget_bytes + buffer_bytes - plan.read_buffer_bytes
        plan = plan.model_copy(update={"read_buffer_bytes": buffer_bytes, "dram_budget_bytes": budget_bytes})
        self._session, self._blocks, self._packed = Session(folder, plan=plan), blocks, packed
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
            LOG.info(
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
