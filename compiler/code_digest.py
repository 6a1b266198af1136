"""Finds the source files that a stage depends on, so that an edit reruns only the affected rules.

Follows imports statically from the stage's module through `compiler`, `runtime` and `schemas`. Plug-ins are loaded by
name: where the code names a package of plug-ins as text, the build's chosen plug-ins count, with their imports.
Snakemake sees only the shell command of a rule; so the rules put this digest into their `params` and pass it to jobs.
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
"""Only stages that run the artifact call all kernels. Other stages call those that the build's selectors import, for
fitting or for decisions about many tokens (`flash` does)."""
SELECTORS = "coldpress.runtime.sparsity"
NATIVE_SOURCES = {
    **dict.fromkeys(RUNS_THE_ARTIFACT, ("coldpress/runtime/native/CMakeLists.txt", "coldpress/runtime/native/src/*")),
    **dict.fromkeys(("calibrate", "recalibrate", "package"), ("coldpress/runtime/native/src/crc32c.*",)),
}
"""The native sources of the stages that use the native core: for running the artifact, and for checksums of written
files. Other stages at most import it."""
PLANNER, PLANNER_SOURCES = "coldpress.runtime.store.planner", "coldpress/runtime/native/src/plan.*"
"""The module that plans reads, and the native sources of its loop, in which every stage that plans reads runs."""
COMPARED: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "allocate": {"coldpress.runtime.cache": ("static",)},
    "explore": {"coldpress.runtime.cache": ("lfu",)},
    "report": {"coldpress.runtime.quantization": ("int4_group32", "int8_group32")},
    "verify": {
        "coldpress.runtime.cache": ("linked", "lru", "static", "window"),
        "coldpress.runtime.drafts": ("off",),
        "coldpress.runtime.sparsity": ("dense",),
    },
}
"""Stage -> package -> plug-ins of what the stage compares the build with, whatever the build uses: dense runs that pin
units, the whole model in other formats, a cache beside selectors that see residency, and the steps of
runtime/cli/ladder.py."""
MEASURES_ALL: Mapping[str, tuple[str, ...]] = {"explore": ("coldpress.runtime.quantization",)}
"""Stage -> packages all of whose plug-ins it measures, whatever the build uses."""
ASKS_EVERY_STAGE = ("preflight",)
"""It loads all stages by name, for their needs, and may run them."""
Plugins = Mapping[str, tuple[str, ...]]
"""Package -> its plug-ins that a build uses; all plug-ins of packages that are not named."""


def stage_digest(stage: str, plugins: Plugins, root: Path = ROOT) -> str:
    files = source_files(stage, plugins, root)
    return digest(*(text for file in files for text in (file.relative_to(root).as_posix(), _text(file))))


def source_files(stage: str, plugins: Plugins, root: Path = ROOT) -> list[Path]:
    """Returns the files that determine the result of a stage such as `order` in a build that uses `plugins`, sorted."""
    compared = COMPARED.get(stage, {})
    every = MEASURES_ALL.get(stage, ())
    plugins = {name: (*used, *compared.get(name, ())) for name, used in plugins.items() if name not in every}
    pending = [f"coldpress.compiler.stages.{asked}" for asked in (STAGES if stage in ASKS_EVERY_STAGE else (stage,))]
    found: dict[str, list[Path]] = {}
    while pending:
        name = pending.pop()
        if name in found:
            continue
        found[name] = _files(name, root)
        pending += filter(None, [name.rpartition(".")[0]])  # importing a module runs its packages
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
    patterns += (PLANNER_SOURCES,) if PLANNER in found else ()
    native = {file for pattern in patterns for file in root.glob(pattern) if file.is_file()}
    return sorted({file for files in found.values() for file in files} | native)


@functools.cache
def _files(name: str, root: Path) -> list[Path]:
    path = root.joinpath(*name.split("."))
    if (path / "__init__.py").is_file():
        return [path / "__init__.py", *path.glob("*.j2")]
    module = path.with_name(f"{path.name}.py")
    return [module] if module.is_file() else []


def _chosen(package: str, plugins: Plugins, root: Path) -> list[str]:
    """Returns the modules of a package that are loaded by name; private modules follow from imports."""
    folder = root.joinpath(*package.split("."))
    every = [file.stem for file in sorted(folder.glob("*.py")) if not file.stem.startswith("_")]
    return [package, *(f"{package}.{name}" for name in plugins.get(package, every))]


def _is_package(value: object, root: Path) -> TypeGuard[str]:
    """Tells whether `value` is text such as `coldpress.runtime.cache`; a top package's name is an ordinary word."""
    parts = value.split(".") if isinstance(value, str) else []
    return len(parts) > 1 and parts[0] in PACKAGES and all(parts) and (root.joinpath(*parts) / "__init__.py").is_file()


@functools.cache
def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8", errors="replace")


@functools.cache
def _references(file: Path, root: Path) -> tuple[list[str], list[str]]:
    """Returns (module names that a file imports, packages that it names as text). The mark of a setting
    (schemas/config.py) names a package only to list values and loads nothing. Imports for the type checker alone never
    run."""
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
    yield node
    checked = isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    children = node.orelse if isinstance(node, ast.If) and checked else ast.iter_child_nodes(node)
    for child in children:
        yield from _executed(child)
