"""A predictor's two matrices: as they are stored, and as they score many tokens at once.

The runtime scores one token, straight from the codes (runtime/sparsity/predictor.py); up to the order of sums these are
the same scores. Only torch and numpy, no files.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from runtime._plugins import load
from schemas.families import FormatName


@dataclass(frozen=True)
class Weights:
    """A predictor: `fc1` float32 [rank, hidden_size], `fc2` float32 [num_units, rank]."""

    fc1: torch.Tensor
    fc2: torch.Tensor

    def rounded(self, format_name: FormatName) -> "Weights":
        """As it will be stored: encoded and decoded. Rounding once more changes nothing."""
        return decode(encode(self, format_name), format_name, self.fc1.shape[1])


def encode(weights: Weights, format_name: FormatName) -> dict[str, np.ndarray]:
    """Codes `fc1` uint8 [rank, row_bytes] and `fc2` uint8 [num_units, row_bytes], each row a slice of its own."""
    plugin = load("runtime.quantization", format_name)
    return {"fc1": plugin.encode(weights.fc1.numpy()), "fc2": plugin.encode(weights.fc2.numpy())}


def decode(codes: Mapping[str, np.ndarray], format_name: FormatName, hidden_size: int) -> Weights:
    """The weights that the runtime computes with."""
    plugin, rank = load("runtime.quantization", format_name), len(codes["fc1"])
    fc1, fc2 = plugin.decode(codes["fc1"], hidden_size), plugin.decode(codes["fc2"], rank)
    return Weights(torch.from_numpy(fc1), torch.from_numpy(fc2))


def scores(weights: Weights, inputs: torch.Tensor) -> torch.Tensor:
    """float32 [num_tokens, num_units]."""
    return torch.relu(inputs @ weights.fc1.T) @ weights.fc2.T
