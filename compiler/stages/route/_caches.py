"""Makes the caches of a plan as a long run leaves them: full."""

from coldpress.compiler.seconds import Setting, filling_requests
from coldpress.runtime.cache import CachePolicy
from coldpress.runtime.store.slots import parts_of
from coldpress.schemas.families import FamilyName


def full_cache(setting: Setting, layer: int, family: FamilyName) -> CachePolicy:
    """Returns the cache of a family of a layer after requests for all of its units, those most worth DRAM the last."""
    artifact, plan = setting.artifact, setting.plan
    alone = plan.model_copy(update={"parts": tuple(part for part in plan.parts if part.layer == layer)})
    cache = parts_of(artifact, alone)[layer, family].cache
    for ids in filling_requests(artifact.rank(layer, family)):
        cache.serve(ids)
    cache.reset()
    return cache
