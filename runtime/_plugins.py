"""A plug-in is a file; its file name is its name in the config. No registry, no import side effects."""

import importlib
import importlib.util
import pkgutil
from types import ModuleType

from schemas.errors import UnknownNameError


def names(package: str) -> tuple[str, ...]:
    """The plug-ins of a package, such as `runtime.cache`: its public modules, sorted. Nothing of it is imported."""
    spec = importlib.util.find_spec(package)
    found = pkgutil.iter_modules((spec and spec.submodule_search_locations) or [])
    return tuple(sorted(module.name for module in found if not module.name.startswith("_")))


def load(package: str, name: str) -> ModuleType:
    """The plug-in module `name` of `package`.

    Raises:
        UnknownNameError: if there is no such file; the text lists the choices.
    """
    known = names(package)
    if name not in known:
        raise UnknownNameError(package.rpartition(".")[2].replace("_", " "), name, known)
    return importlib.import_module(f"{package}.{name}")
