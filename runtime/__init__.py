"""The runtime: Python and a C++ core, no torch."""

from importlib import import_module
from types import ModuleType

from coldpress.schemas.errors import ColdpressError


def __getattr__(name: str) -> ModuleType:
    """Loads the native core on first use. Raises `ColdpressError` if it cannot be loaded."""
    if name != "_native":
        raise AttributeError(f"module 'coldpress.runtime' has no attribute '{name}'")
    try:
        return import_module("coldpress.runtime._native")
    except ImportError as error:
        raise ColdpressError(
            f"the native core of coldpress cannot be loaded ({error}); install coldpress again"
        ) from error
