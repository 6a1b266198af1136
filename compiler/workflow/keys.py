"""Defines the keys of `snakemake --config`: finds them in the records that declare them, and reads a user's values.

A key is a field marked `Key` in a stage's settings record (schemas/config.py), a field of a plug-in's `OPTIONS`, or one
of `WorkflowKeys`, for decisions that belong to no single stage. tools/key_documents.py documents them.
"""

import difflib
import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from coldpress.compiler.candidates import AUTO
from coldpress.compiler.job import config_of
from coldpress.compiler.pipeline import STAGES
from coldpress.runtime import plugins as _plugins
from coldpress.runtime.cli.command_line import flag
from coldpress.schemas.base import MAX_EXACT_INTEGER, PositiveCount, Record
from coldpress.schemas.config import BRANCH_PATTERN, NAME_PATTERN, Key, OptionsOf
from coldpress.schemas.errors import ColdpressError, UnknownNameError, clipped
from coldpress.schemas.families import JOINT

MAX_SHARDS = 1024
"""The most shards: each is a job, which Snakemake plans while it reads the rules."""


class WorkflowKeys(Record):
    model: Annotated[str, Key()] = Field(
        default="relu-demo", description="a profile of profiles/models, a folder, or a hub id"
    )
    revision: Annotated[str | None, Key(default="the profile's, or main")] = Field(
        default=None,
        pattern=BRANCH_PATTERN,
        description="a commit of the hub, or a branch, which the first build pins to a commit; of a profile with "
        "packages it takes the hub's model instead",
    )
    locked: Annotated[bool, Key()] = Field(
        default=False, description="whether a branch of the hub is refused that no earlier build has pinned"
    )
    device: Annotated[str, Key()] = Field(
        default="pixel6",
        description="a device: the name of a profile, or its file in YAML or JSON; the one that will run the artifact",
    )
    label: Annotated[str | None, Key(default="none")] = Field(
        default=None,
        pattern=NAME_PATTERN,
        description="letters, digits and .-_ between them: builds of other labels stay beside this one",
    )
    build_dir: Annotated[str, Key()] = Field(default="build", min_length=1, description="the folder of all builds")
    distill: Annotated[bool, Key()] = Field(
        default=False, description="whether the model is distilled; where leaving out units loses too much"
    )
    draft_model: Annotated[str | None, Key(default="none")] = Field(
        default=None,
        description="a smaller model with the same tokenizer, as `model` names one, which drafts tokens that the model "
        "checks: the same text in fewer passes over flash; it takes a part of dram_budget",
    )
    calibration_shards: Annotated[int, Field(ge=1, le=MAX_SHARDS), Key()] = Field(
        default=1, description="jobs that calibration text is shared out to; several on a cluster"
    )
    layers_per_job: Annotated[PositiveCount | None, Key(default="four jobs per stage")] = Field(
        default=None,
        description="layers of one job of a stage that works layer by layer; fewer on a cluster of many nodes",
    )


MAX_VALUE_CHARS = 4096
"""Length limit of a value: Linux's longest path."""
MAX_NUMBER_CHARS = 300
MAX_NAME_CHARS = 200
"""Length limit of an artifact's name: file systems take 255, and files under construction have longer names."""
PATHS = ("model", "device", "corpus", "imatrix", "llama_bench", "build_dir")
"""Keys whose values may be paths: the system refuses some names."""
NOT_IN_PROFILES = ("model", "revision", "locked", "device", "label", "build_dir", "draft_model")


