"""Reads what transformers' configuration class of a model declares: each key's default and type, and second names.

Parses the source of the class, since importing it takes seconds. Defaults that the class computes are not here
(`Architecture.DEFAULTS`).
"""

import ast
import functools
import importlib.util
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BASE = "configuration_utils.py"
"""The file of the class that all configurations extend."""


@dataclass(frozen=True)
class Declared:
    defaults: Mapping[str, Any]
    """Those that are literals."""
    types: Mapping[str, frozenset[str]]
    """Key -> the names in its annotation, such as `int` and `None`."""
    names: Mapping[str, str]
    """Second name of a key -> its first name, the class's `attribute_map`."""


@functools.cache
def declared(model_type: str, package: str) -> Declared:
    """Reads the class with this `model_type` in a package of transformers' models, and the classes that it extends;
    empty where the installed version has no such class."""
    found = Declared({}, {}, {})
    spec = importlib.util.find_spec("transformers")
    folder = Path(spec.origin).parent if spec and spec.origin else Path()
    own, base = folder / "models" / package / f"configuration_{package}.py", folder / BASE
    if not own.is_file():
        return found
    classes = _classes(base) | _classes(own)
    name = next((name for name in classes if _assigned(classes[name]).get("model_type") == model_type), None)
    while name is not None:
        fields = [node for node in classes[name].body if isinstance(node, ast.AnnAssign)]
        values = {ast.unparse(node.target): node for node in fields}
        kinds = {key: ast.unparse(node.annotation).replace(" ", "") for key, node in values.items()}
        types = {key: frozenset(kind.split("|")) for key, kind in kinds.items()}
        found = Declared(
            {**_literals({key: node.value for key, node in values.items()}), **found.defaults},
            {**types, **found.types},
            {**(_assigned(classes[name]).get("attribute_map") or {}), **found.names},
        )
        bases = [ast.unparse(node) for node in classes[name].bases]
        name = next((base for base in bases if base in classes), None)
    return found


def _classes(file: Path) -> dict[str, ast.ClassDef]:
    nodes = ast.parse(file.read_text(encoding="utf-8")).body
    return {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}


def _assigned(node: ast.ClassDef) -> dict[str, Any]:
    assigned = [entry for entry in node.body if isinstance(entry, ast.Assign)]
    return _literals({ast.unparse(entry.targets[0]): entry.value for entry in assigned})


def _literals(nodes: Mapping[str, ast.expr | None]) -> dict[str, Any]:
    found = dict[str, Any]()
    for name, node in nodes.items():
        with suppress(ValueError):  # of an expression
            found |= {} if node is None else {name: ast.literal_eval(node)}
    return found
