"""Makes a layer's experts and router as gpt-oss stores them: all experts in one tensor, packed in MXFP4.

Its units compute clip(up) + 1 times the gate's activation, so that a bias of -1 gives the product that other mixtures
have; limits of 7 are out of the planted values' reach. Packing rounds an entry by some 6 % of its group's largest.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

MAGNITUDES = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
MIDDLES = (MAGNITUDES[1:] + MAGNITUDES[:-1]) / 2
GROUP = 32
Named = Iterator[tuple[str, Any]]


def pack(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rounds float32 [rows, columns] to MXFP4 (OCP Microscaling Formats 1.0, sections 5.3.3 and 6.3).

    Returns:
        Blocks uint8 [rows, columns / 32, 16], the first number of a byte in its low bits; scales uint8 [rows,
        columns / 32], where s stands for 2**(s - 127).
    """
    groups = values.reshape(len(values), -1, GROUP)
    largest = np.abs(groups).max(axis=2)
    exponents = np.floor(np.log2(np.maximum(largest, np.float32(2.0**-100)))).astype(np.int32) - 2
    scaled = groups / np.ldexp(np.float32(1), exponents)[..., None]
    codes = np.searchsorted(MIDDLES, np.abs(scaled)).astype(np.uint8) | (np.signbit(scaled).astype(np.uint8) << 3)
    return codes[..., ::2] | codes[..., 1::2] << 4, (exponents + 127).astype(np.uint8)


def stacked_experts(prefix: str, numbers: Iterable[int], matrices: Callable[[int], tuple[Any, Any, Any]]) -> Named:
    """Yields the packed tensors of all experts of a layer.

    Args:
        prefix: The beginning of the tensors' names.
        numbers: The experts.
        matrices: Returns an expert's gate, up and down, torch float32 [rows, columns].
    """
    import torch

    both, down, height = list[Any](), list[Any](), 0
    for expert in numbers:
        gate, up, of_down = (part.numpy() for part in matrices(expert))
        both.append(pack(np.stack([gate, up], axis=1).reshape(-1, gate.shape[1])))  # their rows in turn
        down.append(pack(of_down))
        height = len(of_down)
    for name, parts in (("gate_up_proj", both), ("down_proj", down)):
        for end, place in (("blocks", 0), ("scales", 1)):
            yield f"{prefix}{name}_{end}", torch.from_numpy(np.stack([part[place] for part in parts]))
    width = len(both[0][0]) // 2
    yield f"{prefix}gate_up_proj_bias", torch.tensor([0.0, -1.0]).repeat(len(both), width)
    yield f"{prefix}down_proj_bias", torch.zeros(len(both), height)