@dataclass(frozen=True)
class ConfigKey:
    name: str
    field: FieldInfo
    mark: Key
    owner: str
    """The declaring class, such as `coldpress.compiler.stages.order.OrderConfig`."""

    @property
    def default(self) -> Any:
        """The field's default; None where the workflow derives one or leaves the choice to the stage."""
        return None if self.field.is_required() else self.field.default

    @property
    def names(self) -> tuple[str, ...]:
        if self.mark.plugins:
            fit = filter(self._fits, _plugins.names(self.mark.plugins))
            return (*([AUTO] if self.mark.auto else []), *fit)
        if not all("enum" in part for part in self.types):
            return ()
        return tuple(value for part in self.types for value in part["enum"])

    def _fits(self, name: str) -> bool:
        try:
            TypeAdapter(self.field.rebuild_annotation()).validate_python(name)
        except ValidationError:
            return False
        return True

    @property
    def types(self) -> list[dict[str, Any]]:
        """The JSON Schemas of the types that a value may have."""
        schema = TypeAdapter(self.field.rebuild_annotation()).json_schema()
        return [part for part in schema.get("anyOf", [schema]) if part.get("type") != "null"]

    @property
    def in_words(self) -> str:
        """The types of a value in words, such as `a number above 0`."""
        return " or ".join(dict.fromkeys(map(_in_words, self.types)))

    @property
    def expected(self) -> str:
        """The accepted values, in words that complete "expected …"."""
        if self.names:
            return ", ".join(self.names[:-1]) + (" or " if self.names[1:] else "") + self.names[-1]
        return f"{self.in_words}: {self.field.description}"

    def read(self, raw: Any) -> Any:
        """Returns the value of `raw`: Snakemake passes `true` as text, 1e3 as 1000.0, and a model named 7 as a number.
        Raises ColdpressError if no reading is valid; the text is one sentence."""
        if raw is None or raw == "":
            raise ColdpressError(f"config key '{self.name}' has no value; leave it out to take its default")
        _check_size(self.name, raw)
        if self.names:
            several = str(raw).split(JOINT) if self.mark.joint else []
            for name in several if len(several) > 1 else [str(raw)]:
                if name not in self.names or (name == AUTO and len(several) > 1):
                    raise UnknownNameError(self.name, name, self.names)
            return str(raw)
        adapter = TypeAdapter(self.field.rebuild_annotation())
        for candidate in _readings(raw):
            try:
                return adapter.validate_python(candidate, strict=True)
            except ValidationError:
                continue
        raise ColdpressError(f"config key '{self.name}' is {clipped(repr(raw))}, expected {self.expected}")


@functools.cache
def config_keys() -> dict[str, ConfigKey]:
    """Returns every key but plug-ins' options, by name; records inherit the keys that several stages share."""
    found: dict[str, ConfigKey] = {}
    for record in (WorkflowKeys, *map(config_of, STAGES)):
        for name, mark in marked(record).items():
            declared = ConfigKey(name, record.model_fields[name], mark, _owner(record, name))
            if found.setdefault(name, declared).owner != declared.owner:
                raise TypeError(f"config key {name} is declared in {found[name].owner} and in {declared.owner}")
    return found


def marked(record: type[Record]) -> dict[str, Key]:
    found = {name: _mark_of(field, Key) for name, field in record.model_fields.items()}
    return {name: mark for name, mark in found.items() if mark is not None}


def option_fields(record: type[Record]) -> dict[str, str]:
    """Returns the field that takes a plug-in's options -> the field that names the plug-in."""
    found = {name: _mark_of(field, OptionsOf) for name, field in record.model_fields.items()}
    return {name: mark.field for name, mark in found.items() if mark is not None}


def option_keys(package: str, plugin: str) -> dict[str, ConfigKey]:
    options = _plugins.load_class(package, _plugins.PluginBase, plugin).OPTIONS
    owner = f"{package}.{plugin}"
    return {
        name: ConfigKey(name, field, _mark_of(field, Key) or Key(), owner)
        for name, field in options.model_fields.items()
    }


def plugin_keys() -> dict[str, ConfigKey]:
    """Returns package -> the key whose value names its plug-in; with several, the first declared, which has options."""
    found: dict[str, ConfigKey] = {}
    for key in config_keys().values():
        if key.mark.plugins:
            found.setdefault(key.mark.plugins, key)
    return found


def owners_of(option: str, chosen: Mapping[str, tuple[str, ...]] | None = None) -> list[tuple[str, str]]:
    """Returns (package, plug-in) of each plug-in that has such an option: among the chosen ones, or among all."""
    return [
        (package, plugin)
        for package in plugin_keys()
        for plugin in (chosen[package] if chosen else _plugins.names(package))
        if option in option_keys(package, plugin)
    ]


def unknown_key(name: str, chosen: Mapping[str, tuple[str, ...]]) -> ColdpressError:
    """The error about a key that this build does not have; `chosen` are the plug-ins that it may use, by package."""
    keys, owners = plugin_keys(), owners_of(name)
    if owners:
        listed = " and of ".join(f"{keys[package].name}={plugin}" for package, plugin in owners)
        has = ", ".join(f"{keys[package].name}={' or '.join(chosen[package]) or 'none'}" for package in dict(owners))
        return ColdpressError(
            f"config key '{name}' is an option of {listed}, and this build has {has}; leave it out or choose what it "
            "belongs to"
        )
    pairs = ((package, plugin) for package, plugins in chosen.items() for plugin in plugins)
    options = (option for pair in pairs for option in option_keys(*pair))
    return UnknownNameError("config key", name, {*config_keys(), *options})


