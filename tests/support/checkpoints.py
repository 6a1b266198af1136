"""Damages and ingests checkpoints, for the tests of `ingest`."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coldpress.compiler.io import Workspace
from coldpress.compiler.stages import ingest
from coldpress.compiler.stages.ingest import IngestConfig
from coldpress.schemas.errors import CheckpointError
from coldpress.schemas.model import Model
from tests.support.models import random_weights, write_weights

REVISION = "0123456789abcdef0123456789abcdef01234567"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


def run(folder: Path | str, work: Path, **settings: Any) -> Model:
    """Ingests a folder or hub id with `settings` of the stage."""
    return ingest.run(IngestConfig(model=str(folder), **settings), Workspace(work, "test"))


def refusal(folder: Path | str, work: Path, **settings: Any) -> str:
    """Returns the text of the error; checks that it is one sentence without paths of this machine."""
    with pytest.raises(CheckpointError) as caught:
        run(folder, work, **settings)
    text = str(caught.value)
    assert "\n" not in text
    assert len(text) < 420
    assert str(work.parent) not in text
    assert not (work / "source").exists()
    return text


def edit(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Rewrites a JSON file with `change`."""
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def edit_config(folder: Path, **values: Any) -> None:
    """Replaces values of config.json."""
    edit(folder / "config.json", lambda config: config.update(values))


def edit_header(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Rewrites a safetensors header in place and leaves the data unchanged."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


def rewrite(folder: Path, change: Callable[[dict[str, np.ndarray]], None], dtype: str = "float32") -> None:
    """Rewrites model.safetensors with random weights after `change`, stored in `dtype`."""
    weights = random_weights(json.loads((folder / "config.json").read_text()))
    change(weights)
    write_weights(folder, weights, dtype)
