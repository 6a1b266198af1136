"""Which source files a stage hangs on, so that an edit of the compiler reruns the rules it concerns and no others.

Follows imports statically from the stage's own module through `compiler`, `runtime` and `schemas`. Plug-ins are loaded
by name, so a package whose name stands in the code as text counts with all its modules, and the native core with its
sources. Snakemake sees only the shell command of a rule; the rules put this digest into their `params`.
"""

import ast
import functools
from pathlib import Path

from compiler._io import digest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("compiler", "runtime", "schemas", "demo")
NATIVE = "runtime._native"
NATIVE_SOURCES = "runtime/native"


def stage_digest(stage: str, root: Path = ROOT) -> str:
    """Hex digest over the paths and contents of `source_files`."""
    files = source_files(f"compiler.{stage}", root)
    return digest(*(text for file in files for text in (file.relative_to(root).as_posix(), _text(file))))


def source_files(module: str, root: Path = ROOT) -> list[Path]:
    """The files that `module` (such as `compiler.order`) runs, itself included, sorted.

    A stage that is a package brings all its modules: one of them is chosen by the configuration.
    """
    pending = [module, *_package_modules(module, root)]
    found: dict[str, list[Path]] = {}
    while pending:
        name = pending.pop()
        if name in found:
            continue
        found[name] = _files(name, root)
        for file in found[name]:
            if file.suffix == ".py":
                pending += _references(file, root)
    return sorted({file for files in found.values() for file in files})


def _files(name: str, root: Path) -> list[Path]:
    """The files behind a module name; none for what is not ours."""
    if name == NATIVE:
        return sorted(path for path in (root / NATIVE_SOURCES).rglob("*") if path.is_file())
    path = root.joinpath(*name.split("."))
    if (path / "__init__.py").is_file():
        templates = [file for file in path.iterdir() if file.is_file() and file.suffix != ".py"]
        return [path / "__init__.py", *templates]
    module = path.with_name(f"{path.name}.py")
    return [module] if module.is_file() else []


def _package_modules(name: str, root: Path) -> list[str]:
    folder = root.joinpath(*name.split("."))
    return [f"{name}.{file.stem}" for file in sorted(folder.glob("*.py")) if file.stem != "__init__"]


def _is_package_name(text: str) -> bool:
    """Whether `text` is like `runtime.cache`; the name of a top package alone is an ordinary word."""
    parts = text.split(".")
    return len(parts) > 1 and parts[0] in PACKAGES and all(part.isidentifier() for part in parts)


@functools.cache
def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8", errors="replace")


@functools.cache
def _references(file: Path, root: Path) -> list[str]:
    """Module names that a file imports, and the modules of the packages it names in a text."""
    names: list[str] = []
    for node in ast.walk(ast.parse(_text(file), filename=str(file))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and _is_package_name(node.value):
            names += _package_modules(node.value, root)
    return [name for name in names if name.split(".")[0] in PACKAGES]