def check_flags(names: Iterable[str]) -> None:
    """Refuses flags that are neither keys nor options of plug-ins, with a ColdpressError that names the nearest one."""
    for name in names:
        if name not in config_keys() and not owners_of(name):
            near = difflib.get_close_matches(name, config_keys(), n=1)
            meant = f" (did you mean {flag(near[0])}?)" if near else ""
            raise ColdpressError(f"there is no flag '{flag(name)}'{meant}; see `coldpress build --help`")


def _owner(record: type[Record], field: str) -> str:
    owner = next(kind for kind in reversed(record.__mro__) if field in getattr(kind, "__annotations__", {}))
    return f"{owner.__module__}.{owner.__qualname__}"


def _mark_of(field: FieldInfo, kind: type[Any]) -> Any:
    return next((mark for mark in field.metadata if isinstance(mark, kind)), None)


def _in_words(schema: Mapping[str, Any]) -> str:
    """Translates a JSON Schema, such as `a number above 0 and at most 1`."""
    if "const" in schema:
        return str(schema["const"])
    kinds = {"integer": "a whole number", "number": "a number", "boolean": "true or false", "string": "text"}
    bounds = [
        f"{words} {schema[name]}"
        for name, words in (
            ("exclusiveMinimum", "above"),
            ("minimum", "at least"),
            ("exclusiveMaximum", "below"),
            ("maximum", "at most"),
        )
        if name in schema and schema[name] != MAX_EXACT_INTEGER
    ]
    return " ".join([kinds[schema["type"]], " and ".join(bounds)]).strip()


def _check_size(name: str, raw: Any) -> None:
    """Refuses values that are far too long: Python reads and writes integers of only some thousand digits."""
    if isinstance(raw, int) and abs(raw) >= 10**MAX_NUMBER_CHARS:
        raise ColdpressError(
            f"config key '{name}' is a number of more than {MAX_NUMBER_CHARS} digits; give a smaller one"
        )
    if isinstance(raw, str) and len(raw) > MAX_VALUE_CHARS:
        raise ColdpressError(
            f"config key '{name}' is {clipped(repr(raw))}, expected {MAX_VALUE_CHARS} characters at most"
        )


def _readings(value: Any) -> list[Any]:
    """Returns what a raw value may mean, most likely first."""
    readings = [value]
    if isinstance(value, float) and value.is_integer():
        readings.append(int(value))
    if isinstance(value, str):
        text = value.strip()
        readings += {"true": [True], "yes": [True], "false": [False], "no": [False]}.get(text.lower(), [])
        if len(text) > MAX_NUMBER_CHARS:
            return readings
        if re.fullmatch(r"\d+(\.\d+)?%", text):
            readings.append(float(text[:-1]) / 100)
        if re.fullmatch(r"\d+(\.\d*)?([eE][+-]?\d+)?", text):
            readings.append(float(text))
        if re.fullmatch(r"\d+", text.replace("_", "")):
            readings.append(int(text))
    elif not isinstance(value, (bool, list, dict)):
        readings.append(str(value))
    return readings


def check_paths(values: Mapping[str, Any]) -> None:
    """Refuses names that the system does not accept; a missing path is refused where it is needed. Raises
    ColdpressError naming the key; the text is one sentence."""
    for key in PATHS:
        if values[key] is None:
            continue
        try:
            Path(values[key]).expanduser().stat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        except RuntimeError as error:  # from expanduser
            raise _refused(key, values[key], "there is no such user, whose folder ~ would be") from error
        except OSError as error:
            raise _refused(key, values[key], f"the system refuses it ({error.strerror})") from error
        except ValueError as error:  # a null byte
            raise _refused(key, values[key], "it holds a null byte") from error


def check_artifact_name(name: str) -> None:
    """Refuses an artifact name that is too long for a file; raises ColdpressError naming the parts of the name."""
    if len(name) > MAX_NAME_CHARS:
        raise ColdpressError(
            f"the artifact's name {clipped(name, 80)} has more than {MAX_NAME_CHARS} characters; it is made of "
            "the names of model, device and label: give a shorter one"
        )


def _refused(key: str, value: str, why: str) -> ColdpressError:
    return ColdpressError(f"{key}={clipped(value, 80)} names no file or folder: {why}; give another path")
