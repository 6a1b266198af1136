"""Logits to the next token: the largest, or a seeded draw from the likeliest. Pure numpy, float64 probabilities.

Settings act in the order of transformers' generation: repetition penalty (on greedy decoding, too), temperature, top_k,
top_p, min_p; each of the last three looks at the probabilities of what those before it left. llama.cpp has the same
settings, but applies the temperature last, and looks for repetitions among the last 64 tokens alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from coldpress.schemas.errors import ColdpressError

PENALTIES = (0.01, 100.0)
"""Beyond these a penalty decides alone, and its products with logits leave what floating point holds."""


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen; temperature 0 takes the largest logit, the lower id among equals."""

    temperature: float = 0.0
    top_p: float = 1.0
    """Only the fewest likeliest tokens that together reach this probability are drawn from."""
    seed: int = 0
    top_k: int = 0
    """Only as many likeliest tokens are drawn from, and what is as likely as the last of them; 0 for all."""
    min_p: float = 0.0
    """Only tokens of at least this share of the likeliest one's probability are drawn from."""
    repetition_penalty: float = 1.0
    """Logits of the prompt's tokens and of new ones are divided by it, negative ones multiplied (CTRL, section 4.1)."""

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
    """Chooses one token after another; the same settings, prompt and logits give the same tokens."""

    def __init__(self, sampling: Sampling, prompt_ids: Sequence[int] = ()) -> None:
        """Seeds the draws."""
        self._sampling, self._used = sampling, set(prompt_ids)
        self._random = np.random.default_rng(sampling.seed)

    def choose(self, logits: np.ndarray) -> int:
        """The next token for `logits` float32 [vocab_size], which counts as used from now on.

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
    """Logits float64 [vocab_size] in which the tokens `used`, int64 distinct ids, are less likely by `penalty`."""
    found = logits.astype(np.float64)
    found[used] = np.where(found[used] < 0, found[used] * penalty, found[used] / penalty)
    return found


def candidates(logits: np.ndarray, sampling: Sampling) -> tuple[np.ndarray, np.ndarray]:
    """The tokens that may be drawn at a temperature above 0, and their probabilities.

    Args:
        logits: Finite, [vocab_size].
        sampling: All but its penalty and its seed counts.

    Returns:
        Ids int64 [n], likeliest first and lower ids first among equals, and probabilities float64 [n], which sum to 1.
    """
    below = logits.astype(np.float64) - logits.max()
    with np.errstate(over="ignore"):  # at the lowest temperatures: all but the likeliest are infinitely far below
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
