"""Measures how far an artifact's next tokens are from its source's on the same text, where perplexity says little.

The figures are llama.cpp's KL statistics: Kullback-Leibler divergence of the artifact's distribution from the source's
(mean, 99.9th percentile, largest), the root mean square change of the true token's probability, and how often both
give the highest probability to the same token. Errors are those of a mean over blocks (compiler/block_statistics.py),
because the tokens of one block are not independent, which llama.cpp assumes.
"""

import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from scipy.special import log_softmax

from coldpress.compiler.block_statistics import standard_error
from coldpress.schemas.metrics import Divergence

RARE = 99.9
"""Percentile of the divergence that stands for the worst tokens without depending on a single one."""


ROWS_AT_A_TIME = 16
"""Rows of logits that a core compares at once, in float64."""


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
