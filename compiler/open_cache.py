"""Lists the candidates of `cache=auto`, and says which cache a build counts with until `plan` has compared them.

Every policy of runtime/cache that a run can use is a candidate: a new file takes part without an edit.
"""

from coldpress.compiler.shared_settings import AUTO
from coldpress.runtime import plugins
from coldpress.runtime.cache import CachePolicy
from coldpress.schemas.base import Options

CACHES = "coldpress.runtime.cache"
DEFAULT_CACHE = "lfu"


def caches_for(cache: str) -> tuple[str, ...]:
    """Returns `cache` alone, or the policies that `auto` may take: those that admit units and know no future, the
    default first."""
    if cache != AUTO:
        return (cache,)
    found = {name: plugins.load_class(CACHES, CachePolicy, name) for name in plugins.names(CACHES)}
    able = [name for name, policy in found.items() if policy.admits and not policy.looks_ahead]
    return tuple(sorted(able, key=lambda name: (name != DEFAULT_CACHE, name)))


def cache_of(cache: str, options: Options) -> tuple[str, Options]:
    """Returns the cache that stages before `plan` count with, and its options: an open one is the default's.

    Raises:
        UnknownNameError: if there is no such policy.
    """
    if cache != AUTO:
        plugins.load_class(CACHES, CachePolicy, cache)
        return cache, options
    return DEFAULT_CACHE, own_cache_options(DEFAULT_CACHE, options)


def own_cache_options(cache: str, options: Options) -> Options:
    """Selects the options that a policy has, from a build whose cache is open."""
    known = plugins.load_class(CACHES, CachePolicy, cache).OPTIONS.model_fields
    return {key: value for key, value in options.items() if key in known}
