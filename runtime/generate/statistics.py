"""Records what each new token cost, and computes how costs spread: 5th percentile, median, 95th percentile."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Token:
    """A new token and its cost. The first token carries the dense prefill's cost; the prefill makes no cache lookups.

    If one pass gave several tokens (runtime/generate/speculation.py), the first carries the cost of the pass, and the
    others have zeros.
    """

    id: int
    seconds: float = 0.0
    """From the previous token to the choice of this one, drafts included; the caller's time between does not count."""
    flash_s: float = 0.0
    """The part of `seconds` spent waiting for flash; with simulated flash, the modelled device's seconds."""
    reads: int = 0
    read_bytes: int = 0
    """Bytes moved from flash, pages included."""
    hits: int = 0
    misses: int = 0
    pass_number: int = 0
    """The pass through the layers that gave the token; 0 is the prefill."""
    drafted: int = 0
    """Drafts that the pass checked; only the first token of a pass has them."""
    accepted: bool = False
    """Whether the token was a draft."""

    @property
    def leads(self) -> bool:
        """Returns whether the token is the first of its pass, which carries the cost."""
        return self.seconds > 0

    @property
    def hit_rate(self) -> float:
        """Returns hits over lookups; 0 without lookups."""
        lookups = self.hits + self.misses
        return self.hits / lookups if lookups else 0.0


@dataclass(frozen=True)
class Spread:
    """How a figure differs from token to token; percentiles are interpolated linearly."""

    p5: float
    median: float
    p95: float


@dataclass(frozen=True)
class TokenSpreads:
    """The spread of each figure of a token."""

    seconds: Spread
    flash_s: Spread
    reads: Spread
    read_bytes: Spread
    hit_rate: Spread


@dataclass(frozen=True)
class Drafted:
    """How many drafts a run accepted."""

    passes: int
    """Passes through the layers, without the prefill."""
    drafted: int
    accepted: int
    acceptance: float
    """Accepted drafts over drafts; 0 without drafts."""
    tokens_per_pass: float


def drafted(decoded: Sequence[Token]) -> Drafted | None:
    """Counts the drafts of decoded tokens (all but a run's first); returns None without tokens."""
    if not decoded:
        return None
    passes = sum(token.leads for token in decoded)
    num_drafted, num_accepted = sum(token.drafted for token in decoded), sum(token.accepted for token in decoded)
    share = num_accepted / num_drafted if num_drafted else 0.0
    return Drafted(passes, num_drafted, num_accepted, share, len(decoded) / passes)


def spreads(decoded: Sequence[Token]) -> TokenSpreads | None:
    """Computes the spreads of decoded tokens (all but a run's first); returns None without tokens.

    Tokens of one pass count once, with the cost of the pass.
    """
    if not decoded:
        return None
    leading = [token for token in decoded if token.leads]

    def spread(figure: Callable[[Token], float]) -> Spread:
        p5, median, p95 = np.percentile([figure(token) for token in leading], [5, 50, 95])
        return Spread(float(p5), float(median), float(p95))

    return TokenSpreads(
        seconds=spread(lambda token: token.seconds),
        flash_s=spread(lambda token: token.flash_s),
        reads=spread(lambda token: token.reads),
        read_bytes=spread(lambda token: token.read_bytes),
        hit_rate=spread(lambda token: token.hit_rate),
    )
