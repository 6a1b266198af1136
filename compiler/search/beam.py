"""Judges each selector in each format at its lowest density, and follows the best few through caches and densities.

For one selector and format, the lowest density that keeps the quality is nearly always the fastest. Its seconds under
the cache `static` (or the only one allowed) rank it well: an adaptive cache changes seconds by tens of percent, a
format or selector by factors. Where the goal is quality at a given speed, the best few are judged at higher densities,
too; there they are also judged for the front of quality and speed that the record keeps.

Routers that prefer experts in DRAM save reads, so the best few candidates of a mixture are also judged with each
routing strength that keeps the quality.

The formats of keys and values and of the head only change how much DRAM remains for units, and how fast they are
themselves. So every candidate starts with the default ones, or with the next smaller ones if nothing fits. The dense
runs and the fastest other candidate are then judged with each. If still nothing fits, dense runs read attention's
matrices from flash, too. That is never faster where attention fits in DRAM: a dense run uses every byte equally often,
so it does not matter which bytes DRAM holds.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from coldpress.compiler.candidates import DENSE
from coldpress.compiler.search import Candidate, Goal, Judge, Judged, Space
from coldpress.schemas.families import Formats

WIDTH = 4
"""Candidates that are followed."""
HOPELESS = 3.0
"""A candidate slower than this many times the best is not followed: no cache makes up for that."""
FIRST_CACHE = "static"
"""The cache that candidates are ranked under: it costs the least to replay."""


def judged(space: Space, judge: Judge, goal: Goal) -> list[Judged]:
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
    best += [one for one in hopeful if one.is_whole and one not in best][:1]  # the dense run of a mixture, for routing
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
    """Yields a candidate's formats and density, then its formats with each smaller head and the lowest density that
    still keeps the quality beside the head's loss."""
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
