"""Finds the inputs that a run has loaded, and which of them have changed since.

The inputs of a record are the project's files that its processes have read: modules, templates, profiles, the native
sources if the core was loaded, and the folders of real data. Comments, docstrings and, in documents, all but the
examples in Python do not count.
"""

import ast
import functools
import hashlib
import os
import re
import runpy
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from benchmarks.harness.places import DATA, ROOT

HOOK = Path(__file__).parent / "hook"
NATIVE = "runtime/native"
DATA_PREFIX = "data:"
"""Prefix of the name of an input that is a folder of the real data."""
IGNORED = (".venv", ".snakemake", "build", "build-native", "benchmarks/results")
WITHOUT_FIGURES = (
    *(
        f"benchmarks/harness/{name}.py"
        for name in (
            "__init__",
            "command",
            "hook/sitecustomize",
            "inputs",
            "keys",
            "kept",
            "places",
            "record",
            "shown",
            "tables",
        )
    ),
    "tests/support/warm",
    "tests/support/snakemake_server.py",
)
"""Files that print and keep figures or start processes, and so change no figure."""
C_COMMENT = re.compile(r'"(?:\\.|[^"\\])*"|//[^\n]*|/\*.*?\*/', re.DOTALL)
PYTHON = re.compile(r"```python\n(.*?)```", re.DOTALL)
"""Matches an example in Markdown."""
DIGITS = 16


def watch(notes: Path) -> None:
    """Makes this process and all that it starts or forks note the files that they read in a new file, from now on."""
    notes.touch()
    os.environ["BENCHMARK_INPUTS"] = str(notes)
    os.environ["BENCHMARK_ROOTS"] = os.pathsep.join(str(root) for root in (ROOT, DATA) if root)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(HOOK), os.environ.get("PYTHONPATH"))))
    runpy.run_path(str(HOOK / "sitecustomize.py"))["begin"](list(sys.modules.values()))


def watched(notes: Path) -> list[str]:
    """Returns the names of all inputs that the processes have noted, sorted."""
    return sorted(set(filter(None, map(_name_of, set(notes.read_text().splitlines())))))


def _name_of(path: str) -> str | None:
    file = Path(path).resolve()
    if file.name.startswith("_native.") and file.suffix == ".so":  # matches wherever it is installed
        return NATIVE
    if DATA and file.is_relative_to(DATA.resolve()):
        return DATA_PREFIX + "/".join(file.relative_to(DATA.resolve()).parts[:2])
    if not file.is_relative_to(ROOT):
        return None
    name = file.relative_to(ROOT).as_posix()
    ignored = name.startswith(IGNORED + WITHOUT_FIGURES) or "__pycache__" in file.parts
    return None if ignored or not file.is_file() else name


def digests(names: Iterable[str]) -> dict[str, str]:
    """Returns the digest of each input; leaves data folders out where there is no data."""
    found = {name: digest_of(name) for name in names}
    return {name: digest for name, digest in found.items() if digest is not None}


@functools.cache
def digest_of(name: str) -> str | None:
    """Returns a short sha256 of an input, of code without comments and docstrings; None for data that is not here."""
    if name.startswith(DATA_PREFIX):
        if DATA is None:
            return None
        path = DATA / name.removeprefix(DATA_PREFIX)
    else:
        path = ROOT / name
    if path.is_dir():
        suffixes = (".cpp", ".h", ".txt") if name == NATIVE else ("",)
        files = sorted(file for file in path.rglob("*") if file.is_file() and file.name.endswith(suffixes))
        return _sha256(*(part for file in files for part in (str(file.relative_to(path)).encode(), _content(file))))
    return _sha256(_content(path)) if path.is_file() else "gone"


def changed(recorded: Mapping[str, str]) -> list[str]:
    """Returns the inputs of a record whose content has changed."""
    return [name for name, digest in recorded.items() if digest_of(name) not in (digest, None)]


def code_now() -> str:
    """Returns a digest of the product, the benchmarks and their support; while it is equal, kept rows hold."""
    folders = ("runtime", "compiler", "schemas", "coldpress/cli", "profiles", "benchmarks", "demo", "tests/support")
    files = sorted(
        file
        for folder in folders
        for file in (ROOT / folder).rglob("*")
        if file.suffix in (".py", ".cpp", ".h", ".yaml", ".c") and "__pycache__" not in file.parts
    )
    return _sha256(*(part for file in files for part in (str(file.relative_to(ROOT)).encode(), file.read_bytes())))


def _sha256(*parts: bytes) -> str:
    found = hashlib.sha256()
    for part in parts:
        found.update(len(part).to_bytes(8, "little") + part)
    return found.hexdigest()[:DIGITS]


def _content(file: Path) -> bytes:
    if file.suffix == ".py":
        return _without_docstrings(file.read_text(encoding="utf-8")).encode()
    if file.suffix in (".cpp", ".h", ".c"):
        bare = C_COMMENT.sub(lambda found: found[0] if found[0].startswith('"') else " ", file.read_text("utf-8"))
        return " ".join(bare.split()).encode()
    if file.suffix == ".md":
        return "".join(PYTHON.findall(file.read_text(encoding="utf-8"))).encode()
    return file.read_bytes()


def _without_docstrings(text: str) -> str:
    """Returns a dump of the program without comments, docstrings and the `help` of options; texts below a field count
    as comments."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            node.keywords = [one for one in node.keywords if one.arg != "help"]
        for name in ("body", "orelse", "finalbody"):
            body = getattr(node, name, None)
            if isinstance(body, list):
                setattr(node, name, [one for one in body if not _is_text(one)])
    return ast.dump(tree)


def _is_text(node: object) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
