"""Finds the source files that a stage depends on, so that an edit reruns the rules it concerns and no others.

Follows imports statically from the stage's own module through `compiler`, `runtime` and `schemas`. Plug-ins are loaded
by name: where the code names a package of them as text, those that the build chose count, with what they import.
Snakemake sees only the shell command of a rule; the rules put this digest into their `params`, and jobs are told it.
"""

import ast
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeGuard

import coldpress
from coldpress.compiler.io import digest
from coldpress.compiler.pipeline import STAGES

ROOT = Path(coldpress.__file__).absolute().parents[1]
PACKAGES = ("coldpress", "demo")
RUNS_THE_ARTIFACT = ("verify",)
KERNELS = "coldpress.runtime.kernels"
"""Only a stage that runs the artifact calls all of them. The others call those that the build's selectors import, which
may need them while they are fitted or decide for many tokens (`flash` does)."""
SELECTORS = "coldpress.runtime.sparsity"
NATIVE_SOURCES = {
    **dict.fromkeys(RUNS_THE_ARTIFACT, ("coldpress/runtime/native/CMakeLists.txt", "coldpress/runtime/native/src/*")),
    **dict.fromkeys(("calibrate", "recalibrate", "package"), ("coldpress/runtime/native/src/crc32c.*",)),
}
"""The native core's sources by the stages that it works for: what is measured by running it, and checksums of what is
written. The others import it at most."""
LADDER = {"coldpress.runtime.cache": ("linked", "lru", "static", "window"), "coldpress.runtime.sparsity": ("dense",)}
"""What a run of the artifact is compared with, whatever the build uses (runtime/cli/ladder.py)."""
ASKS_EVERY_STAGE = ("preflight",)
"""It loads all stages by their names, for what they need, and may run them."""
Plugins = Mapping[str, tuple[str, ...]]
"""Package -> the plug-ins of it that a build uses; of a package that is not named, all count."""


def stage_digest(stage: str, plugins: Plugins, root: Path = ROOT) -> str:
    """Hex digest over the paths and contents of `source_files`."""
    files = source_files(stage, plugins, root)
    return digest(*(text for file in files for text in (file.relative_to(root).as_posix(), _text(file))))


def source_files(stage: str, plugins: Plugins, root: Path = ROOT) -> list[Path]:
    """The files that decide what a stage such as `order` results in, in a build that uses `plugins`, sorted."""
    if stage in RUNS_THE_ARTIFACT:
        plugins = {name: (*used, *LADDER.get(name, ())) for name, used in plugins.items()}
    pending = [f"coldpress.compiler.stages.{asked}" for asked in (STAGES if stage in ASKS_EVERY_STAGE else (stage,))]
    found: dict[str, list[Path]] = {}
    while pending:
        name = pending.pop()
        if name in found:
            continue
        found[name] = _files(name, root)
        pending += filter(None, [name.rpartition(".")[0]])  # a module's import runs its packages
        for file in found[name]:
            if file.suffix == ".py":
                imports, packages = _references(file, root)
                if stage not in RUNS_THE_ARTIFACT and not name.startswith((KERNELS, f"{SELECTORS}.")):
                    imports = [module for module in imports if not module.startswith(KERNELS)]
                    packages = [package for package in packages if package != KERNELS]
                pending += imports
                pending += [module for package in packages for module in _chosen(package, plugins, root)]
    kernels = [name.rpartition(".")[2] for name, files in found.items() if name.startswith(f"{KERNELS}.") and files]
    patterns = (*NATIVE_SOURCES.get(stage, ()), *(f"coldpress/runtime/native/src/{name}.*" for name in kernels))
    native = {file for pattern in patterns for file in root.glob(pattern) if file.is_file()}
    return sorted({file for files in found.values() for file in files} | native)


def _files(name: str, root: Path) -> list[Path]:
    """The files behind a module name; none for what is not ours."""
    path = root.joinpath(*name.split("."))
    if (path / "__init__.py").is_file():
        return [path / "__init__.py", *path.glob("*.j2")]
    module = path.with_name(f"{path.name}.py")
    return [module] if module.is_file() else []


def _chosen(package: str, plugins: Plugins, root: Path) -> list[str]:
    """The modules of a package that are loaded by name; the private ones come with those that import them."""
    folder = root.joinpath(*package.split("."))
    every = [file.stem for file in sorted(folder.glob("*.py")) if not file.stem.startswith("_")]
    return [package, *(f"{package}.{name}" for name in plugins.get(package, every))]


def _is_package(value: object, root: Path) -> TypeGuard[str]:
    """Whether `value` is like `coldpress.runtime.cache`; the name of a top package alone is an ordinary word."""
    parts = value.split(".") if isinstance(value, str) else []
    return len(parts) > 1 and parts[0] in PACKAGES and all(parts) and (root.joinpath(*parts) / "__init__.py").is_file()


@functools.cache
def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8", errors="replace")


@functools.cache
def _references(file: Path, root: Path) -> tuple[list[str], list[str]]:
    """(module names that a file imports, packages that it names in a text).

    The mark of a setting (schemas/config.py) names a package to say which values there are, and loads nothing. What
    is imported for the type checker alone never runs.
    """
    names: list[str] = []
    packages: list[str] = []
    nodes = list(_executed(ast.parse(_text(file), filename=str(file))))
    marks = {id(node.value) for node in nodes if isinstance(node, ast.keyword) and node.arg == "plugins"}
    for node in nodes:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Constant) and id(node) not in marks and _is_package(node.value, root):
            packages.append(node.value)
    return [name for name in names if name.split(".")[0] in PACKAGES], packages


def _executed(node: ast.AST) -> Iterator[ast.AST]:
    """A node and all below it, but for the bodies of `if TYPE_CHECKING`."""
    yield node
    checked = isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    children = node.orelse if isinstance(node, ast.If) and checked else ast.iter_child_nodes(node)
    for child in children:
        yield from _executed(child)
