"""Decides when the next prompts of a batch begin: when idle slots have cost as much as one prefill pass.

A prefill pass over flash takes as long for a few short prompts as for many, so that it is cheaper to begin several
prompts together; but slots that wait for more prompts are idle. Slots become free one after the other. So the cost of
idle slots grows with the square of the waiting time, the cost of a pass per prompt falls with it, and their sum is
least where both are equal (Harris 1913, the economic order quantity).

Both costs are measured. An idle slot costs the time per token by which a pass exceeds a full batch's: much where all
sequences share the reads, nothing where computing takes the same time for each token. A prefill pass costs as much as
the quickest one so far, which errs on the side of waiting. A pass holds at most one chunk of tokens; prompts that fill
a chunk do not wait.
"""

import math


class Admission:
    def __init__(self, chunk_tokens: int) -> None:
        """`chunk_tokens`: the most tokens of a prefill pass."""
        self._chunk_tokens = chunk_tokens
        self._dense_s, self._idle_s = math.inf, 0.0
        self._most, self._passes, self._most_s = 0, 0, 0.0

    def prefilled(self, num_passes: int, seconds: float) -> None:
        self._dense_s = min(self._dense_s, seconds / num_passes)
        self._idle_s = 0.0

    def decoded(self, num_tokens: int, seconds: float, *, idle: bool) -> None:
        """Notes a pass that decoded one token of each of `num_tokens` sequences; `idle`: whether slots were free."""
        if num_tokens > self._most:
            self._most, self._passes, self._most_s = num_tokens, 0, 0.0
        if num_tokens == self._most:
            self._passes, self._most_s = self._passes + 1, self._most_s + seconds
        if idle:
            # the pass's seconds beyond what its tokens would take at the per-token time of the fullest passes
            self._idle_s += seconds - num_tokens * self._most_s / (self._passes * self._most)

    def pays(self, num_tokens: int) -> bool:
        """Returns whether prompts of `num_tokens` tokens in total should begin now rather than wait for more."""
        return self._idle_s >= self._dense_s * (1 - num_tokens / self._chunk_tokens)


class AtOnce:
    """Begins waiting prompts as soon as a pass has decoded tokens since the last prefill.

    For people who wait for their first token. The pass between two prefills keeps prompts that come all the time from
    stopping the sequences that run.
    """

    def __init__(self) -> None:
        self._has_decoded = False

    def prefilled(self, num_passes: int, seconds: float) -> None:
        self._has_decoded = False

    def decoded(self, num_tokens: int, seconds: float, *, idle: bool) -> None:
        self._has_decoded = True

    def pays(self, num_tokens: int) -> bool:
        return self._has_decoded
