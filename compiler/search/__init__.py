"""The search of `method=auto`: which selector, density, formats and cache a build takes.

A search sees a space of candidates and a judge, which says what a candidate costs; what counts as best is the goal's.
So every search is compared under one law and one quality floor: `beam` is the build's, and
benchmarks/shared/searches.py has those that it is compared with.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

from coldpress.compiler.candidates import DENSE
from coldpress.runtime.plan.kv_cache import DEFAULT_KV_CACHE
from coldpress.schemas.families import Formats, Method, head_of
from coldpress.schemas.layout import CacheName, KvCacheFormat
from coldpress.schemas.sparsity import SearchedRouting

MARGIN = 0.05
"""Share of the dense run's time that another method must save; less may be noise, or beyond the estimate's accuracy."""
WIDTH = 4
"""Candidates that are followed."""
HOPELESS = 3.0
"""Times the seconds of the best one: a slower candidate is not followed, since no cache wins that back."""
FIRST_CACHE = "static"
"""The cache that candidates are ranked under: it costs the least to replay."""


class Shared(NamedTuple):
    method: Method
    format: Formats
    kv_cache: KvCacheFormat
    streams_attention: bool


@dataclass(frozen=True)
class Candidate:
    """One way to run a model, except what is settled once units are in order on flash."""

    method: Method
    format: Formats
    density: float | None
    """Share of the MLP's weights that a token uses; None where the selector or a measurement decides."""
    cache: CacheName
    kv_cache: KvCacheFormat = DEFAULT_KV_CACHE
    routing: SearchedRouting | None = None
    """None if routers choose as the model was trained."""
    streams_attention: bool = False
    """Whether a dense run reads attention's matrices from flash, too."""

    @property
    def shared(self) -> "Shared":
        """Returns what plans of several budgets share: flash.img, resident tensors, and how keys are stored."""
        return Shared(self.method, self.format, self.kv_cache, self.streams_attention)


@dataclass(frozen=True)
class Judged:
    """Cost of a candidate, or the reason why it is none."""

    candidate: Candidate
    token_s: float = float("inf")
    """Modelled seconds of a decoded token; infinite for a candidate that is refused."""
    ppl_ratio: float | None = None
    """The perplexity ratio to expect; None if nobody knows."""
    hit_rate: float | None = None
    """Share of the used units that were in DRAM; None where every token uses every unit."""
    dram_bytes: int = 0
    """DRAM that it needs; less than the budget only if it holds everything."""
    density: float = 1.0
    """Share of the MLP's weights that a token uses, as divided."""
    is_whole: bool = False
    """True if every token uses every unit, in a mixture of the experts that the model itself would choose."""
    holds_everything: bool = False
    """True if all units fit in DRAM, so that nothing is read."""
    refusal: str | None = None
    """Reason for which the candidate cannot be built; None if it can."""
    needed_bytes: int | None = None
    """DRAM that a refused candidate needs before it caches any unit; None if that was not the reason."""
    has_draft_model: bool = False
    """True if a draft model in the same DRAM makes it faster."""


Judge = Callable[[Candidate], Judged]


@dataclass(frozen=True)
class Space:
    methods: tuple[Method, ...]
    """The dense run first."""
    formats: tuple[Formats, ...]
    caches: tuple[CacheName, ...]
    densities: Callable[[Method, Formats], Sequence[float | None]]
    """The densities of a selector in a format that keep the quality, ascending; empty if none does."""
    kv_caches: tuple[KvCacheFormat, ...] = (DEFAULT_KV_CACHE,)
    """The formats of keys and values that keep the quality; the one that loses the least first."""
    heads: Callable[[Formats], Sequence[Formats]] = lambda formats: ()
    """Formats of layers beside each smaller format of the head that keeps the quality."""
    routings: Callable[[Method, Formats], Sequence[SearchedRouting]] = lambda method, formats: ()
    """The routings of a selector in a format that keep the quality, the fastest first."""
    streams_attention: tuple[bool, ...] = (False,)
    """Whether attention's matrices are read from flash, in the order in which a search asks: they stay in DRAM, or, if
    nothing fits, a dense run streams them."""
    budget_density: float = 1.0
    """1 - sp with sp = 1 - M_max / S_m: the density whose active weights fit the budget (ActiveFlow 4.1)."""


@dataclass(frozen=True)
class Goal:
    """Aim of a search: the fewest seconds, or the best quality among those that are fast enough."""

    max_token_s: float | None = None
    """Seconds of a token that are good enough; None for the fewest."""

    def best(self, judged: Sequence[Judged]) -> Judged | None:
        """Returns the best candidate that can be built; None if there is none.

        A dense run that holds everything in DRAM is best: nothing is read, and nothing is left out. Where no dense run
        is a candidate, the best quality with everything in DRAM is best. Otherwise a dense run is best unless another
        candidate saves MARGIN of its time: a candidate whose keys and values, or whose head, are not in the default
        format, too.
        """
        built = [one for one in judged if one.refusal is None]
        if not built:
            return None
        best = self._best(built)
        for is_default in (_has_default_keys, _has_default_head):
            plain = [one for one in built if is_default(one)]
            if plain and not is_default(best):
                other = self._best(plain)
                best, built = (best, built) if best.token_s <= (1 - MARGIN) * other.token_s else (other, plain)
        return best

    def _best(self, found: Sequence[Judged]) -> Judged:
        held = [one for one in found if one.holds_everything]
        whole = [one for one in held if one.is_whole]
        if self.max_token_s is not None:
            fast_enough = [one for one in found if one.token_s <= self.max_token_s] or [min(found, key=_by_seconds)]
            return min(whole or held or fast_enough, key=_by_quality)
        if held:
            return min(whole, key=_by_seconds) if whole else min(held, key=_by_quality)
        fastest = min(found, key=_by_seconds)
        dense = fastest_dense(found) or fastest
        return fastest if fastest.token_s <= (1 - MARGIN) * dense.token_s else dense


