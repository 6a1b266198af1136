"""How far apart two reads may be and still become one, found while running (Ripple 5.1).

The plan's gap is right for the device that the artifact was compiled for. The adaptive gap tries other gaps on some
tokens, wider and narrower ones in turn, and moves to the gap that takes fewer seconds for the bytes that were wanted.
From time to time two tokens read without any gap: where that moves as many bytes per second as the best gap does, the
device is bound by bandwidth and not by operations, and collapse is switched off until such a check finds otherwise. It
observes the store, and decides from the seconds of reads alone: modelled ones in a simulation, which repeats, and in a
run those that were waited for, so that its reads may differ from run to run.
"""

from dataclasses import dataclass

from coldpress.runtime.store.facts import Observer, Purpose, RequestFacts
from coldpress.schemas.layout import Plan

STEPS_DOWN, STEPS_UP = 12, 10
"""Gaps that are tried: the plan's, divided and multiplied by the square root of two so often."""
PROBES = (1, -1, 3, -3)
"""Steps from the current gap to those that are tried in turn; one of a single step may change nothing."""
PROBE_EVERY, PROBE_SELDOM = 4, 64
"""Tokens from one that tries another gap to the next: fewest, and most where no try paid."""
CHECK_EVERY, CHECK_SELDOM = 32, 512
"""Tokens from check to check: fewest, and most where checks find no change."""
CHECK_TOKENS = 2
"""Tokens of a check."""
FEWEST_SHOWN = 4
"""The least step of the gap that shows, in a check, how much bandwidth there is."""
FEWEST = 2
"""Tokens that a gap has to be seen on before it counts."""
WORTH = 0.98
"""Share of the current gap's cost that another must not exceed for a move, so that noise moves little."""
BOUND = 0.95
"""Share of the most bytes per second from which on the device is bound by bandwidth."""
KEPT = 0.8
"""What of earlier tokens counts beside one more."""


@dataclass
class _Tried:
    """A gap, and what tokens with it cost; sums in which older tokens count less."""

    gap_bytes: int
    num_tokens: int = 0
    wanted_bytes: float = 0.0
    read_bytes: float = 0.0
    seconds: float = 0.0

    def add(self, wanted_bytes: int, read_bytes: int, seconds: float) -> None:
        """One more token."""
        self.num_tokens += 1
        self.wanted_bytes = KEPT * self.wanted_bytes + wanted_bytes
        self.read_bytes = KEPT * self.read_bytes + read_bytes
        self.seconds = KEPT * self.seconds + seconds

    @property
    def known(self) -> bool:
        """Whether it was seen on enough tokens."""
        return self.num_tokens >= FEWEST

    def is_cheaper(self, other: "_Tried") -> bool:
        """Whether it takes clearly fewer seconds for what is wanted; products, so that no time is no error."""
        return self.seconds * other.wanted_bytes < WORTH * other.seconds * self.wanted_bytes


class PlansGap(Observer):
    """The plan's gap throughout: learns nothing."""

    def __init__(self, gap_bytes: int) -> None:
        """Keeps the plan's gap."""
        self._gap_bytes = gap_bytes

    @property
    def gap_bytes(self) -> int:
        """For the next reads."""
        return self._gap_bytes


