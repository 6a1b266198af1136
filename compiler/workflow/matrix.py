"""Reads a matrix of builds from a YAML file: models x devices x floors, each with keys of its own.

    snakemake --config matrix=builds.yaml [only=NAME,NAME]

models:
  - model: mistral-7b                    # a profile, a folder (from the file's own), or a hub model
  - {model: owner/name, revision: <40 hex digits>, corpus: tinystories}
devices: [pixel6, oneplus12]
floors: [1.02, 1.05]                     # max_ppl_ratio; may be left out
keys: {dram_budget: 50%}                 # of every build; may be left out
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ConfigDict, Field, ValidationError

from coldpress.compiler.profiles import model_names
from coldpress.compiler.workflow.settings import BuildConfig, flags, resolve
from coldpress.schemas.base import Record
from coldpress.schemas.errors import ColdpressError, clipped

MATRIX, ONLY = "matrix", "only"
"""Keys of `--config`: the file, and the names of the builds to make, with commas between them."""
ALONE = "build"
"""Name of a build that is no part of a matrix."""
SHARED = ("ingest", "tokenize", "relufy", "calibrate", "explore")
"""Stages whose results the builds of one model share; rules/builds.smk names their rules."""
Value = str | bool | int | float
Cells = dict[str, dict[str, str]]
"""Model, device and floor of a build, with slashes between them -> its values as for `snakemake --config`."""


class ModelEntry(Record):
    model_config = ConfigDict(frozen=True, extra="allow")

    model: str = Field(min_length=1)

    @property
    def keys(self) -> dict[str, Value]:
        return dict(self.model_extra or {})


class Matrix(Record):
    models: tuple[ModelEntry, ...] = Field(min_length=1)
    devices: tuple[str, ...] = Field(min_length=1)
    floors: tuple[float, ...] = ()
    """Values of max_ppl_ratio; empty for the default."""
    keys: dict[str, Value] = Field(default={})


def read_matrix(path: Path) -> Matrix:
    """Reads a matrix; raises ColdpressError if the file is missing, is no YAML, or lacks something."""
    import yaml

    try:
        return Matrix.model_validate_json(json.dumps(yaml.safe_load(path.read_text(encoding="utf-8"))))
    except OSError as error:
        raise ColdpressError(f"{path}: {error.strerror}; name a file with models and devices") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ColdpressError(f"{path} is no YAML: {' '.join(str(error).split())}") from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the file"
        raise ColdpressError(f"{path}: {place}: {first['msg']}; see `coldpress build --help`") from error


def cells(matrix: Matrix, folder: Path) -> Cells:
    """Lists the builds by model, whose folders are looked for in `folder`; raises ColdpressError if names repeat."""
    found: Cells = {}
    for entry in matrix.models:
        near = folder / entry.model
        is_profile = entry.model in model_names()  # as `coldpress build` takes it: a folder of that name does not count
        model = str(near) if near.is_dir() and not is_profile else entry.model
        for device in matrix.devices:
            for floor in matrix.floors or (None,):
                name = "/".join([Path(entry.model).name, Path(device).stem, *([] if floor is None else [f"{floor:g}"])])
                if "," in name:
                    raise ColdpressError(f"a build of the matrix would be {name}, but {ONLY} parts names by commas")
                if name in found:
                    raise ColdpressError(
                        f"two builds of the matrix are {name}; give models other names, or leave one out"
                    )
                of_floor = {} if floor is None else {"max_ppl_ratio": floor, "label": f"ppl{floor:g}"}
                keys = {"model": model, "device": device} | matrix.keys | entry.keys | of_floor
                found[name] = {key: _text(value) for key, value in keys.items()}
    return found


def builds_of(raw: Mapping[str, Any], ask: bool = True) -> dict[str, BuildConfig]:
    """Resolves the raw values of `--config`: one build, or those of a matrix by their names; `ask` as in `resolve`.
    Raises ColdpressError for what is unknown or refused in one of them, or if they cannot be made together."""
    if MATRIX not in raw:
        if ONLY in raw:
            raise ColdpressError(f"{ONLY} names builds of a matrix, and there is none; add {MATRIX}=FILE")
        return _with_drafts({ALONE: resolve(raw, ask=ask)})
    if others := sorted(raw.keys() - {MATRIX, ONLY}):
        raise ColdpressError(f"{others[0]} was given with {MATRIX}, whose file names models and keys; leave one out")
    found: dict[str, BuildConfig] = {}
    for name, config in selected(Path(str(raw[MATRIX])), str(raw[ONLY]) if ONLY in raw else None).items():
        try:
            found[name] = resolve(config, ask=ask)
        except ColdpressError as error:
            raise ColdpressError(f"{name}: {error}") from error
    found = _with_drafts(found)
    check_together(found)
    return found


def _with_drafts(builds: Mapping[str, BuildConfig]) -> dict[str, BuildConfig]:
    """Returns builds after those of their draft models, each once."""
    drafts = {build.draft.target_folder: build.draft for build in builds.values() if build.draft is not None}
    return {f"draft:{draft.model.name}/{draft.target}": draft for draft in drafts.values()} | dict(builds)


def asked(builds: Mapping[str, BuildConfig]) -> dict[str, BuildConfig]:
    """Returns the builds without those of draft models, which are parts of others."""
    return {name: build for name, build in builds.items() if not build.is_draft}


class Module(NamedTuple):
    name: str
    build: BuildConfig
    own: str
    """Begins the names of its rules; empty for a single build."""
    shared: str | None
    """Begins the names of the rules that builds of one model share; None where an earlier build has them."""


def modules(builds: Mapping[str, BuildConfig]) -> list[Module]:
    found: list[Module] = []
    models: set[Path] = set()
    for name, build in builds.items():
        model, own = ("", "") if name == ALONE else (f"{build.model.name}.", f"{build.model.name}.{build.target}.")
        found.append(Module(name, build, own, None if build.folder in models else model))
        models.add(build.folder)
    return found


def selected(file: Path, only: str | None) -> Cells:
    """Returns the builds of a file that `only` names, by default all; raises ColdpressError for a name it lacks."""
    found = cells(read_matrix(file), file.resolve().parent)
    names = found if only is None else only.split(",")
    for name in names:
        if name not in found:
            raise ColdpressError(f"{ONLY}={clipped(name)}: {file} has {', '.join(found)}")
    return {name: config for name, config in found.items() if name in names}


def check_together(builds: Mapping[str, BuildConfig]) -> None:
    """Refuses builds that overwrite each other or lie in two folders; raises ColdpressError naming both."""
    places: dict[Path, str] = {}
    for name, build in builds.items():
        first = next(iter(builds))
        if build.workdir != builds[first].workdir:
            raise ColdpressError(f"{first} and {name} have two values of build_dir; give one in `keys`")
        if (other := places.setdefault(build.target_folder, name)) != name:
            raise ColdpressError(f"{other} and {name} would both be built in {build.target_folder}")
        shares = next(other for other in builds if builds[other].folder == build.folder)
        for stage in SHARED:
            if flags(build, stage) != flags(builds[shares], stage) or build.model != builds[shares].model:
                raise ColdpressError(
                    f"{shares} and {name} share the results of {stage}, but their settings of it differ; "
                    "give them one setting, or write two files with a build_dir each"
                )


def _text(value: Value) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
