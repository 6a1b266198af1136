"""Reads a checkpoint's JSON files with the one strict parser; refusals name the file."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from coldpress.runtime.artifact import strict_json
from coldpress.schemas.errors import CheckpointError

POINTER = b"version https://git-lfs"
"""The beginning of the text that a clone without git-lfs has in a file's place."""
POINTER_BYTES = len(POINTER)


def refuse_pointer(name: str, data: bytes) -> None:
    """Refuses bytes that begin as a pointer of git-lfs does; raises CheckpointError with what fetches `name`."""
    if data.startswith(POINTER):
        raise CheckpointError(f"{name} is a pointer of git-lfs, not the file itself; run `git lfs pull` in its folder")


def read_json(path: Path, max_bytes: int, limits: strict_json.Limits = strict_json.FOREIGN) -> Any:
    """Returns the value of a strict JSON file of at most `max_bytes`; raises CheckpointError for any other."""

    def refuse(found: str, expected: str) -> CheckpointError:
        return CheckpointError(f"{path.name} is {found}, expected {expected}; copy or download the file again")

    try:
        with path.open("rb") as file:
            data = file.read(max_bytes + 1)
    except OSError as error:
        raise CheckpointError(f"{path.name}: cannot be read ({error.strerror}); complete the checkpoint") from error
    refuse_pointer(path.name, data)
    if len(data) > max_bytes:
        raise refuse(f"{path.stat().st_size} bytes long", f"at most {max_bytes}")
    return strict_json.parse(data, refuse, replace(limits, size_bytes=max_bytes))


def read_object(path: Path, max_bytes: int) -> dict[str, Any]:
    """As `read_json`, of a file that holds one JSON object; any other value is a CheckpointError, too."""
    value = read_json(path, max_bytes)
    if not isinstance(value, dict):
        raise CheckpointError(f"{path.name}: found a JSON {type(value).__name__}, expected an object")
    return value
