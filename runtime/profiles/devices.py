"""Device profiles that a user names: a record in JSON, as builds write it, or a profile in YAML."""

from dataclasses import replace
from pathlib import Path

from pydantic import ValidationError

import coldpress
from coldpress.runtime.artifact import strict_json
from coldpress.schemas.device import DeviceProfile
from coldpress.schemas.errors import ColdpressError, UnknownNameError, clipped
from coldpress.schemas.sealed import KEY, unseal

PROFILES = Path(coldpress.__file__).parent / "profiles" / "devices"
JSON = replace(strict_json.MANIFEST, size_bytes=1 << 20)


def load_device(name_or_path: str) -> DeviceProfile:
    """The profile of that name, or of a file in YAML or JSON.

    Raises:
        ColdpressError: if there is none, or it is not a valid one.
    """
    if name_or_path.endswith(".json"):
        return load_record(Path(name_or_path))
    known = sorted(path.stem for path in PROFILES.glob("*.yaml"))
    given = name_or_path.endswith((".yaml", ".yml"))
    if not given and name_or_path not in known:
        raise UnknownNameError("device", name_or_path, known)
    try:
        from coldpress.runtime.profiles.yaml_records import load_yaml
    except ModuleNotFoundError as error:
        raise ColdpressError(
            f"{name_or_path}: a profile in YAML needs PyYAML, which is not installed; install coldpress[compiler], or "
            "give a device record in JSON, such as a build's device.json"
        ) from error
    return load_yaml(Path(name_or_path) if given else PROFILES / f"{name_or_path}.yaml", DeviceProfile)


def load_record(path: Path) -> DeviceProfile:
    """The device record of a JSON file.

    Raises:
        ColdpressError: if it is not a valid one, or was changed since it was written.
    """
    with path.open("rb") as file:
        data = file.read(JSON.size_bytes + 1)  # of a pipe or a device node, too
    strict_json.parse(data, lambda found, expected: _no_record(path, found, expected), JSON)
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


def _no_record(path: Path, found: str, expected: str) -> ColdpressError:
    return ColdpressError(f"{path}: not a device record, at the text: it is {found}, expected {expected}")
