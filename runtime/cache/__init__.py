"""Cache policies, one per file: which units of a layer's family stay in DRAM. Pure decisions on integer ids.

A file has one class `Plugin`, which extends `CachePolicy` (runtime/cache/_policy.py): the cache of one family of one
layer. Most policies only define `_victims`. A policy with parameters has them in its `OPTIONS`.
"""

from collections.abc import Mapping
from typing import Any

from coldpress.runtime import plugins
from coldpress.runtime.cache._policy import CacheFacts, CachePolicy
from coldpress.schemas.base import Options

__all__ = ["CacheFacts", "CachePolicy", "make", "read_choice", "show_choice"]


def make(name: str, options: Mapping[str, Any], known: CacheFacts) -> CachePolicy:
    """Makes an empty cache. Raises `UnknownNameError` if there is no such policy, or it has no such option; and
    `ColdpressError` if an option's value is invalid, or the policy needs future requests and `known` has none."""
    plugin = plugins.load_class("coldpress.runtime.cache", CachePolicy, name)
    return plugin(known, plugins.options_of(plugin, options))


def read_choice(text: str) -> tuple[str, Options]:
    """Parses `NAME` or `NAME:OPTION=VALUE:...`, for example `window:window_tokens=3`, into a policy and its options.
    Raises as `make`, and `ColdpressError` if a part does not have the form OPTION=VALUE."""
    name, *parts = text.split(":")
    plugin = plugins.load_class("coldpress.runtime.cache", CachePolicy, name)
    options = plugins.parse_values(parts, f"option of the cache '{name}'", "window:window_tokens=3")
    plugins.options_of(plugin, options)
    return name, options


def show_choice(name: str, options: Mapping[str, Any]) -> str:
    return ":".join([name, *(f"{option}={value}" for option, value in options.items())])
