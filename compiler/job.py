"""One job: loads a stage's inputs, calls its `run`, saves the record that it returns.

The command line of a stage is read off its `run(config, <records>…, *, layers, work)`: every field of the config record
is a flag, every other parameter annotated with a record is `--<name> RECORD.json` (`tuple[Record, ...]` takes several),
`layers` is a list of layer numbers, and `work` is the folder of array files beside the output.
"""

import argparse
import importlib
import inspect
import types
import typing
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from compiler._io import Workspace, digest, load_record, save_record, sha256_of
from compiler.workflow.code_digest import stage_digest
from schemas.base import Record
from schemas.errors import ColdpressError

STAGES = (
    "ingest",
    "tokenize",
    "preflight",
    "calibrate",
    "allocate",
    "distill",
    "recalibrate",
    "predict",
    "place",
    "order",
    "quantize",
    "layout",
    "package",
    "verify",
    "publish",
    "report",
)


def parameters_of(stage: str) -> dict[str, typing.Any]:
    """The parameters of a stage's `run` with their annotations, in order."""
    run = importlib.import_module(f"compiler.{stage}").run
    hints = typing.get_type_hints(run)
    return {name: hints[name] for name in inspect.signature(run).parameters}


def record_of(hint: typing.Any) -> tuple[type[Record], bool, bool] | None:
    """(record class, several, optional) for a parameter that is loaded from a record file, else None."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        inner = [argument for argument in typing.get_args(hint) if argument is not type(None)]
        found = record_of(inner[0])
        return (found[0], found[1], True) if found else None
    if typing.get_origin(hint) is tuple:
        hint, several = typing.get_args(hint)[0], True
    else:
        several = False
    return (hint, several, False) if inspect.isclass(hint) and issubclass(hint, Record) else None


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _build_parser(stage: str, parameters: dict[str, typing.Any]) -> argparse.ArgumentParser:
    module = importlib.import_module(f"compiler.{stage}")
    parser = argparse.ArgumentParser(
        prog=f"python -m compiler {stage}",
        description=inspect.getdoc(module),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    settings = parser.add_argument_group("settings")
    for name, field in parameters["config"].model_fields.items():
        text = f"{field.description or ''} (default: {field.default})" if not field.is_required() else field.description
        settings.add_argument(_flag(name), required=field.is_required(), metavar="VALUE", help=text)
    records = parser.add_argument_group("input records")
    for name, hint in parameters.items():
        found = None if name == "config" else record_of(hint)
        if found:
            kind, several, optional = found
            records.add_argument(
                _flag(name),
                type=Path,
                nargs="+" if several else None,
                required=not optional,
                metavar="FILE",
                help=f"{kind.__name__} record" + (" (one per chunk of layers)" if several else ""),
            )
    if "layers" in parameters:
        parser.add_argument("--layers", type=int, nargs="+", required=True, metavar="N", help="layers of this job")
    if "threads" in parameters:
        parser.add_argument("--threads", type=int, default=1, metavar="N", help="processor cores to use (default: 1)")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="where the record is written")
    return parser


def _config_of(kind: type[Record], arguments: argparse.Namespace) -> Record:
    """The stage's config from flags: texts are read as JSON where that fits the field, else taken as they are."""
    values: dict[str, typing.Any] = {}
    for name, field in kind.model_fields.items():
        text = getattr(arguments, name)
        if text is None:
            continue
        adapter = TypeAdapter(field.rebuild_annotation())
        try:
            values[name] = adapter.validate_json(text)
        except ValidationError:
            values[name] = text
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise ColdpressError(f"{_flag(place)}: {first['msg']}, found {first['input']!r}") from error


def execute(stage: str, argv: list[str]) -> None:
    """Runs one stage from its command line."""
    parameters = parameters_of(stage)
    arguments = _build_parser(stage, parameters).parse_args(argv)
    inputs: dict[str, typing.Any] = {"config": _config_of(parameters["config"], arguments)}
    input_digests: list[str] = []
    for name, hint in parameters.items():
        found = None if name == "config" else record_of(hint)
        if not found:
            continue
        kind, several, _ = found
        value = getattr(arguments, name)
        paths = value if several and value else [value] if value else []
        loaded = tuple(load_record(path, kind) for path in paths)
        input_digests += [name, *map(sha256_of, paths)]
        inputs[name] = loaded if several else (loaded[0] if loaded else None)
    for name in ("layers", "threads"):
        if name in parameters:
            inputs[name] = tuple(arguments.layers) if name == "layers" else arguments.threads
    if "work" in parameters:
        fingerprint = digest(stage, stage_digest(stage), inputs["config"].to_json(), *input_digests)
        inputs["work"] = Workspace(arguments.output.resolve().with_suffix(""), fingerprint)
    _remove_leftovers(arguments.output.resolve())
    save_record(importlib.import_module(f"compiler.{stage}").run(**inputs), arguments.output)


def _remove_leftovers(output: Path) -> None:
    """Half-written files of a job that was killed: a job is the only one that writes its record and its folder."""
    for path in (*output.parent.glob(f".{output.name}.*.tmp"), *output.with_suffix("").rglob(".*.tmp")):
        if path.is_file():
            path.unlink(missing_ok=True)
