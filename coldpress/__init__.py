"""coldpress: compile a language model once; run it from flash with a fraction of its size in DRAM.

    import coldpress

    with coldpress.load("mistral-7b-pixel6.coldpress", dram="3GB") as model:
        print(model.generate("Once upon a time"))

`build` and `quote` need the extra `compiler`. Names are loaded when they are used, so that `import coldpress` is quick.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from coldpress.compiler.python_api import build, quote
    from coldpress.runtime.generate.completion import Completion
    from coldpress.runtime.model import Model, Stats, load
    from coldpress.schemas import __version__
    from coldpress.schemas.errors import ColdpressError

__all__ = ["ColdpressError", "Completion", "Model", "Stats", "__version__", "build", "load", "quote"]

_MODULES = {
    "ColdpressError": "coldpress.schemas.errors",
    "Completion": "coldpress.runtime.generate.completion",
    "Model": "coldpress.runtime.model",
    "Stats": "coldpress.runtime.model",
    "__version__": "coldpress.schemas",
    "build": "coldpress.compiler.python_api",
    "load": "coldpress.runtime.model",
    "quote": "coldpress.compiler.python_api",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'coldpress' has no attribute '{name}'")
    try:
        found = getattr(import_module(_MODULES[name]), name)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing in ("", "coldpress"):
            raise
        from coldpress.schemas.errors import ColdpressError

        raise ColdpressError(
            f"coldpress.{name} needs {missing}, which is not installed; pip install '.[compiler]' in a checkout"
        ) from error
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
