"""Turns logits into the log-probabilities of a token and of the likeliest ones, before temperature and penalties."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural logarithms of the probabilities of a token, and of the likeliest ones in its place."""

    id: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    """(id, log-probability) of the likeliest tokens, likeliest first, the lower id first among equals."""


def logprobs_of(logits: np.ndarray, token_id: int, num_top: int) -> TokenLogprobs:
    """Returns the log-probabilities of `token_id` and of the `num_top` likeliest tokens in logits [vocab_size]."""
    below = logits.astype(np.float64) - logits.max()  # so that exp cannot overflow
    logprobs = below - np.log(np.exp(below).sum())
    num_top = min(num_top, logprobs.size)
    likeliest = np.argpartition(-logprobs, num_top - 1)[:num_top] if num_top else np.empty(0, np.int64)
    if num_top:  # of several that are as likely as the last one, those with the lowest ids
        likeliest = np.flatnonzero(logprobs >= logprobs[likeliest].min())
    likeliest = likeliest[np.argsort(-logprobs[likeliest], kind="stable")][:num_top]
    return TokenLogprobs(
        token_id, float(logprobs[token_id]), tuple((int(token), float(logprobs[token])) for token in likeliest)
    )
