"""Reads the device that a user names: by the name of a profile, or by a file in YAML or JSON.

One rule for all: `device=`, `--device`, `--emulate` and `emulate` take a name of profiles/devices, a profile in YAML as
people write it, or a record in JSON as a build writes it (`build/<model>/<device>/device.json`).
"""

from dataclasses import replace
from pathlib import Path

from pydantic import ValidationError

import coldpress
from coldpress.runtime.artifact import strict_json
from coldpress.schemas.device import DeviceProfile
from coldpress.schemas.errors import ColdpressError, UnknownNameError, clipped
from coldpress.schemas.sealed import KEY, unseal

PROFILES = Path(coldpress.__file__).parent / "profiles" / "devices"
DEVICE_HELP = "a device: the name of a profile, or its file in YAML or JSON"
ALL = "all"
YAML = (".yaml", ".yml")
JSON = replace(strict_json.MANIFEST, size_bytes=1 << 20)


def device_names() -> list[str]:
    return sorted(path.stem for path in PROFILES.glob("*.yaml"))


def named_devices(text: str) -> list[str]:
    """Returns the devices that `--device` names, with commas between them, or all that have a profile. Raises
    `ColdpressError` if it names none."""
    names = device_names() if text == ALL else [name for name in text.split(",") if name]
    if not names:
        raise ColdpressError("--device names no device; give one, several with commas between them, or all")
    return names


def device_path(name_or_path: str) -> Path:
    """Returns the file of a device: text with a slash, or ending in .yaml, .yml or .json, is a path, all else a name.
    Raises `UnknownNameError` if no profile has that name."""
    if "/" in name_or_path or name_or_path.endswith((*YAML, ".json")):
        return Path(name_or_path).expanduser()
    if name_or_path not in (known := device_names()):
        raise UnknownNameError("device", name_or_path, known, f"(or {clipped(name_or_path)}.yaml, a file)")
    return PROFILES / f"{name_or_path}.yaml"


def load_device(name_or_path: str) -> DeviceProfile:
    """Reads the profile of that name, or in a YAML or JSON file. Raises `ColdpressError` if there is no such profile,
    or it is not valid."""
    return read_device(device_path(name_or_path))


def read_device(path: Path) -> DeviceProfile:
    """Reads the profile in a file: YAML if its name ends so, else a record in JSON. Raises as `load_device`."""
    if path.suffix not in YAML:
        return load_record(path)
    try:
        from coldpress.runtime.device_profiles.yaml_records import load_yaml
    except ModuleNotFoundError as error:
        raise ColdpressError(
            f"{path}: a profile in YAML needs PyYAML, which is not installed; pip install PyYAML, or give a device "
            "record in JSON, such as a build's device.json"
        ) from error
    return load_yaml(path, DeviceProfile)


def load_record(path: Path) -> DeviceProfile:
    """Reads the device record in a JSON file. Raises `ColdpressError` if it cannot be read, is not a valid record, or
    was changed since it was written."""
    try:
        with path.open("rb") as file:
            data = file.read(JSON.size_bytes + 1)  # bounded, as the file may be an endless pipe or device node
    except OSError as error:
        raise ColdpressError(f"{path}: {error.strerror}, expected a device record in JSON; name a device") from error
    told = f"{path}: not a device record, at the text: it is"
    strict_json.parse(data, lambda found, expected: ColdpressError(f"{told} {found}, expected {expected}"), JSON)
    try:
        opened = unseal(data)
        if opened.stated not in (None, opened.found):
            raise ColdpressError(
                f"{path}: it has changed since it was written; take the line {KEY} out if the change was meant"
            )
        return DeviceProfile.model_validate_json(opened.body)
    except ValidationError as error:
        first = error.errors()[0]
        place = clipped(".".join(map(str, first["loc"])) or "the text")
        raise ColdpressError(f"{path}: not a device record, at {place}: {clipped(first['msg'])}") from error
