"""Checks a benchmark's last line against the keys that it documents."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

SPREAD = frozenset({"median", "low", "high"})
"""Keys of a figure with its spread, which counts as one figure (harness/timing.py)."""
_NESTED = (Mapping, list)


def complaints(documented: Mapping[str, str], figures: Mapping[str, Any]) -> list[str]:
    """Returns sentences on a last line's keys that are missing, not documented or not finite."""
    found: dict[str, list[Any]] = {}
    for path, value in leaves(figures):
        found.setdefault(path, []).append(value)
    wanted = {key.removesuffix("?"): key.endswith("?") for key in documented}
    said: list[str] = []
    for path, values in found.items():
        key = next((key for key in wanted if matches(key, path)), None)
        if key is None:
            said.append(f"{path} is not documented")
        elif not wanted[key] and any(not is_finite(value) for value in values):
            said.append(f"{path} is null or not finite")
    said += [
        f"{key} is missing"
        for key, may_be_absent in wanted.items()
        if not may_be_absent and not any(matches(key, path) for path in found)
    ]
    return said


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (path, figure) of all figures; items of a list of objects have `[]` in their path."""
    if isinstance(value, Mapping) and not set(value) >= SPREAD:
        for name, item in value.items():
            yield from leaves(item, f"{path}.{name}" if path else str(name))
    elif isinstance(value, list) and any(isinstance(item, _NESTED) for item in value):
        for item in value:
            yield from leaves(item, f"{path}[]")
    else:
        yield path, value


def matches(key: str, path: str) -> bool:
    """Returns whether a documented key names this path; `*` stands for any one name."""
    wanted, found = key.split("."), path.split(".")
    return len(wanted) == len(found) and all(
        one in (other, "*") or (one == "*[]" and other.endswith("[]")) for one, other in zip(wanted, found, strict=True)
    )


def is_finite(value: Any) -> bool:
    """Returns whether a figure, all numbers of a list, or all of a spread are there and finite."""
    if isinstance(value, Mapping):
        return all(is_finite(item) for item in value.values())
    if isinstance(value, list):
        return all(is_finite(item) for item in value)
    return value is not None and not (isinstance(value, float) and not math.isfinite(value))
