"""Finds and loads plug-ins: a plug-in is a file whose name is its name in the config. No registry, no side effects."""

import functools
import importlib
import importlib.util
import pkgutil
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from pydantic import ValidationError

from coldpress.schemas.base import Record
from coldpress.schemas.errors import ColdpressError, UnknownNameError, clipped


@functools.cache  # an artifact's manifest names plug-ins a hundred thousand times
def names(package: str) -> tuple[str, ...]:
    """Returns the plug-ins of a package such as `coldpress.runtime.cache`: its public modules, sorted, not imported."""
    spec = importlib.util.find_spec(package)
    found = pkgutil.iter_modules((spec and spec.submodule_search_locations) or [])
    return tuple(sorted(module.name for module in found if not module.name.startswith("_")))


def load(package: str, name: str) -> ModuleType:
    """Imports the plug-in module `name` of `package`.

    Raises:
        UnknownNameError: if there is no such file; the text lists the choices.
    """
    known = names(package)
    if name not in known:
        raise UnknownNameError(package.rpartition(".")[2].replace("_", " "), name, known)
    return importlib.import_module(f"{package}.{name}")


def options_of(plugin: ModuleType, values: Mapping[str, Any]) -> Any:
    """Makes the `Options` record of a plug-in from `values` and its defaults; an empty record if it declares none.

    Raises:
        ColdpressError: if the plug-in has no such option, in which case the text lists its options, or a value does
            not fit.
    """
    name = plugin.__name__.rpartition(".")[2]
    declared: type[Record] = getattr(plugin, "Options", Record)
    unknown = [key for key in values if key not in declared.model_fields]
    if unknown:
        raise UnknownNameError(f"option of {name}", unknown[0], declared.model_fields)
    try:
        return declared.model_validate(dict(values))
    except ValidationError as error:
        first = error.errors()[0]
        key = str(first["loc"][0])
        expected = declared.model_fields[key].description
        raise ColdpressError(
            f"option {key} of {name} is {first['input']!r}, expected {expected} ({clipped(first['msg'])})"
        ) from error