def _has_default_keys(one: Judged) -> bool:
    return one.candidate.kv_cache == DEFAULT_KV_CACHE


def _has_default_head(one: Judged) -> bool:
    return head_of(one.candidate.format) is None


def fastest_dense(judged: Sequence[Judged]) -> Judged | None:
    """Returns the fastest dense run; None if none can be built."""
    plain = (one for one in judged if one.refusal is None and one.is_whole)
    return min(plain, key=_by_seconds, default=None)


def _by_seconds(one: Judged) -> tuple[float, float]:
    return one.token_s, one.ppl_ratio or 1.0


def _by_quality(one: Judged) -> tuple[float, float]:
    return one.ppl_ratio or 1.0, one.token_s


Search = Callable[[Space, Judge, Goal], list[Judged]]
"""Looks for the best candidate; returns all that were judged, refused ones included, among which the goal picks."""


def beam(space: Space, judge: Judge, goal: Goal) -> list[Judged]:
    """Judges each selector in each format at its lowest density, and follows the best few through caches and densities.

    Of one selector and format the lowest density that keeps the quality is nearly always the fastest, and with units
    pinned alone (the cache `static`, or the only one allowed) its seconds rank it well: an adaptive cache changes
    seconds by tens of percent, a format or selector by factors. Where the goal is quality at a given speed, the best
    few are judged at higher densities, too; there they are also judged for the front of quality and speed that the
    record keeps. Routers that prefer experts in DRAM save some of a run's reads; so of a mixture's candidates the best
    few are judged with each strength that keeps the quality.

    The formats of keys and values and of the head only change how much DRAM remains for units, and how fast they are
    themselves. So every candidate starts with the default ones, or with the next smaller ones if nothing fits. The
    dense runs and the fastest other candidate are then judged with each. If nothing fits whatever they are, dense runs
    read attention's matrices from flash, too: every byte that a token needs is then read as often, whichever it is, so
    that this is never faster where the rest fits.
    """
    first = FIRST_CACHE if FIRST_CACHE in space.caches else space.caches[0]
    begun: list[Judged] = []
    headed = [one for formats in space.formats for one in space.heads(formats)]
    for streams, formats, kv_cache in product(space.streams_attention, (space.formats, headed), space.kv_caches):
        begun += [
            judge(Candidate(method, one, found[0], first, kv_cache, streams_attention=streams))
            for method in space.methods
            if method == DENSE or not streams
            for one in formats
            if (found := space.densities(method, one))
        ]
        if any(one.refusal is None for one in begun):
            break
    built = sorted((one for one in begun if one.refusal is None), key=lambda one: one.token_s)
    hopeful = [one for one in built if one.hit_rate is not None and one.token_s <= HOPELESS * built[0].token_s]
    best = hopeful[:WIDTH]
    best += [one for one in hopeful if one.is_whole and one not in best][:1]  # a mixture's, which may be routed
    followed = [
        judge(replace(one.candidate, cache=cache))
        for one in best
        if not one.holds_everything
        for cache in space.caches
        if cache != first
    ]
    denser = [
        judge(replace(one.candidate, density=density))
        for one in _best_of_each(begun + followed, best)
        for density in space.densities(one.candidate.method, one.candidate.format)[1:]
    ]
    routed = [
        judge(replace(one.candidate, routing=routing))
        for one in _best_of_each(begun + followed, best)
        if not one.holds_everything
        for routing in space.routings(one.candidate.method, one.candidate.format)
    ]
    others = sorted((one for one in followed + routed + best if one.refusal is None), key=lambda one: one.token_s)
    smaller = [
        judge(replace(one.candidate, format=formats, density=density, kv_cache=kv_cache))
        for one in [*(one for one in built if one.is_whole), *others[:1]]
        for formats, density in _with_each_head(space, one.candidate)
        for kv_cache in space.kv_caches
        if (formats, kv_cache) != (one.candidate.format, one.candidate.kv_cache)
    ]
    return begun + followed + denser + routed + smaller


def _with_each_head(space: Space, candidate: Candidate) -> Iterator[tuple[Formats, float | None]]:
    """Yields a candidate's formats and density, then its formats with each smaller head, whose loss leaves less to
    densities, and the lowest density that keeps the quality."""
    yield candidate.format, candidate.density
    for formats in space.heads(candidate.format):
        for density in space.densities(candidate.method, formats)[:1]:
            yield formats, density


def _best_of_each(judged: list[Judged], best: list[Judged]) -> list[Judged]:
    found: list[Judged] = []
    for one in best:
        own = [
            other
            for other in judged
            if (other.candidate.method, other.candidate.format) == (one.candidate.method, one.candidate.format)
        ]
        found.append(min(own, key=lambda other: other.token_s))
    return found