class AdaptiveGap(Observer):
    """The gap of the next reads; learns what reads cost."""

    def __init__(self, start_bytes: int, page_bytes: int) -> None:
        """Begins with the plan's gap.

        Args:
            start_bytes: The plan's.
            page_bytes: Gaps are whole pages: no smaller one joins anything that pages do not.
        """
        first = max(page_bytes, start_bytes)
        steps = [first * 2.0 ** (power / 2) for power in range(-STEPS_DOWN, STEPS_UP + 1)]
        gaps = sorted({0, start_bytes, *(int(gap) // page_bytes * page_bytes for gap in steps)})
        self._tried = [_Tried(gap) for gap in gaps]
        self._current = self._used = gaps.index(start_bytes)
        self._shown = max(self._current, FEWEST_SHOWN)
        self._until_probe = self._probe_every = PROBE_EVERY
        self._until_check, self._check_every = PROBE_EVERY, CHECK_EVERY
        self._num_probes = 0
        self._wanted_bytes, self._read_bytes, self._seconds = 0, 0, 0.0
        self.switched_off = False
        """Whether the device was found to be bound by bandwidth."""

    @property
    def gap_bytes(self) -> int:
        """For the next reads."""
        return self._tried[self._used].gap_bytes

    def request(self, facts: RequestFacts) -> None:
        """See `Observer`."""
        self.want(facts.wanted_bytes)

    def ended(self, purpose: Purpose, num_reads: int, num_bytes: int, waited_s: float) -> None:
        """See `Observer`; learns from the reads of requests alone, which somebody waits for."""
        if purpose is Purpose.REQUEST:
            self.observe(num_bytes, waited_s)

    def want(self, wanted_bytes: int) -> None:
        """Adds bytes that the current tokens ask flash for."""
        self._wanted_bytes += wanted_bytes

    def observe(self, read_bytes: int, seconds: float) -> None:
        """Adds reads of the current tokens and the seconds that they cost."""
        self._read_bytes += read_bytes
        self._seconds += seconds

    def end_tokens(self, count: int = 1, num_evicted: int = 0) -> None:
        """See `Observer`; the next tokens' reads may have another gap."""
        if not self._read_bytes:
            return
        self._tried[self._used].add(self._wanted_bytes, self._read_bytes, self._seconds)
        self._wanted_bytes, self._read_bytes, self._seconds = 0, 0, 0.0
        self._move()
        self._used = self._next()

    def _move(self) -> None:
        """To a gap near the current one, if it is clearly cheaper."""
        for step in PROBES:
            other, current = self._neighbour(step), self._tried[self._current]
            if current.known and self._tried[other].known and self._tried[other].is_cheaper(current):
                self._current = other
                self._until_probe = self._probe_every = PROBE_EVERY

    def _next(self) -> int:
        """The gap of the token to come, by its index."""
        self._until_check -= 1
        if self._until_check < 0:
            if self._until_check >= -CHECK_TOKENS:
                # what there is to compare with: no gap, or where there is none the one that would be
                return (self._current or self._shown) if self.switched_off or not self._current else 0
            self._decide()
        if self.switched_off:
            return 0
        self._until_probe -= 1
        if self._until_probe > 0:
            return self._current
        self._num_probes += 1
        if self._num_probes % (FEWEST * len(PROBES)) == 0:  # each was tried often enough to be known
            self._probe_every = min(2 * self._probe_every, PROBE_SELDOM)
        self._until_probe = self._probe_every
        return self._neighbour(PROBES[self._num_probes % len(PROBES)])

    def _decide(self) -> None:
        """Whether reads without a gap use all the bandwidth that there is."""
        (apart, *others), before = self._tried, self.switched_off
        self.switched_off = (
            apart.known
            and apart.seconds > 0
            and all(
                apart.read_bytes * tried.seconds >= BOUND * tried.read_bytes * apart.seconds
                for tried in others
                if tried.known
            )
        )
        self._check_every = CHECK_EVERY if before != self.switched_off else min(2 * self._check_every, CHECK_SELDOM)
        self._until_check = self._check_every

    def _neighbour(self, step: int) -> int:
        return min(max(self._current + step, 0), len(self._tried) - 1)


def gap_of(plan: Plan, page_bytes: int) -> AdaptiveGap | PlansGap:
    """The gap that a run of a plan joins its reads over."""
    if plan.collapse == "adaptive":
        return AdaptiveGap(plan.collapse_gap_bytes, page_bytes)
    return PlansGap(plan.collapse_gap_bytes)
