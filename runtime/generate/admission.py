"""Decides when the next prompts of a batch begin: when idle slots have cost as much as one prefill pass.

A prefill pass over flash takes as long for a few short prompts as for many, so that it is cheaper to begin several
prompts together; but slots that wait for more prompts are idle. Slots become free one after the other. So the cost of
idle slots grows with the square of the waiting time, the cost of a pass per prompt falls with it, and their sum is
least where both are equal (Harris 1913, the economic order quantity).

Both costs are measured. An idle slot costs the time per token that a pass takes beyond that of a full batch: much where
all sequences share the reads, nothing where computing takes the same time for each token. A prefill pass costs what the
quickest one took, which errs on the side of waiting. It takes at most one chunk of tokens; prompts that fill it do not
wait.
"""

import math


class Renewal:
    """What passes of a batch took, and what follows from it."""

    def __init__(self, chunk_tokens: int) -> None:
        """`chunk_tokens`: the most tokens of a prefill pass."""
        self._chunk_tokens = chunk_tokens
        self._dense_s, self._idle_s = math.inf, 0.0
        self._most, self._passes, self._most_s = 0, 0, 0.0

    def prefilled(self, num_passes: int, seconds: float) -> None:
        """Notes the seconds of `num_passes` prefill passes."""
        self._dense_s = min(self._dense_s, seconds / num_passes)
        self._idle_s = 0.0

    def decoded(self, num_tokens: int, seconds: float, *, idle: bool) -> None:
        """Notes a pass that decoded `num_tokens` tokens, one of each sequence; `idle`: whether slots were free."""
        if num_tokens > self._most:
            self._most, self._passes, self._most_s = num_tokens, 0, 0.0
        if num_tokens == self._most:
            self._passes, self._most_s = self._passes + 1, self._most_s + seconds
        if idle:
            self._idle_s += seconds - num_tokens * self._most_s / (self._passes * self._most)

    def pays(self, num_tokens: int) -> bool:
        """Whether prompts of `num_tokens` tokens begin now, or wait for more prompts."""
        return self._idle_s >= self._dense_s * (1 - num_tokens / self._chunk_tokens)
