"""Makes the caches of a plan as a long run leaves them: full."""

import numpy as np

from coldpress.compiler.seconds import Setting
from coldpress.runtime.cache import CachePolicy
from coldpress.runtime.store.slots import parts_of
from coldpress.schemas.families import FamilyName

FILLING = 8
"""Requests that together bring every unit of a layer once, to fill its cache."""


def full_cache(setting: Setting, layer: int, family: FamilyName) -> CachePolicy:
    """Returns the cache of a family of a layer after requests for all of its units, those most worth DRAM the last."""
    artifact, plan = setting.artifact, setting.plan
    alone = plan.model_copy(update={"parts": tuple(part for part in plan.parts if part.layer == layer)})
    cache = parts_of(artifact, alone)[layer, family].cache
    for ids in np.array_split(artifact.rank(layer, family)[::-1], FILLING):
        cache.serve(np.sort(ids).astype(np.int32))
    cache.reset()
    return cache
