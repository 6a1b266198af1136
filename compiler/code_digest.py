"""Finds the source files that a stage depends on, so that an edit reruns only the affected rules.

Follows imports statically from the stage's module through `compiler`, `runtime` and `schemas`. Plug-ins are loaded by
name: where the code names a package of plug-ins as text, those that the build chose count, with their imports; and of
the runtime's, also those whose name is a text anywhere in the stage's code, since it may compare the build with another
run. A stage that imports the native core depends on all of its sources. So an edit may rerun more than it changes, and
never less. Snakemake sees only the shell command of a rule; so the rules put this digest into their `params` and pass
it to jobs.
"""

import ast
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path

import coldpress
from coldpress.compiler.io import digest

ROOT = Path(coldpress.__file__).absolute().parents[1]
PACKAGES = ("coldpress", "demo")
RUNTIME = "coldpress.runtime."
NATIVE, NATIVE_FOLDER = "coldpress.runtime._native", "coldpress/runtime/native"
Plugins = Mapping[str, tuple[str, ...]]
"""Package -> its plug-ins that a build uses; all plug-ins of packages that are not named."""


def stage_digest(stage: str, plugins: Plugins, root: Path = ROOT) -> str:
    files = source_files(stage, plugins, root)
    return digest(*(text for file in files for text in (file.relative_to(root).as_posix(), _text(file))))


def source_files(stage: str, plugins: Plugins, root: Path = ROOT) -> list[Path]:
    """Returns the files that determine the result of a stage such as `order` in a build that uses `plugins`, sorted."""
    found: dict[str, list[Path]] = {}
    packages, texts = set[str](), set[str]()
    pending = {f"coldpress.compiler.stages.{stage}"}
    while pending:
        name = pending.pop()
        found[name] = _files(name, root)
        pending |= {*filter(None, [name.rpartition(".")[0]])}  # importing a module runs its packages
        for file in found[name]:
            if file.suffix == ".py":
                imports, named, others = _references(file, root)
                pending |= imports
                packages |= named
                texts |= others
        pending -= found.keys()
        if not pending:
            chosen = {module for package in packages for module in _chosen(package, plugins, texts, root)}
            pending = chosen - found.keys()
    native = {file for file in (root / NATIVE_FOLDER).rglob("*") if file.is_file() and NATIVE in found}
    return sorted({file for files in found.values() for file in files} | native)


@functools.cache
def _files(name: str, root: Path) -> list[Path]:
    path = root.joinpath(*name.split("."))
    if (path / "__init__.py").is_file():
        return [path / "__init__.py", *path.glob("*.j2")]
    module = path.with_name(f"{path.name}.py")
    return [module] if module.is_file() else []


def _chosen(package: str, plugins: Plugins, texts: set[str], root: Path) -> list[str]:
    """Returns the modules of a package that are loaded by name; private modules follow from imports."""
    folder = root.joinpath(*package.split("."))
    modules = [file.stem for file in folder.glob("*.py")] + [file.parent.name for file in folder.glob("*/__init__.py")]
    every = {name for name in modules if not name.startswith("_")}
    compared = every & texts if package.startswith(RUNTIME) else set[str]()
    used = every if package not in plugins else {*plugins[package], *compared}
    return [package, *(f"{package}.{name}" for name in used)]


def _is_package(text: str, root: Path) -> bool:
    """Tells whether a text is such as `coldpress.runtime.cache`; a top package's name is an ordinary word."""
    parts = text.split(".")
    return len(parts) > 1 and parts[0] in PACKAGES and all(parts) and (root.joinpath(*parts) / "__init__.py").is_file()


@functools.cache
def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8", errors="replace")


@functools.cache
def _references(file: Path, root: Path) -> tuple[set[str], set[str], set[str]]:
    """Returns (imports, packages named as text, other texts) of a file. The mark of a setting (schemas/config.py) names
    a package only to list values and loads nothing. Imports for the type checker alone never run."""
    imports, packages, texts = set[str](), set[str](), set[str]()
    nodes = list(_executed(ast.parse(_text(file), filename=str(file))))
    marks = {id(node.value) for node in nodes if isinstance(node, ast.keyword) and node.arg == "plugins"}
    for node in nodes:
        if isinstance(node, ast.Import):
            imports.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            imports.update([node.module, *(f"{node.module}.{alias.name}" for alias in node.names)])
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in marks:
            (packages if _is_package(node.value, root) else texts).add(node.value)
    return {name for name in imports if name.split(".")[0] in PACKAGES}, packages, texts


def _executed(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    checked = isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    children = node.orelse if isinstance(node, ast.If) and checked else ast.iter_child_nodes(node)
    for child in children:
        yield from _executed(child)
