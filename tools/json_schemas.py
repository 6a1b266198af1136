"""Writes the JSON Schemas of the records that others read or write, one file per module of coldpress.schemas.

    python -m tools.json_schemas [--fix]

A module with one outermost record gives that record's schema; one with several accepts any of them. The records are
the source: `python -m tools.json_schemas --fix` writes the files, and a test keeps them equal. Keys of `--config` are
declared by the stages, so config.schema.json is made by tools/key_documents.py.
"""

import argparse
import importlib
import json
import sys
from pathlib import Path
from typing import Any

from pydantic.json_schema import GenerateJsonSchema, models_json_schema

from coldpress.schemas.base import Record
from coldpress.schemas.manifest import Manifest
from coldpress.schemas.sealed import KEY

FOLDER = Path(__file__).resolve().parents[1] / "schemas" / "json"
MODULES = ("device", "manifest", "profiles")
"""Profiles of devices and models, and manifests of artifacts; other records stay inside a build."""
ELSEWHERE = {"config.schema.json"}
DIALECT = "https://json-schema.org/draft/2020-12/schema"


class _Untitled(GenerateJsonSchema):
    def field_title_should_be_set(self, schema: Any) -> bool:
        return False  # pydantic's titles repeat the fields' names


def generate() -> dict[str, str]:
    """File name -> text of every schema."""
    return {f"{name}.schema.json": _text(name, _outermost(name)) for name in MODULES}


def _outermost(name: str) -> list[type[Record]]:
    """Returns the records of a module that no other record of the module contains or extends."""
    module = importlib.import_module(f"coldpress.schemas.{name}")
    defined = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Record) and value.__module__ == module.__name__
    ]
    inner = {contained for record in defined for contained in _contained(record)} | {Record.__name__}
    extended = {base.__name__ for record in defined for base in record.__mro__[1:]}
    generic = {record.__name__ for record in defined if record.__pydantic_generic_metadata__["parameters"]}
    return [record for record in defined if record.__name__ not in inner | extended | generic]


def _contained(record: type[Record]) -> set[str]:
    if record.__pydantic_generic_metadata__["parameters"]:
        return set()
    return set(record.model_json_schema().get("$defs", {})) - {record.__name__}


def _text(name: str, records: list[type[Record]]) -> str:
    definitions = _renamed(
        models_json_schema([(record, "validation") for record in records], schema_generator=_Untitled)[1]
    )
    for record in records:
        _add_digest(definitions["$defs"][record.__name__], required=record is Manifest)
    references: list[dict[str, str]] = [{"$ref": f"#/$defs/{record.__name__}"} for record in records]
    schema: dict[str, Any] = {"$schema": DIALECT, "$id": f"urn:coldpress:schema:{name}", "title": name} | definitions
    schema |= references[0] if len(references) == 1 else {"anyOf": references}
    return json.dumps(schema, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def _add_digest(definition: dict[str, Any], *, required: bool) -> None:
    """Adds the digest that the file of an outermost record carries (schemas/sealed.py); a manifest must have it."""
    definition["properties"][KEY] = {"pattern": "^[0-9a-f]{64}$", "type": "string"}
    definition.setdefault("required", []).extend([KEY] * required)


def _renamed(definitions: dict[str, Any]) -> dict[str, Any]:
    """Gives variants of a generic record short names, such as `Figure_integer`; pydantic spells out the Python type."""
    text = json.dumps(definitions)
    for name, definition in definitions["$defs"].items():
        generic, _, variant = name.partition("_")
        if variant:
            value = definition["properties"]["value"]
            kind = value["items"]["$ref"].rpartition("/")[2] if value["type"] == "array" else value["type"]
            short = f"{generic}_{kind}"
            text = text.replace(f'/{name}"', f'/{short}"').replace(f'"{name}"', f'"{short}"')
            text = text.replace(json.dumps(definition["title"]), f'"{short}"')
    return json.loads(text)


def outdated() -> list[str]:
    """Returns the names of schema files that are missing or different, or that belong to no module."""
    expected = generate()
    present = {path.name for path in FOLDER.glob("*.schema.json")} - ELSEWHERE
    different = [name for name in expected if name in present and _read(name) != expected[name]]
    return sorted(different + list(present ^ set(expected)))


def _read(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")


def write() -> None:
    """Writes all schemas, and deletes those of modules that are gone."""
    FOLDER.mkdir(exist_ok=True)
    expected = generate()
    for path in FOLDER.glob("*.schema.json"):
        if path.name not in {*expected, *ELSEWHERE}:
            path.unlink()
    for name, text in expected.items():
        (FOLDER / name).write_text(text, encoding="utf-8")


def main(argv: list[str] | None = None) -> int:
    """Checks or writes the files; returns 1 if a file is out of date and was not written."""
    parser = argparse.ArgumentParser(prog="python -m tools.json_schemas", description=__doc__)
    parser.add_argument("--fix", action="store_true", help="write the files that are out of date")
    arguments = parser.parse_args(argv)
    names = outdated()
    if arguments.fix:
        write()
    for name in names:
        state = "written" if arguments.fix else "out of date; run python -m tools.json_schemas --fix"
        print(f"schemas/json/{name}: {state}")
    return 1 if names and not arguments.fix else 0


if __name__ == "__main__":
    sys.exit(main())
