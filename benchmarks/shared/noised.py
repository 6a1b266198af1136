"""Writes a GGUF file's model with noise in its matrices, so that no type of llama.cpp has their values.

A file that is quantized says nothing of rounding: a format that has its codes is exact, and every other one loses more
than on weights that were trained.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.gguf_cases import rewritten

GROUP = 32
STEPS = 15
"""Steps between the least and the largest value of a group, as in four bits."""
KEYS: Mapping[str, Any] = {"general.file_type": 1}
"""GGUF's number of a file whose matrices are in float16."""


def write(source: Path, target: Path, seed: int = 0) -> None:
    """Writes the file's model as F16: the layers' matrices with uniform noise, of half a step of their group to either
    side, and all else as it is. Memory holds one tensor."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    rng = np.random.default_rng(seed)

    def change(name: str, stored: np.ndarray, kind: str) -> tuple[np.ndarray, str]:
        values = dequantize(stored, GGMLQuantizationType[kind])
        if values.ndim == 1:
            return values, "F32"
        return (noised(values, rng) if name.startswith("blk.") else values).astype(np.float16), "F16"

    rewritten(source, target, change, **KEYS)


def noised(values: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Returns a matrix, float32 [rows, columns], with noise; `columns` is a multiple of GROUP."""
    groups = values.reshape(len(values), -1, GROUP)
    steps = (groups.max(axis=-1, keepdims=True) - groups.min(axis=-1, keepdims=True)) / STEPS
    noise = rng.random(groups.shape, np.float32) - np.float32(0.5)
    return (groups + noise * steps).reshape(values.shape)
