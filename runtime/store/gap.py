"""Learns while running how far apart two reads may be and still become one (Ripple 5.1).

The plan's gap is right for the device that the artifact was compiled for. The adaptive gap tries other gaps on a few
tokens, wider and narrower ones in turn, and moves to a gap that takes fewer seconds per wanted byte. From time to time
two tokens read without any gap. If that moves as many bytes per second as the best gap does, the device is limited by
bandwidth and not by operations, and collapse is switched off until a later check finds otherwise. The adaptive gap
observes the store and decides from the seconds of reads alone. A simulation gives modelled seconds, which repeat; a run
gives the seconds it waited, so its reads, and the rounding of sums over what they bring, may differ from run to run.
Which units a token uses never depends on seconds: with `use_read_units` a read brings units that the token then uses,
so the plan's gap stays.
"""

from dataclasses import dataclass

from coldpress.runtime.store.facts import Observer, Purpose, RequestFacts

STEPS_DOWN, STEPS_UP = 12, 10
"""Numbers of times that the plan's gap is divided and multiplied by the square root of two, for the gaps to try."""
PROBES = (1, -1, 3, -3)
"""Steps from the current gap to the gaps that are tried in turn; a single step may be too small to change a read."""
PROBE_EVERY, PROBE_SELDOM = 4, 64
"""Tokens from one probe to the next: at first, and at most, after probes that found nothing better."""
CHECK_EVERY, CHECK_SELDOM = 32, 512
"""Tokens from check to check: at first, and at most, after checks that changed nothing."""
CHECK_TOKENS = 2
FEWEST_SHOWN = 4
"""Least index of the gap that a check uses to measure the device's bandwidth."""
FEWEST = 2
"""Tokens that must have used a gap before its cost counts."""
WORTH = 0.98
"""A gap must cost at most this share of the current gap's cost to replace it, so that noise causes few moves."""
BOUND = 0.95
"""The device is limited by bandwidth if it reaches this share of the best bytes per second without a gap."""
KEPT = 0.8
"""Weight of all earlier tokens' sums when a token is added."""


@dataclass
class _Tried:
    """A gap and the cost of the tokens that used it, as sums in which older tokens weigh less."""

    gap_bytes: int
    num_tokens: int = 0
    wanted_bytes: float = 0.0
    read_bytes: float = 0.0
    seconds: float = 0.0

    def add(self, wanted_bytes: int, read_bytes: int, seconds: float) -> None:
        self.num_tokens += 1
        self.wanted_bytes = KEPT * self.wanted_bytes + wanted_bytes
        self.read_bytes = KEPT * self.read_bytes + read_bytes
        self.seconds = KEPT * self.seconds + seconds

    @property
    def known(self) -> bool:
        return self.num_tokens >= FEWEST

    def is_cheaper(self, other: "_Tried") -> bool:
        """Tells whether it takes clearly fewer seconds per wanted byte; compares products, as bytes may be zero."""
        return self.seconds * other.wanted_bytes < WORTH * other.seconds * self.wanted_bytes


class AdaptiveGap(Observer):
    def __init__(self, start_bytes: int, page_bytes: int) -> None:
        """Begins with the plan's gap; gaps are whole pages, because reads are: a smaller one joins no further reads."""
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
        """True if the device was found to be bound by bandwidth."""

    @property
    def gap_bytes(self) -> int:
        return self._tried[self._used].gap_bytes  # may be a probe's gap instead of the current best

    def request(self, facts: RequestFacts) -> None:
        self._wanted_bytes += facts.wanted_bytes

    def ended(self, purpose: Purpose, num_reads: int, num_bytes: int, waited_s: float) -> None:
        """Learns only from reads of requests, because the token waits for these."""
        if purpose is Purpose.REQUEST:
            self._read_bytes += num_bytes
            self._seconds += waited_s

    def end_tokens(self, count: int, num_evicted: int) -> None:
        """Ends tokens; the next ones' reads may have another gap."""
        if not self._read_bytes:
            return
        self._tried[self._used].add(self._wanted_bytes, self._read_bytes, self._seconds)
        self._wanted_bytes, self._read_bytes, self._seconds = 0, 0, 0.0
        self._move()
        self._used = self._next()

    def _move(self) -> None:
        for step in PROBES:
            other, current = self._neighbour(step), self._tried[self._current]
            if current.known and self._tried[other].known and self._tried[other].is_cheaper(current):
                self._current = other
                self._until_probe = self._probe_every = PROBE_EVERY

    def _next(self) -> int:
        self._until_check -= 1
        if self._until_check < 0:
            if self._until_check >= -CHECK_TOKENS:
                # a check compares gap 0 with a wide gap: it uses the one of the two that is not in use now
                return (self._current or self._shown) if self.switched_off or not self._current else 0
            self._decide()
        if self.switched_off:
            return 0
        self._until_probe -= 1
        if self._until_probe > 0:
            return self._current
        self._num_probes += 1
        if self._num_probes % (FEWEST * len(PROBES)) == 0:  # every probe is known by now, and none was better
            self._probe_every = min(2 * self._probe_every, PROBE_SELDOM)
        self._until_probe = self._probe_every
        return self._neighbour(PROBES[self._num_probes % len(PROBES)])

    def _decide(self) -> None:
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
