"""Judges every candidate: all selectors, formats, densities, caches, KV caches and routings.

Faster searches are compared with it.
"""

import itertools

from coldpress.compiler.search import Candidate, Goal, Judge, Judged, Search, Space


class Plugin(Search):
    """Judges all candidates."""

    def judged(self, space: Space, judge: Judge, goal: Goal) -> list[Judged]:
        """See `Search`."""
        return [
            judge(Candidate(method, format_name, density, cache, kv_cache, routing))
            for method, format_name in itertools.product(space.methods, space.formats)
            for density in space.densities(method, format_name)
            for cache in space.caches
            for kv_cache in space.kv_caches
            for routing in (None, *space.routings(method, format_name))
        ]
