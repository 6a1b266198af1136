"""Compiles a model for a device: runs `snakemake --config …` with the rules of this checkout, and shows its progress.

Every key of a build is a flag, in small letters with hyphens; an option of a chosen plug-in is one, too, and is not in
this list (`--window-tokens 3` with `--cache window`). What is built already is not built again.
"""

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from coldpress.runtime.cli.command_line import examples_of
from coldpress.schemas.errors import ColdpressError

EXAMPLES = """
  coldpress build mistral-7b --device pixel6 --corpus my-text.txt
  coldpress build ./my-checkpoint --device build/host.yaml --dram-budget 1GB,2GB
  coldpress build demo --device pixel6 --dry-run
  coldpress build --matrix builds.yaml --accepted accepted.json
"""
KEY = "key_"
"""Before the name of a key, so that it is no other flag's."""
GIVEN_OTHERWISE = ("model",)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of `coldpress build`: how to run it, then all keys."""
    parser.description, parser.epilog = __doc__, examples_of("build", EXAMPLES)
    parser.usage = "coldpress build MODEL --device DEVICE [--KEY VALUE ...]"
    parser.add_argument("model", nargs="?", help="a profile's name, a folder with a checkpoint, or a model of the hub")
    _add_matrix(parser)
    parser.add_argument(
        "--cores", default="all", metavar="N", help="cores of this machine that jobs share (default: all)"
    )
    parser.add_argument("--dry-run", action="store_true", help="only show what would be done")
    parser.add_argument(
        "--profile", metavar="FOLDER", help="snakemake's profile, for a cluster (default: profiles/default)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object; progress goes to standard error")
    parser.set_defaults(takes_more=True)
    keys = parser.add_argument_group("keys")
    for name, declared in known_keys().items():
        if name not in GIVEN_OTHERWISE:
            keys.add_argument(f"--{_flag(name)}", dest=f"{KEY}{name}", metavar="VALUE", help=_help(declared))


def _add_matrix(parser: argparse.ArgumentParser) -> None:
    matrix = parser.add_argument_group("many builds")
    matrix.add_argument("--matrix", type=Path, metavar="FILE", help="build models x devices x floors of a YAML file")
    matrix.add_argument(
        "--output",
        type=Path,
        default=Path("build/matrix"),
        metavar="FOLDER",
        help="index.html, summary.json, junit.xml and changes.md of a matrix (default: build/matrix)",
    )
    matrix.add_argument(
        "--accepted",
        type=Path,
        metavar="FILE",
        help="what a matrix was accepted with: a build that is worse in quality, speed, size or determinism fails",
    )
    matrix.add_argument("--accept", action="store_true", help="write this matrix into --accepted")
    matrix.add_argument(
        "--update-lock",
        action="store_true",
        help="write the lock file beside the matrix anew: models whose weights or text differ from it are not built",
    )


def run(arguments: argparse.Namespace) -> int:
    """Builds; returns the exit code of the build.

    Raises:
        ColdpressError: if a flag has no value or does not go with another, or there are no rules.
    """
    config = {
        name.removeprefix(KEY): value
        for name, value in vars(arguments).items()
        if name.startswith(KEY) and value is not None
    }
    config |= options_of(arguments.more)
    told = ["--cores", arguments.cores, *(["--dry-run"] if arguments.dry_run else [])]
    told += ["--workflow-profile", arguments.profile] if arguments.profile else []
    if arguments.matrix is not None:
        return _run_matrix(arguments, config, told)
    if arguments.model is None:
        raise ColdpressError("no model was given; name one, or a file of builds with --matrix")
    return _shown({"model": arguments.model} | config, told, arguments)


def _run_matrix(arguments: argparse.Namespace, config: Mapping[str, str], told: Sequence[str]) -> int:
    """Builds a matrix; returns its exit code."""
    if arguments.model is not None or config:
        given = arguments.model or next(f"--{_flag(key)}" for key in config)
        raise ColdpressError(
            f"'{given}' was given with --matrix, whose file names models and keys; leave one of them out"
        )
    if arguments.accept and arguments.accepted is None:
        raise ColdpressError("--accept writes a file; name it with --accepted")
    if arguments.dry_run:
        return _shown({"matrix": str(arguments.matrix)}, told, arguments)
    from coldpress.cli.matrix import run as matrix

    shared = (arguments.matrix, arguments.output, arguments.accepted, told)
    with _beside_json(arguments):
        code, results = matrix.run(
            *shared,
            accept=arguments.accept,
            update_lock=arguments.update_lock,
            tell=lambda line: print(line, flush=True),
        )
    if arguments.json:
        print(json.dumps({"exit_code": code, **results.model_dump(mode="json")}))
    return code


def _shown(config: Mapping[str, str], told: Sequence[str], arguments: argparse.Namespace) -> int:
    """Runs snakemake and shows its progress; returns its exit code."""
    with _beside_json(arguments):
        code = followed(config, told)
    if arguments.json:
        is_built = not code and not arguments.dry_run
        print(json.dumps({"exit_code": code, **(built(config) if is_built else {})}))
    return code


def _beside_json(arguments: argparse.Namespace) -> contextlib.AbstractContextManager[object]:
    """Redirects progress to standard error where standard output is for one JSON object."""
    return contextlib.redirect_stdout(sys.stderr) if arguments.json else contextlib.nullcontext()


def followed(config: Mapping[str, str], told: Sequence[str]) -> int:
    """Runs snakemake, and shows its progress; returns the exit code of the build."""
    import snakemake  # noqa: F401  says what to install, before anything else is missing

    from coldpress.compiler.python_api import started  # the help needs none of it
    from coldpress.compiler.workflow.progress import follow

    with started(config, told) as process:
        assert process.stdout is not None
        try:
            return follow(process.stdout)
        except KeyboardInterrupt:  # the terminal has interrupted snakemake, too, which ends its jobs first
            process.wait()
            raise


def options_of(words: Sequence[str]) -> dict[str, str]:
    """Returns plug-ins' options by name, from flags that the parser does not know: `--name value` or `--name=value`.

    Raises:
        ColdpressError: if a word is no such flag, or has no value.
    """
    found: dict[str, str] = {}
    left = list(words)
    while left:
        name, is_one, value = left.pop(0).partition("=")
        if not name.startswith("--") or not (is_one or left):
            raise ColdpressError(f"'{name}' was given, expected --KEY VALUE; see `coldpress build --help`")
        found[name.removeprefix("--").replace("-", "_")] = value if is_one else left.pop(0)
    return found


def built(config: Mapping[str, str]) -> dict[str, Any]:
    """Returns what a finished build made, as JSON-ready data."""
    from coldpress.compiler.io import load_record
    from coldpress.compiler.workflow.settings import resolve
    from coldpress.schemas.metrics import Metrics

    resolved = resolve(config)
    metrics = load_record(resolved.target_folder / "metrics.json", Metrics)
    return {
        "artifact": _here(resolved.artifact),
        "manifest_sha256": metrics.artifact_sha256,
        "report": _here(resolved.target_folder / "report.html"),
        "metrics": metrics.model_dump(mode="json"),
    }


def known_keys() -> dict[str, dict[str, Any]]:
    """Returns the keys of a build from their JSON schema: name -> what the schema says of it."""
    text = resources.files("coldpress.schemas").joinpath("json/config.schema.json").read_text(encoding="utf-8")
    return json.loads(text)["properties"]


def _here(path: Path) -> str:
    """Returns a path as seen from the current folder."""
    return os.path.relpath(path)


def _flag(name: str) -> str:
    return name.replace("_", "-")


def _help(declared: Mapping[str, Any]) -> str:
    default = declared.get("default")
    text = declared["description"] + ("" if default is None else f" (default: {default})")
    return text.replace("%", "%%")
