"""Measures how far an artifact's next tokens are from its source's on the same text, where perplexity says little.

The figures are llama.cpp's KL statistics: Kullback-Leibler divergence of the artifact's distribution from the source's
(mean, 99.9th percentile, largest), the root mean square change of the true token's probability, and how often both
give the highest probability to the same token. Errors are those of a mean over blocks (compiler/block_statistics.py),
because the tokens of one block are not independent, which llama.cpp assumes.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from scipy.special import log_softmax

from coldpress.compiler.block_statistics import standard_error
from coldpress.schemas.metrics import Divergence

RARE = 99.9
"""Percentile of the divergence that stands for the worst tokens without depending on a single one."""


@dataclass
class SourceComparison:
    """Compares the logits of a run over `blocks` with the source's, token by token.

    Call it with the logits of consecutive positions, float32 [any number, vocab_size], in order, all positions of a
    block but the last (runtime/generate/session.py: `Session.perplexity`).
    """

    source: Callable[[int], np.ndarray]
    """Maps a block to the source's logits, float32 [block_tokens, vocab_size]; called once for each block, in order."""
    blocks: np.ndarray
    """int [num_blocks, block_tokens]."""
    kld: list[float] = field(default_factory=list)
    delta_p: list[float] = field(default_factory=list)
    same: list[bool] = field(default_factory=list)
    _expected: np.ndarray | None = None

    def __call__(self, logits: np.ndarray) -> None:
        """Records the divergence of these rows."""
        for row in logits:
            block, position = divmod(len(self.kld), self.blocks.shape[1] - 1)
            if position == 0:
                self._expected = self.source(block)
            assert self._expected is not None
            expected = self._expected[position]
            self.same.append(bool(expected.argmax() == row.argmax()))
            target = self.blocks[block, position + 1]
            with np.errstate(invalid="ignore"):  # logits of a ruined artifact give NaN, which the record keeps
                p, q = log_softmax(expected.astype(np.float64)), log_softmax(row.astype(np.float64))
                self.kld.append(float((np.exp(p) * (p - q)).sum()))
                self.delta_p.append(float(np.exp(q[target]) - np.exp(p[target])))

    def top1_agreement(self) -> tuple[float, float]:
        """Returns the share of tokens whose most likely successor is the source's, and its error."""
        return _mean_of(self._by_block(self.same))

    def divergence(self) -> Divergence:
        """Returns the figures over all blocks."""
        kld = self._by_block(self.kld)
        mean, error = _mean_of(kld)
        mean_square, square_error = _mean_of(self._by_block(self.delta_p) ** 2)
        rms = math.sqrt(mean_square)
        return Divergence(
            mean_kld=mean,
            mean_kld_error=error,
            p999_kld=float(np.percentile(kld, RARE)),
            max_kld=float(kld.max()),
            rms_delta_p=rms,
            rms_delta_p_error=square_error / (2 * rms) if rms else square_error,
        )

    def _by_block(self, values: list[Any]) -> np.ndarray:
        return np.array(values, np.float64).reshape(len(self.blocks), -1)


def _mean_of(values: np.ndarray) -> tuple[float, float]:
    """Returns the mean of [num_blocks, n], and the standard error of that mean over blocks."""
    of_block = values.mean(axis=1)
    return float(of_block.mean()), standard_error(of_block)
