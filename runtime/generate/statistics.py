"""What each new token took, as a record, and how such records spread: 5th percentile, median, 95th percentile."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Token:
    """A new token. The first one's figures are those of the dense prefill, which looks up nothing in caches.

    Of tokens that one pass gave together (runtime/generate/speculation.py) the first has what the pass took, the others
    nothing.
    """

    id: int
    seconds: float = 0.0
    """From the token before it to its choice, drafts included; what the caller did between does not count."""
    flash_s: float = 0.0
    """Of them, waiting for flash; with simulated flash, the seconds of the modelled device."""
    reads: int = 0
    read_bytes: int = 0
    """Bytes moved from flash, pages included."""
    hits: int = 0
    misses: int = 0
    pass_number: int = 0
    """The pass through the layers that gave it; 0 is the prefill."""
    drafted: int = 0
    """Drafts that the pass checked, at the first of its tokens."""
    accepted: bool = False
    """Whether the token was one of them."""

    @property
    def leads(self) -> bool:
        """Whether it is the first of its pass, which has what the pass took."""
        return self.seconds > 0

    @property
    def hit_rate(self) -> float:
        """Hits over lookups; 0 without lookups."""
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
    """What came of drafts over a run."""

    passes: int
    """Through the layers, the prefill not among them."""
    drafted: int
    accepted: int
    acceptance: float
    """Accepted drafts over drafts; 0 without drafts."""
    tokens_per_pass: float


def drafted(decoded: Sequence[Token]) -> Drafted | None:
    """That of decoded tokens, which the first token of a run is not; None of no token."""
    if not decoded:
        return None
    passes = sum(token.leads for token in decoded)
    num_drafted, num_accepted = sum(token.drafted for token in decoded), sum(token.accepted for token in decoded)
    share = num_accepted / num_drafted if num_drafted else 0.0
    return Drafted(passes, num_drafted, num_accepted, share, len(decoded) / passes)


def spreads(decoded: Sequence[Token]) -> TokenSpreads | None:
    """Those of decoded tokens, which the first token of a run is not; None of no token.

    Tokens that one pass gave count once, with what the pass took.
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
