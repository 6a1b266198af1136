"""The search of `method=auto`: which selector, density, formats and cache a build takes.

A search sees a space of candidates and a judge, which says what a candidate costs; what counts as best is the goal's.
`beam.py` is the build's search, and benchmarks/shared/searches.py has those that it is compared with.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from coldpress.runtime.dram.kv_cache import DEFAULT_KV_CACHE
from coldpress.schemas.families import Formats, Method, head_of
from coldpress.schemas.layout import CacheName, KvCacheFormat
from coldpress.schemas.sparsity import SearchedRouting

MARGIN = 0.05
"""Share of the dense run's time that another method must save; less may be noise, or beyond the estimate's accuracy."""


class Shared(NamedTuple):
    method: Method
    format: Formats
    kv_cache: KvCacheFormat
    streams_attention: bool


@dataclass(frozen=True)
class Candidate:
    """One way to run a model, as far as it is chosen before units are ordered on flash."""

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
    def shared(self) -> Shared:
        """The settings that plans of several budgets share: those of flash.img, resident tensors and keys."""
        return Shared(self.method, self.format, self.kv_cache, self.streams_attention)


@dataclass(frozen=True)
class Judged:
    """The cost of a candidate, or the reason why it is refused."""

    candidate: Candidate
    token_s: float = float("inf")
    """Modelled seconds of a decoded token; infinite for a candidate that is refused."""
    ppl_ratio: float | None = None
    """Expected perplexity over the source model's; None if unknown."""
    hit_rate: float | None = None
    """Share of the used units that were in DRAM; None where every token uses every unit."""
    dram_bytes: int = 0
    """DRAM that it needs; less than the budget only if it holds everything."""
    density: float = 1.0
    """Share of the MLP's weights that a token uses, as divided."""
    is_whole: bool = False
    """True if a token uses every unit; in a mixture, every unit of the experts that the model's router picks."""
    holds_everything: bool = False
    """True if all units fit in DRAM, so that nothing is read."""
    refusal: str | None = None
    """Reason why the candidate cannot be built; None if it can."""
    needed_bytes: int | None = None
    """Least DRAM of a candidate that was refused for lack of it, before it caches any unit; None otherwise."""
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
    """Whether a dense run reads attention's matrices from flash: values in the order in which a search tries them, the
    second only if nothing fits with the first."""
    budget_density: float = 1.0
    """1 - sp with sp = 1 - M_max / S_m: the density whose active weights fit the budget (ActiveFlow 4.1)."""


@dataclass(frozen=True)
class Goal:
    max_token_s: float | None = None
    """Seconds per token that are fast enough: the best quality within them wins. None: the fastest wins."""

    def best(self, judged: Sequence[Judged]) -> Judged | None:
        """Returns the best candidate that can be built; None if there is none.

        A dense run that holds everything in DRAM is best: nothing is read, and nothing is left out. Where no dense run
        is a candidate, the best quality with everything in DRAM is best. Otherwise a dense run is best unless another
        candidate saves MARGIN of its time. A KV cache or a head in another format than the default must save as much.
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
