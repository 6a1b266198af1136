"""What each new token took, as a record, and how such records spread: 5th percentile, median, 95th percentile."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Token:
    """A new token. The first one's figures are those of the dense prefill, which looks up nothing in caches."""

    id: int
    seconds: float
    """From the token before it to its choice; what the caller did between does not count."""
    flash_s: float
    """Of them, waiting for flash; with simulated flash, the seconds of the modelled device."""
    reads: int
    read_bytes: int
    """Bytes moved from flash, pages included."""
    hits: int
    misses: int

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


def spreads(decoded: Sequence[Token]) -> TokenSpreads | None:
    """Those of decoded tokens, which the first token of a run is not; None of no token."""
    if not decoded:
        return None

    def spread(figure: Callable[[Token], float]) -> Spread:
        p5, median, p95 = np.percentile([figure(token) for token in decoded], [5, 50, 95])
        return Spread(float(p5), float(median), float(p95))

    return TokenSpreads(
        seconds=spread(lambda token: token.seconds),
        flash_s=spread(lambda token: token.flash_s),
        reads=spread(lambda token: token.reads),
        read_bytes=spread(lambda token: token.read_bytes),
        hit_rate=spread(lambda token: token.hit_rate),
    )
