"""Reads a matrix of builds from a YAML file: models x devices x floors, each with keys of its own.

models:
  - model: mistral-7b                    # a profile, a folder (from the file's own), or a hub model with its commit
  - {model: owner/name, revision: <40 hex digits>, corpus: tinystories}
devices: [pixel6, oneplus12]
floors: [1.02, 1.05]                     # max_ppl_ratio; may be left out
keys: {dram_budget: 50%}                 # of every build; may be left out
"""

import json
from dataclasses import dataclass
from pathlib import Path

from pydantic import ConfigDict, Field, ValidationError

from coldpress.compiler.profiles import model_names
from coldpress.schemas.base import Record
from coldpress.schemas.errors import ColdpressError

Value = str | bool | int | float


class ModelEntry(Record):
    """A model, with keys of its builds alone."""

    model_config = ConfigDict(frozen=True, extra="allow")

    model: str = Field(min_length=1)

    @property
    def keys(self) -> dict[str, Value]:
        """Returns the further keys."""
        return dict(self.model_extra or {})


class Matrix(Record):
    """What to build."""

    models: tuple[ModelEntry, ...] = Field(min_length=1)
    devices: tuple[str, ...] = Field(min_length=1)
    floors: tuple[float, ...] = ()
    """Values of max_ppl_ratio; empty for the default."""
    keys: dict[str, Value] = Field(default={})


@dataclass(frozen=True)
class Cell:
    """One build."""

    name: str
    """Model, device and floor, with slashes between them; the key of `accepted.json`."""
    config: dict[str, str]
    """As for `snakemake --config`."""

    @property
    def model(self) -> str:
        """The model's name, with which the build's name begins."""
        return self.name.partition("/")[0]


def read_matrix(path: Path) -> Matrix:
    """Reads a matrix.

    Raises:
        ColdpressError: if the file is missing, is no YAML, or lacks something.
    """
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


def cells(matrix: Matrix, folder: Path) -> list[Cell]:
    """Returns the builds, ordered by model; models' folders are looked for in `folder`.

    Raises:
        ColdpressError: if two builds have one name.
    """
    found: dict[str, Cell] = {}
    for entry in matrix.models:
        near = folder / entry.model
        is_profile = entry.model in model_names()  # as `coldpress build` takes it: a folder of that name does not count
        model = str(near) if near.is_dir() and not is_profile else entry.model
        for device in matrix.devices:
            for floor in matrix.floors or (None,):
                name = "/".join([Path(entry.model).name, Path(device).stem, *([] if floor is None else [f"{floor:g}"])])
                if name in found:
                    raise ColdpressError(
                        f"two builds of the matrix are {name}; give models other names, or leave one out"
                    )
                of_floor = {} if floor is None else {"max_ppl_ratio": floor, "label": f"ppl{floor:g}"}
                keys = {"model": model, "device": device} | matrix.keys | entry.keys | of_floor
                found[name] = Cell(name, {key: _text(value) for key, value in keys.items()})
    return list(found.values())


def _text(value: Value) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
