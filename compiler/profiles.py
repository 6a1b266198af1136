"""Model and device profiles by name: the YAML files of profiles/, read strictly.

A profile is a file and its file name is its name. Unknown or repeated keys, missing figures and wrong types are refused
with the file, the place and what was found.
"""

import json
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import ValidationError

from schemas.base import Record
from schemas.device import DeviceProfile
from schemas.errors import ColdpressError, UnknownNameError
from schemas.profiles import ModelProfile

PROFILES = Path(__file__).resolve().parent.parent / "profiles"
MEASURED_HOST = "host.yaml"
"""In the build folder: the profile of the machine at hand, as compiler/device/__main__.py measured it."""

R = TypeVar("R", bound=Record)


def device_names() -> list[str]:
    """The devices that have a profile, sorted."""
    return _names(PROFILES / "devices")


def model_names() -> list[str]:
    """The models that have a profile, sorted."""
    return _names(PROFILES / "models")


def device_file(name_or_path: str, build_dir: Path) -> Path:
    """Where a device's profile lies: `name_or_path` is the name of a profile or the path of a YAML file.

    `host` is the measured profile `<build_dir>/host.yaml` where one exists (compiler/device/__main__.py writes it).

    Raises:
        UnknownNameError: if it is neither a path nor a known name.
    """
    if name_or_path == "host" and (build_dir / MEASURED_HOST).is_file():
        return build_dir / MEASURED_HOST
    if name_or_path.endswith((".yaml", ".yml")):
        return Path(name_or_path).expanduser()
    known = device_names()
    if name_or_path not in known:
        raise UnknownNameError("device", name_or_path, known)
    return PROFILES / "devices" / f"{name_or_path}.yaml"


def load_device(path: Path) -> DeviceProfile:
    """The device profile of a YAML file.

    Raises:
        ColdpressError: if there is no such file or it is not a valid profile.
    """
    return _load_profile(path, DeviceProfile)


def load_model(name: str) -> ModelProfile:
    """A model profile by name.

    Raises:
        ColdpressError: if there is no such profile or it is not a valid one.
    """
    known = model_names()
    if name not in known:
        raise UnknownNameError("model", name, known)
    return _load_profile(PROFILES / "models" / f"{name}.yaml", ModelProfile)


def _names(folder: Path) -> list[str]:
    return sorted(path.stem for path in folder.glob("*.yaml"))


def _load_profile(path: Path, kind: type[R]) -> R:
    """A profile record from a YAML file that names no key twice."""
    try:
        data = yaml.load(path.read_text(encoding="utf-8"), Loader=_UniqueKeys)
        return kind.model_validate_json(json.dumps(data))
    except FileNotFoundError as error:
        raise ColdpressError(f"{path}: no such profile") from error
    except (yaml.YAMLError, UnicodeDecodeError, TypeError) as error:
        raise ColdpressError(f"{path}: not a YAML profile: {' '.join(str(error).split())}") from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise ColdpressError(f"{path}: {place or 'profile'}: {first['msg']}, found {first['input']!r}") from error


class _UniqueKeys(yaml.SafeLoader):
    """PyYAML keeps the last of two equal keys without a word; a profile must not."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is given twice", node.start_mark)
        return super().construct_mapping(node, deep)
