"""Writes the documents about the keys of `--config`: schemas/json/config.schema.json and docs/reference/keys.md.

    python -m tools.key_documents [--fix] [--options]

Both are generated from the records that declare the keys (compiler/workflow/keys.py). Without `--fix` it ends with code
1 if they are not up to date. They name the folders of plug-ins but not the plug-ins, so a new plug-in changes neither;
`--options` prints the plug-ins and their options.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from coldpress.compiler.workflow.keys import ConfigKey, config_keys, option_keys, plugin_keys
from coldpress.runtime import plugins

ROOT = Path(__file__).resolve().parents[1]
SCHEMA = ROOT / "schemas" / "json" / "config.schema.json"
KEYS = ROOT / "docs" / "reference" / "keys.md"
BEGIN = "<!-- keys: made by python -m tools.key_documents --fix -->\n"
END = "<!-- end of keys -->\n"
HEAD = ("| key | what it says, and its values | default |\n", "|---|---|---|\n")


def schema() -> str:
    """Returns the JSON Schema of `--config`, which also holds for the `settings` of a model's profile."""
    properties = {key.name: _property(key) for key in config_keys().values()}
    whole = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "urn:coldpress:schema:config",
        "title": "config",
        "type": "object",
        "properties": properties,
        "additionalProperties": {"description": "an option of a chosen plug-in"},
    }
    return json.dumps(whole, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def table() -> str:
    """Returns the table of docs/reference/keys.md, one row per key."""
    return "".join([*HEAD, *(_row(key) for key in config_keys().values())])


def options_table() -> str:
    """Returns the table of all plug-ins' options: a row per option, with the choices that have it."""
    names = [f"{key.name}: {', '.join(key.names)}\n" for key in config_keys().values() if key.mark.plugins]
    return "".join([*names, "\n", *HEAD, *_option_rows()])


def documents() -> dict[Path, str]:
    """Returns file -> its up-to-date text."""
    before, _, rest = KEYS.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    return {SCHEMA: schema(), KEYS: f"{before}{BEGIN}\n{table()}\n{END}{after}"}


def _options() -> Iterator[tuple[ConfigKey, str]]:
    """Yields (key, the choice that has it, such as `method=topk`) for every plug-in's options."""
    for package, named in plugin_keys().items():
        for plugin in plugins.names(package):
            for key in option_keys(package, plugin).values():
                yield key, f"{named.name}={plugin}"


def _option_rows() -> list[str]:
    """Returns a row per option; plug-ins with the same option share it."""
    choices: dict[tuple[str, str], list[str]] = {}
    for key, choice in _options():
        choices.setdefault((key.name, _row(key)), []).append(f"`{choice}`")
    return [row.replace(f"`{name}`", f"`{name}` ({', '.join(of)})", 1) for (name, row), of in choices.items()]


def _property(key: ConfigKey) -> dict[str, Any]:
    description = key.field.description or ""
    if key.mark.plugins:
        description += f"; {_plugin_words(key)}"
    found: dict[str, Any] = {"description": description}
    if key.mark.default:  # it depends on other keys, so that no value is the default
        found["description"] += f" (default: {key.mark.default.replace('`', '')})"
    elif key.default is not None:
        found["default"] = key.default
    if key.mark.plugins:
        return found | {"type": "string"}
    if key.names:
        return found | {"enum": list(key.names)}
    return found | (key.types[0] if len(key.types) == 1 else {"anyOf": key.types})


def _plugin_words(key: ConfigKey) -> str:
    """Says which folder holds the values of a key that names a plug-in."""
    return f"{'`auto` or ' if key.mark.auto else ''}a file of {key.mark.plugins.replace('.', '/')}"


def _row(key: ConfigKey) -> str:
    names = _plugin_words(key) if key.mark.plugins else " ".join(f"`{name}`" for name in key.names)
    values = names or key.in_words
    default = key.mark.default or f"`{json.dumps(key.default) if isinstance(key.default, bool) else key.default}`"
    return f"| `{key.name}` | {key.field.description} · {values} | {default} |\n"


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns 1 if a document is out of date."""
    parser = argparse.ArgumentParser(prog="python -m tools.key_documents", description=__doc__)
    parser.add_argument("--fix", action="store_true", help="write what is out of date")
    parser.add_argument("--options", action="store_true", help="print the plug-ins and their options, and do no more")
    arguments = parser.parse_args(argv)
    if arguments.options:
        print(options_table(), end="")
        return 0
    outdated = {path: text for path, text in documents().items() if path.read_text(encoding="utf-8") != text}
    for path, text in outdated.items():
        if arguments.fix:
            path.write_text(text, encoding="utf-8")
        print(f"{path.relative_to(ROOT)}: {'written' if arguments.fix else 'out of date; run it with --fix'}")
    return 1 if outdated and not arguments.fix else 0


if __name__ == "__main__":
    sys.exit(main())
