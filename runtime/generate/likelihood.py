"""Measures how well a run predicted text: negative log likelihoods and perplexity."""

from dataclasses import dataclass

import numpy as np

from coldpress.schemas.metrics import RunMetrics

ROWS_AT_A_TIME = 8
"""Rows of logits in float64 that stay in a processor's cache."""


@dataclass(frozen=True)
class Quality:
    block_nll: tuple[float, ...]
    """Mean negative log likelihood per token, in nats, of each block."""
    num_predicted: int
    metrics: RunMetrics
    block_tokens_per_s: tuple[float, ...]
    """Measured decoding speed of each block that decoded tokens."""

    @property
    def mean_nll(self) -> float:
        """Returns the mean negative log likelihood per token; the mean of blocks will do, as all have one length."""
        return float(np.mean(self.block_nll))

    @property
    def perplexity(self) -> float:
        return float(np.exp(self.mean_nll))


def sum_nll(logits: np.ndarray, targets: np.ndarray) -> float:
    """Returns the sum of -log softmax(logits)[target] in nats, computed in float64. `logits` are floats
    [T, vocab_size], `targets` int [n], n <= T; rows of logits after the first n are ignored."""
    nll = np.empty(len(targets))
    for start in range(0, len(targets), ROWS_AT_A_TIME):
        part = slice(start, min(start + ROWS_AT_A_TIME, len(targets)))
        rows = logits[part].astype(np.float64)
        top = rows.max(axis=1)  # subtracted so that exp cannot overflow
        log_sums = np.log(np.exp(rows - top[:, None]).sum(axis=1)) + top
        nll[part] = log_sums - rows[np.arange(len(rows)), targets[part]]
    return float(nll.sum())
