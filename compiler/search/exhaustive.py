"""Judges every candidate: each selector, format, density, cache and KV cache. What faster searches are held to."""

import itertools

from coldpress.compiler.search import Candidate, Goal, Judge, Judged, Search, Space


class Plugin(Search):
    """Judges all candidates."""

    def judged(self, space: Space, judge: Judge, goal: Goal) -> list[Judged]:
        """See `Search`."""
        return [
            judge(Candidate(method, format_name, density, cache, kv_cache))
            for method, format_name in itertools.product(space.methods, space.formats)
            for density in space.densities(method, format_name)
            for cache in space.caches
            for kv_cache in space.kv_caches
        ]
