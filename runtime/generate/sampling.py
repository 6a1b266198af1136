"""Chooses the next token from logits: the largest, or a seeded draw from the likeliest. Probabilities are float64.

Settings act in the order of transformers' generation: repetition penalty (in greedy decoding, too), temperature, top_k,
top_p, min_p; each of the last three sees the probabilities of the tokens that earlier settings left. llama.cpp has the
same settings, but applies the temperature last, and looks for repetitions only among the last 64 tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from coldpress.schemas.errors import ColdpressError

PENALTIES = (0.01, 100.0)
"""Least and largest penalty: beyond them it drowns the logits, and its products with them may overflow."""


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen; temperature 0 takes the largest logit, and the lowest id among equal ones."""

    temperature: float = 0.0
    top_p: float = 1.0
    """Draws only from the smallest set of likeliest tokens that together reach this probability."""
    seed: int = 0
    top_k: int = 0
    """Draws only from this many likeliest tokens, and from ties with the last of them; 0 for all."""
    min_p: float = 0.0
    """Draws only from tokens with at least this fraction of the likeliest token's probability."""
    repetition_penalty: float = 1.0
    """Divides positive logits of tokens in the prompt or the output, and multiplies negative ones (CTRL, section
    4.1)."""

    def __post_init__(self) -> None:
        least, most = PENALTIES
        for name, holds, expected in (
            ("temperature", 0 <= self.temperature < float("inf"), "a number of at least 0"),
            ("top_p", 0 < self.top_p <= 1, "a share above 0 and at most 1"),
            ("seed", self.seed >= 0, "a whole number of at least 0"),
            ("top_k", self.top_k >= 0, "a whole number of at least 1, or 0 for all tokens"),
            ("min_p", 0 <= self.min_p <= 1, "a share from 0 to 1"),
            ("repetition_penalty", least <= self.repetition_penalty <= most, f"a number from {least} to {most}"),
        ):
            if not holds:
                raise ColdpressError(f"the sampling's {name} is {getattr(self, name)}, expected {expected}")


class Chooser:
    """Chooses the tokens of one sequence; the same settings, prompt and logits give the same tokens."""

    def __init__(self, sampling: Sampling, prompt_ids: Sequence[int] = ()) -> None:
        """Seeds the draws, and counts the prompt's tokens as used."""
        self._sampling, self._used = sampling, set(prompt_ids)
        self._random = np.random.default_rng(sampling.seed)

    def choose(self, logits: np.ndarray) -> int:
        """Chooses the next token from `logits`, float32 [vocab_size], and counts it as used.

        Raises:
            ColdpressError: if the logits are not finite.
        """
        if not np.isfinite(logits).all():
            raise ColdpressError("the model's logits are not finite numbers; its weights overflow in this arithmetic")
        if self._sampling.repetition_penalty != 1:
            used = np.fromiter(self._used, np.int64, len(self._used))
            logits = penalized(logits, used, self._sampling.repetition_penalty)
        if self._sampling.temperature == 0:
            chosen = int(np.argmax(logits))
        else:
            tokens, probabilities = candidates(logits, self._sampling)
            chosen = int(self._random.choice(tokens, p=probabilities))
        self._used.add(chosen)
        return chosen


def penalized(logits: np.ndarray, used: np.ndarray, penalty: float) -> np.ndarray:
    """Returns logits, float64 [vocab_size], with `penalty` applied to the tokens `used`, distinct ids int64 [n]."""
    found = logits.astype(np.float64)
    found[used] = np.where(found[used] < 0, found[used] * penalty, found[used] / penalty)
    return found


def candidates(logits: np.ndarray, sampling: Sampling) -> tuple[np.ndarray, np.ndarray]:
    """Returns the tokens that may be drawn at a temperature above 0, and their probabilities.

    Args:
        logits: Finite floats [vocab_size], with the repetition penalty applied.
        sampling: Its temperature, top_k, top_p and min_p.

    Returns:
        Ids int64 [n], likeliest first and lower ids first among equals, and probabilities float64 [n], which sum to 1.
    """
    below = logits.astype(np.float64) - logits.max()
    with np.errstate(over="ignore"):  # a tiny temperature takes all but the likeliest to -inf, which exp makes 0
        weights = np.exp(below / sampling.temperature)
    tokens = np.arange(len(below))
    if 0 < sampling.top_k < weights.size:
        tokens = np.flatnonzero(below >= np.partition(below, -sampling.top_k)[-sampling.top_k])
    tokens = tokens[np.argsort(-weights[tokens], kind="stable")]
    if sampling.top_p < 1:  # at 1, rounded sums would reach the whole before the last token
        sums = weights[tokens].cumsum()
        tokens = tokens[: int(sums.searchsorted(sampling.top_p * sums[-1])) + 1]
    tokens = tokens[weights[tokens] >= sampling.min_p * weights[tokens[0]]]
    return tokens, weights[tokens] / weights[tokens].sum()
