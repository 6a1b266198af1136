"""Logits to the next token: the largest, or a seeded draw from the likeliest. Pure numpy, float64 probabilities."""

from dataclasses import dataclass

import numpy as np

from schemas.errors import ColdpressError


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen; temperature 0 takes the largest logit, the lower id among equals."""

    temperature: float = 0.0
    top_p: float = 1.0
    """Only the fewest likeliest tokens that together reach this probability are drawn from."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not (0 <= self.temperature < float("inf") and 0 < self.top_p <= 1 and self.seed >= 0):
            raise ColdpressError(
                f"the sampling is temperature {self.temperature}, top_p {self.top_p}, seed {self.seed}; expected a "
                "temperature of at least 0, a top_p above 0 and at most 1, and a seed of at least 0"
            )


class Chooser:
    """Chooses one token after another; the same settings and logits give the same tokens."""

    def __init__(self, sampling: Sampling) -> None:
        """Seeds the draws."""
        self._sampling = sampling
        self._random = np.random.default_rng(sampling.seed)

    def choose(self, logits: np.ndarray) -> int:
        """The next token for `logits` float32 [vocab_size].

        Raises:
            ColdpressError: if the logits are not finite.
        """
        if not np.isfinite(logits).all():
            raise ColdpressError("the model's logits are not finite numbers; its weights overflow in this arithmetic")
        if self._sampling.temperature == 0:
            return int(np.argmax(logits))
        tokens, probabilities = nucleus(logits, self._sampling.temperature, self._sampling.top_p)
        return int(self._random.choice(tokens, p=probabilities))


def nucleus(logits: np.ndarray, temperature: float, top_p: float) -> tuple[np.ndarray, np.ndarray]:
    """The tokens that may be drawn, likeliest first, and their probabilities, float64, which sum to 1."""
    below = logits.astype(np.float64) - logits.max()
    with np.errstate(over="ignore"):  # at the lowest temperatures: all but the likeliest are infinitely far below
        weights = np.exp(below / temperature)
    tokens = np.argsort(-weights, kind="stable")
    sums = np.cumsum(weights[tokens])
    count = int(np.searchsorted(sums, top_p * sums[-1])) + 1
    tokens = tokens[:count]
    return tokens, weights[tokens] / weights[tokens].sum()
