"""Cache policies, one per file: which units of a layer's family stay in DRAM. Pure decisions on integer ids.

A file has a class `Cache` (runtime/cache/_policy.py says what it owes the store) and, where it has parameters,
`Options`, a frozen record with a default for every field.
"""

from collections.abc import Mapping
from typing import Any

from coldpress.runtime import plugins
from coldpress.runtime.cache._policy import Known, Policy
from coldpress.schemas.base import Options
from coldpress.schemas.errors import ColdpressError, clipped

__all__ = ["Known", "Policy", "make", "read_choice", "show_choice"]


def make(name: str, options: Mapping[str, Any], known: Known) -> Policy:
    """An empty cache of the policy `name`.

    Raises:
        UnknownNameError: if there is no such policy, or it has no such option.
        ColdpressError: if it cannot be used here, such as one that knows the future where there is none to know.
    """
    plugin = plugins.load("coldpress.runtime.cache", name)
    return plugin.Cache(known, plugins.options_of(plugin, options))


def read_choice(text: str) -> tuple[str, Options]:
    """The policy and its options that `NAME` or `NAME:OPTION=VALUE:...` says, as in `window:window_tokens=3`.

    Raises:
        UnknownNameError: if there is no such policy, or it has no such option.
        ColdpressError: if a part is no option, or its value does not fit.
    """
    name, *parts = text.split(":")
    plugin, options = plugins.load("coldpress.runtime.cache", name), Options()
    for part in parts:
        option, equals, value = part.partition("=")
        if not equals:
            raise ColdpressError(
                f"'{clipped(part)}' is no option of the cache '{name}', expected such as window:window_tokens=3"
            )
        options[option] = _value(value)
    plugins.options_of(plugin, options)
    return name, options


def show_choice(name: str, options: Mapping[str, Any]) -> str:
    """A policy and its options as `read_choice` takes them."""
    return ":".join([name, *(f"{option}={value}" for option, value in options.items())])


def _value(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
