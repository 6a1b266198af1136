"""Finds and loads plug-ins. A plug-in is a file; its file name is its name in the config. No registry.

Every file has one class `Plugin`, which extends the base class of its kind (`Selector`, `CachePolicy`, `Format`, …). A
kind whose objects have no state is used through one shared object (`load`); a kind that is made for each layer or each
artifact is used through its class (`load_class`).
"""

import functools
import importlib
import importlib.util
import inspect
import pkgutil
from abc import ABC
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, TypeVar, cast

from pydantic import ValidationError

from coldpress.schemas.base import Options, Record
from coldpress.schemas.errors import ColdpressError, UnknownNameError, clipped


class PluginBase(ABC):  # noqa: B024 - what is abstract is for each kind to say
    OPTIONS: ClassVar[type[Record]] = Record
    """The settings of one plug-in: a frozen record with a default for every field."""

    @classmethod
    def name(cls) -> str:
        """Returns the plug-in's name in the config: that of its file."""
        return cls.__module__.rpartition(".")[2]


Kind = TypeVar("Kind", bound=PluginBase)
Settings = TypeVar("Settings", bound=Record)


@functools.cache  # an artifact's manifest names plug-ins a hundred thousand times
def names(package: str) -> tuple[str, ...]:
    """Returns the public modules of a package such as `coldpress.runtime.cache`, sorted. Imports none of them."""
    spec = importlib.util.find_spec(package)
    found = pkgutil.iter_modules((spec and spec.submodule_search_locations) or [])
    return tuple(sorted(module.name for module in found if not module.name.startswith("_")))


def load_class(package: str, kind: type[Kind], name: str) -> type[Kind]:
    """The class of the plug-in `name` of `package`, which extends `kind`. Raises `UnknownNameError`, which lists the
    choices, if there is no such file, `ColdpressError` if it has no complete plug-in of that kind."""
    found = _class(package, name)
    if not issubclass(found, kind):
        raise ColdpressError(f"{package}.{name}: the class Plugin does not extend {kind.__name__}; let it extend that")
    return found


def load(package: str, kind: type[Kind], name: str) -> Kind:
    """Returns the one shared object of a plug-in, an instance of `kind`. Raises as `load_class`."""
    return cast(Kind, _shared(load_class(package, kind, name)))


@functools.cache
def _class(package: str, name: str) -> type[PluginBase]:
    known = names(package)
    if name not in known:
        raise UnknownNameError(package.rpartition(".")[2].replace("_", " "), name, known)
    found = getattr(importlib.import_module(f"{package}.{name}"), "Plugin", None)
    if not (isinstance(found, type) and issubclass(found, PluginBase)):
        raise ColdpressError(f"{package}.{name} has no class Plugin that extends the base class of its kind; add one")
    if inspect.isabstract(found):
        lacking = ", ".join(sorted(found.__abstractmethods__))
        raise ColdpressError(f"{package}.{name}: the class Plugin does not define {lacking}; add it")
    return found


@functools.cache
def _shared(plugin: type[PluginBase]) -> PluginBase:
    return plugin()


def options_of(plugin: PluginBase | type[PluginBase], values: Mapping[str, Any]) -> Any:
    """The `OPTIONS` record of a plug-in, with its defaults where `values` says nothing. Raises `ColdpressError` if the
    plug-in has no such option, in which case the text lists its options, or a value does not fit."""
    return record_of(plugin.OPTIONS, "option", plugin.name(), values)


def record_of(kind: type[Settings], what: str, whose: str, values: Mapping[str, Any]) -> Settings:
    """The record with these values, and its defaults where they say nothing; `what` of `whose` names a field. Raises
    `ColdpressError` as `options_of`."""
    fields = kind.model_fields
    unknown = [key for key in values if key not in fields]
    if unknown:
        raise UnknownNameError(f"{what} of {whose}", unknown[0], fields)
    try:
        return kind.model_validate(dict(values))
    except ValidationError as error:
        first = error.errors()[0]
        key = str(first["loc"][0])
        expected = fields[key].description
        raise ColdpressError(
            f"{what} {key} of {whose} is {first['input']!r}, expected {expected} ({clipped(first['msg'])})"
        ) from error


def parse_values(parts: Iterable[str], whose: str, example: str) -> Options:
    """Parses settings on a command line, each NAME=VALUE, into numbers and texts.

    Args:
        whose: Says in an error what a part is not, such as `option of the cache 'window'`.
        example: A correct one, for the error.

    Raises:
        ColdpressError: if a part has no `=`.
    """
    found = Options()
    for part in parts:
        name, equals, value = part.partition("=")
        if not equals:
            raise ColdpressError(f"'{clipped(part)}' is no {whose}, expected such as {example}")
        found[name] = _value(value)
    return found


def _value(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
