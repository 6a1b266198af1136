"""Reads model and device profiles by name: the YAML files of profiles/, strictly.

A profile is a file and its file name is its name. Unknown or repeated keys, missing figures and wrong types are refused
with the file, the place and the value found.
"""

from pathlib import Path

import coldpress
from coldpress.runtime.device_profiles.devices import device_path
from coldpress.runtime.device_profiles.yaml_records import load_yaml
from coldpress.schemas.errors import UnknownNameError
from coldpress.schemas.profiles import ModelProfile

PROFILES = Path(coldpress.__file__).parent / "profiles"
MEASURED_HOST = "host.yaml"
"""Name in the build folder: the profile of this machine, as compiler/device/command.py measured it."""


def model_names() -> list[str]:
    return sorted(path.stem for path in (PROFILES / "models").glob("*.yaml"))


def device_file(name_or_path: str, build_dir: Path) -> Path:
    """Finds a device's profile; `host` is `<build_dir>/host.yaml` where it exists (compiler/device/command.py writes
    it). Raises UnknownNameError if the argument is neither a path nor a known name."""
    if name_or_path == "host" and (build_dir / MEASURED_HOST).is_file():
        return build_dir / MEASURED_HOST
    return device_path(name_or_path)


def load_model(name: str) -> ModelProfile:
    """Reads a model profile by name. Raises ColdpressError if there is no such profile or it is not a valid one."""
    known = model_names()
    if name not in known:
        raise UnknownNameError("model", name, known)
    return load_yaml(PROFILES / "models" / f"{name}.yaml", ModelProfile)
