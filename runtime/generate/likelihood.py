"""How well text was predicted: sums of negative log likelihoods, and the perplexity of a run."""

from dataclasses import dataclass

import numpy as np

from coldpress.schemas.metrics import RunMetrics


@dataclass(frozen=True)
class Quality:
    """How well given text was predicted, and what that cost."""

    block_nll: tuple[float, ...]
    """Mean negative log likelihood of a token, in nats, of each block."""
    num_predicted: int
    metrics: RunMetrics
    block_tokens_per_s: tuple[float, ...]
    """Measured decoding speed of each block in which tokens were decoded."""

    @property
    def mean_nll(self) -> float:
        """That of all tokens; blocks are of one length."""
        return float(np.mean(self.block_nll))

    @property
    def perplexity(self) -> float:
        """exp of the mean."""
        return float(np.exp(self.mean_nll))


def sum_nll(logits: np.ndarray, targets: np.ndarray) -> float:
    """Sum of -log softmax(logits)[target] in nats, float64: logits [T, vocab_size], targets int [T] or one fewer."""
    rows = logits[: len(targets)].astype(np.float64)
    top = rows.max(axis=1)
    log_sums = np.log(np.exp(rows - top[:, None]).sum(axis=1)) + top
    return float((log_sums - rows[np.arange(len(targets)), targets]).sum())
