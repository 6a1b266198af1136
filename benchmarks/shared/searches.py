"""Searches that the build's own, compiler/search/beam.py, is compared with."""

import itertools

from coldpress.compiler.candidates import DEFAULT_FORMAT, DENSE
from coldpress.compiler.search import Candidate, Goal, Judge, Judged, Search, Space, beam
from coldpress.compiler.shared_settings import DEFAULT_CACHE

METHOD = "topk"


def exhaustive(space: Space, judge: Judge, goal: Goal) -> list[Judged]:
    """Judges every candidate: all selectors, formats, heads, densities, caches, KV caches and routings, and dense runs
    that stream attention, too."""
    return [
        judge(Candidate(method, format_name, density, cache, kv_cache, routing, streams))
        for method, plain in itertools.product(space.methods, space.formats)
        for format_name in (plain, *space.heads(plain))
        for density in space.densities(method, format_name)
        for cache in space.caches
        for kv_cache in space.kv_caches
        for routing in (None, *space.routings(method, format_name))
        for streams in (space.streams_attention if method == DENSE else (False,))
    ]


def activeflow(space: Space, judge: Judge, goal: Goal) -> list[Judged]:
    """Judges ActiveFlow's choice (4.1), and the dense run that it must beat: top-k on the inputs of the MLP's matrices,
    and of attention's with attention=true, as sparse as the DRAM budget asks.

    sp = 1 - M_max / S_m is the least sparsity whose active weights fit the budget (Table 1); the density is 1 - sp, or
    the lowest that keeps the quality where that is higher, since the paper has no floor. The cache is the contextual
    LFU (4.2). The paper chooses neither selector nor formats: they are the first that are allowed, 4 bits where nothing
    is given.
    """
    format_name = DEFAULT_FORMAT if DEFAULT_FORMAT in space.formats else space.formats[0]
    cache = DEFAULT_CACHE if DEFAULT_CACHE in space.caches else space.caches[0]
    found = [
        judge(Candidate(method, format_name, density, cache, space.kv_caches[0]))
        for method in space.methods[:1]
        for density in space.densities(method, format_name)[:1]
    ]
    known = [] if METHOD not in space.methods else [one for one in space.densities(METHOD, format_name) if one]
    if known:
        density = max(space.budget_density, known[0])
        found.append(judge(Candidate(METHOD, format_name, density, cache, space.kv_caches[0])))
    return found


SEARCHES: dict[str, Search] = {"beam": beam.judged, "exhaustive": exhaustive, "activeflow": activeflow}
