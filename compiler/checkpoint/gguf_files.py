"""Opens a model in GGUF: one file, or the parts that `llama-gguf-split` made of one.

All refusals are CheckpointErrors that name the file and the key or tensor, what was found and what was expected.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from coldpress.compiler.checkpoint.headers import is_gguf, read_gguf
from coldpress.compiler.checkpoint.weight_files import Located
from coldpress.runtime.artifact.errors import short
from coldpress.schemas.errors import CheckpointError

PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
MAX_PARTS = 1024
LARGEST_NUMBER = 1e30
"""Far below float32's largest."""


@dataclass(frozen=True)
class GgufModel:
    paths: tuple[Path, ...]
    values: Mapping[str, Any]
    """By key; those of the first part."""
    located: Mapping[str, Located]
    """The tensors, by llama.cpp's names."""

    @property
    def name(self) -> str:
        return name_of(self.paths[0])

    @property
    def architecture(self) -> str:
        """llama.cpp's name of the architecture."""
        return self.text("general.architecture", required=True) or ""

    def refused(self, found: str) -> CheckpointError:
        return CheckpointError(f"{self.paths[0].name}: {found}")

    def get(self, key: str) -> Any:
        """The value of a key of the architecture, such as `block_count`; None if the file has none."""
        return self.values.get(f"{self.architecture}.{key}")

    def count(self, key: str, default: int | None = None) -> int:
        """A whole number of the architecture; without a default, the file must have it."""
        found = self.get(key)
        found = default if found is None else found
        if not isinstance(found, int) or isinstance(found, bool) or found < 0:
            raise self._wrong(key, found, "a whole number")
        return found

    def number(self, key: str, default: float | None = None) -> float:
        """A number of the architecture, in float32's shortest decimal form; otherwise as `count`."""
        found = self.get(key)
        found = default if found is None else found
        if not isinstance(found, int | float) or isinstance(found, bool) or not abs(found) < LARGEST_NUMBER:
            raise self._wrong(key, found, f"a number below {LARGEST_NUMBER:g}")
        return float(str(np.float32(found)))

    def text(self, key: str, required: bool = False) -> str | None:
        """A text by its whole key; None if the file has none."""
        found = self.values.get(key)
        if (found is None and required) or not isinstance(found, str | None):
            raise self.refused(f"{key} is {short(found)}, expected a text")
        return found

    def _wrong(self, key: str, found: Any, expected: str) -> CheckpointError:
        what = "missing" if found is None else "an array" if isinstance(found, np.ndarray | list) else short(found)
        return self.refused(
            f"{self.architecture}.{key} is {what}, expected {expected}; models whose layers differ in it, or "
            "whose file lacks it, are not supported"
        )


def name_of(path: Path) -> str:
    """A file's name without its end, and without the number of a part."""
    part = PART.fullmatch(path.name)
    return part[1] if part else re.sub(r"\.gguf$", "", path.name, flags=re.IGNORECASE)


def parts_of(path: Path) -> tuple[Path, ...]:
    """Finds the files of a model, given one of them; raises CheckpointError if it is not GGUF, or a part is missing."""
    part = PART.fullmatch(path.name)
    count = int(part[3]) if part else 1
    if not 1 <= count <= MAX_PARTS:
        raise CheckpointError(f"{path.name}: it is one of {count} parts, expected 1 to {MAX_PARTS}")
    paths = (
        [path.with_name(f"{part[1]}-{at:05d}-of-{count:05d}.gguf") for at in range(1, count + 1)] if part else [path]
    )
    for found in paths:
        if not found.is_file():
            raise CheckpointError(f"{found.name} is missing beside {path.name}; a split model needs all of its parts")
        if not is_gguf(found):
            raise CheckpointError(f"{found.name} is a file and no GGUF, expected the folder of a checkpoint or GGUF")
    return tuple(paths)


def open_gguf(path: Path) -> GgufModel:
    """Reads the headers of a model's files."""
    paths = parts_of(path)
    headers = [read_gguf(part) for part in paths]
    located: dict[str, Located] = {}
    for number, (part, header) in enumerate(zip(paths, headers, strict=True)):
        said = [header.values.get(f"split.{key}", 0) for key in ("no", "count")]
        if {*map(type, said)} != {int} or (said != [number, len(paths)] and (len(paths) > 1 or said[1] > 1)):
            raise CheckpointError(
                f"{part.name}: it is part {short(said[0])} of {short(said[1])} by its keys, expected {number} of "
                f"{len(paths)} by its name; give the parts the names that llama-gguf-split gave them"
            )
        end = 0
        for name, entry in header.tensors.items():
            if name in located:
                raise CheckpointError(f"{part.name}: the tensor {short(name)} is in {located[name].path.name}, too")
            if entry.start_bytes < end:
                raise CheckpointError(
                    f"{part.name}: the tensor {short(name)} begins at byte {entry.start_bytes}, before byte {end}, "
                    "where another one ends; download it again"
                )
            located[name], end = Located(part, entry), entry.stop_bytes
    model = GgufModel(paths, headers[0].values, located)
    if (kind := model.text("general.type") or "model") != "model":
        raise model.refused(f"it is GGUF of the type {short(kind)}, expected model; give the model's own file")
    return model
