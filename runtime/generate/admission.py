"""When the next prompts of a batch begin: as soon as places that are free have cost what beginning costs.

A dense pass over flash takes as long for a few short prompts as for many, so that prompts which begin together are
cheaper; places that wait for more of them are idle meanwhile. Places become free one after the other, so that what idle
ones cost grows with the square of the time waited, what a pass costs each prompt falls with it, and the sum is least
where both are the same (Harris 1913, the economic order quantity).

Both are measured. An idle place costs what a pass through the layers takes for each of its tokens more than with most
of them: much where what any of them uses is read once for all, nothing where computing takes as long for each. A dense
pass costs what the quickest took, its tokens included, which errs on the side of waiting. It takes at most a chunk of
tokens: as full as that, it has nothing to wait for.
"""

import math


class Renewal:
    """What passes of a batch took, and what follows from it."""

    def __init__(self, chunk_tokens: int) -> None:
        """A dense pass over flash takes at most so many tokens."""
        self._chunk_tokens = chunk_tokens
        self._dense_s, self._idle_s = math.inf, 0.0
        self._most, self._passes, self._most_s = 0, 0, 0.0

    def prefilled(self, num_passes: int, seconds: float) -> None:
        """So many dense passes have taken in some prompts."""
        self._dense_s = min(self._dense_s, seconds / num_passes)
        self._idle_s = 0.0

    def decoded(self, num_tokens: int, seconds: float, *, idle: bool) -> None:
        """A pass has given so many tokens, one of each sequence, and there were `idle` places beside them or not."""
        if num_tokens > self._most:
            self._most, self._passes, self._most_s = num_tokens, 0, 0.0
        if num_tokens == self._most:
            self._passes, self._most_s = self._passes + 1, self._most_s + seconds
        if idle:
            self._idle_s += seconds - num_tokens * self._most_s / (self._passes * self._most)

    def pays(self, num_tokens: int) -> bool:
        """Whether prompts of so many tokens begin now, or wait for others to begin with."""
        return self._idle_s >= self._dense_s * (1 - num_tokens / self._chunk_tokens)
