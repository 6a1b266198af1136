"""Runs one job: loads a stage's inputs, calls its `run`, and saves the returned record.

The signature `run(config, <records>…, *, layers, work)` says what a stage takes: every field of the config record is a
setting, every other parameter annotated with a record takes a record file (`tuple[Record, ...]` several), `layers` is a
list of layer numbers, `work` is the working folder whose files become the stage's array files, and `scratch` is a
folder that the stage removes. A `Job` holds all of it as values; on a command line each is a flag.
"""

import argparse
import functools
import glob
import importlib
import inspect
import shutil
import types
import typing
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from coldpress.compiler.code_digest import stage_digest
from coldpress.compiler.io import Workspace, digest, load_record, save_record, save_result, sha256_of
from coldpress.compiler.lock import job_lock
from coldpress.runtime.cli.command_line import fail, flag
from coldpress.schemas.base import Record
from coldpress.schemas.errors import ColdpressError, clipped

STAGES = "coldpress.compiler.stages"


@functools.cache
def parameters_of(stage: str) -> Mapping[str, typing.Any]:
    run = importlib.import_module(f"{STAGES}.{stage}").run
    hints = typing.get_type_hints(run)
    return {name: hints[name] for name in inspect.signature(run).parameters}


def record_of(hint: typing.Any) -> tuple[type[Record], bool, bool] | None:
    """Returns (record class, several, optional) for a parameter that is loaded from a record file, else None."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        inner = [argument for argument in typing.get_args(hint) if argument is not type(None)]
        found = record_of(inner[0])
        return (found[0], found[1], True) if found else None
    if typing.get_origin(hint) is tuple:
        hint, several = typing.get_args(hint)[0], True
    else:
        several = False
    return (hint, several, False) if inspect.isclass(hint) and issubclass(hint, Record) else None


def config_of(stage: str) -> type[Record]:
    return parameters_of(stage)["config"]


def records_of(stage: str) -> dict[str, tuple[type[Record], bool, bool]]:
    """Returns parameter -> (record class, several, optional) for each parameter that takes records."""
    found = {name: record_of(hint) for name, hint in parameters_of(stage).items() if name != "config"}
    return {name: described for name, described in found.items() if described is not None}


@dataclass(frozen=True)
class Job:
    stage: str
    settings: Mapping[str, typing.Any]
    """Fields of the stage's config record; missing fields have their defaults."""
    records: Mapping[str, tuple[Path, ...]]
    """Parameter -> its record files, one or several."""
    output: Path
    layers: tuple[int, ...] = ()
    threads: int = 1
    code: str = ""
    """Digest of the code that the stage's result depends on, from the rules; empty: computed over all possible code."""


def run_job(job: Job) -> Record:
    """Runs a stage and saves its record; raises ColdpressError if a setting or record does not fit, or is refused."""
    parameters = parameters_of(job.stage)
    config = _validated(parameters["config"], job.settings)
    inputs: dict[str, typing.Any] = {"config": config, "layers": job.layers, "threads": job.threads}
    input_digests: list[str] = []
    for name, (kind, several, _) in records_of(job.stage).items():
        paths = job.records.get(name, ())
        loaded = tuple(load_record(path, kind) for path in paths)
        input_digests += [name, *map(sha256_of, paths)]
        inputs[name] = loaded if several else (loaded[0] if loaded else None)
    output = job.output.parent.resolve() / job.output.name  # if it is a link into a cache, it is replaced
    inputs["scratch"] = output.with_name(f".{output.stem}.scratch")
    work = _workspace(job, config, output, input_digests) if "work" in parameters else None
    inputs["work"] = work
    _remove_leftovers(output, work.folder if work else None)
    run = importlib.import_module(f"{STAGES}.{job.stage}").run
    record = run(**{name: inputs[name] for name in parameters})
    if work:
        return save_result(record, output, work.folder)
    save_record(record, output)
    return record


def _workspace(job: Job, config: Record, output: Path, input_digests: list[str]) -> Workspace:
    code = job.code or stage_digest(job.stage, {})
    fingerprint = digest(job.stage, code, config.to_json(), *input_digests)
    return Workspace(output.with_name(f".{output.stem}.{fingerprint[:12]}.work"), fingerprint)


def execute(stage: str, argv: list[str]) -> None:
    parameters = parameters_of(stage)
    arguments = _build_parser(stage, parameters).parse_args(argv)
    given = {name: value if isinstance(value, list) else [value] for name, value in vars(arguments).items() if value}
    job = Job(
        stage=stage,
        settings=_settings_of(parameters["config"], arguments),
        records={name: tuple(given[name]) for name in records_of(stage) if name in given},
        output=arguments.output,
        layers=tuple(given.get("layers", ())),
        threads=getattr(arguments, "threads", 1),
        code=arguments.code,
    )
    with ExitStack() as held:
        if arguments.build is not None:
            held.enter_context(job_lock(arguments.build, stage))
        run_job(job)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> typing.NoReturn:
        raise SystemExit(fail(f"{clipped(message, 500)}; see `{self.prog} --help`"))


def _build_parser(stage: str, parameters: Mapping[str, typing.Any]) -> _Parser:
    module = importlib.import_module(f"{STAGES}.{stage}")
    parser = _Parser(
        prog=f"python -m coldpress.compiler {stage}",
        description=inspect.getdoc(module),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    settings = parser.add_argument_group("settings")
    for name, described in parameters["config"].model_fields.items():
        default = "" if described.is_required() else f" (default: {described.default})"
        text = f"{described.description or ''}{default}".replace("%", "%%")
        settings.add_argument(flag(name), required=described.is_required(), metavar="VALUE", help=text)
    records = parser.add_argument_group("input records")
    for name, (kind, several, optional) in records_of(stage).items():
        records.add_argument(
            flag(name),
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
    parser.add_argument("--code", default="", metavar="DIGEST", help="digest of the stage's code, from the workflow")
    parser.add_argument("--build", type=Path, metavar="FOLDER", help="folder of the job's build, whose lock it shares")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="where the record is written")
    return parser


def _settings_of(kind: type[Record], arguments: argparse.Namespace) -> dict[str, typing.Any]:
    """Returns settings from flags: text stays text where the field takes text, else it is read as JSON."""
    values: dict[str, typing.Any] = {}
    for name, described in kind.model_fields.items():
        text = getattr(arguments, name)
        if text is None:
            continue
        field = TypeAdapter(described.rebuild_annotation())
        try:
            values[name] = text if _takes(field, text) else field.validate_json(text)
        except ValidationError:
            values[name] = text
    return values


def _takes(field: TypeAdapter[typing.Any], text: str) -> bool:
    try:
        field.validate_python(text, strict=True)
    except ValidationError:
        return False
    return True


def _validated(kind: type[Record], values: Mapping[str, typing.Any]) -> Record:
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise ColdpressError(f"{flag(place)}: {first['msg']}, found {first['input']!r}") from error


def _remove_leftovers(output: Path, work: Path | None) -> None:
    """Deletes half-written files of killed jobs and working folders of other inputs; they are this job's alone."""
    for path in (*output.parent.glob(f".{output.name}.*.tmp"), *(work.rglob(".*.tmp") if work else ())):
        if path.is_file():
            path.unlink(missing_ok=True)
    for folder in output.parent.glob(f".{glob.escape(output.stem)}.*.work"):
        if folder != work:
            shutil.rmtree(folder, ignore_errors=True)
