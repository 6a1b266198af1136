"""A predictor's two matrices, as stored and as computed with, and its scores for many tokens at once.

The runtime scores one token straight from the codes (runtime/sparsity/predictor.py); these scores are the same up to
the order of sums. In a mixture of experts a token has scores only for the units of its own experts, as in the runtime.
Only torch and numpy, no files.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from coldpress.runtime.plugins import load
from coldpress.runtime.quantization import Format
from coldpress.schemas.families import FormatName


@dataclass(frozen=True)
class NetworkWeights:
    """A predictor: `fc1` float32 [rank, hidden_size], `fc2` float32 [num_units, rank]."""

    fc1: torch.Tensor
    fc2: torch.Tensor

    def rounded(self, format_name: FormatName) -> "NetworkWeights":
        """Returns the weights as they will be stored: encoded and decoded. Rounding again changes nothing."""
        return decode(encode(self, format_name), format_name, self.fc1.shape[1])


def encode(weights: NetworkWeights, format_name: FormatName) -> dict[str, np.ndarray]:
    """Returns codes `fc1` uint8 [rank, row_bytes] and `fc2` uint8 [num_units, row_bytes]; each row is one slice."""
    plugin = load("coldpress.runtime.quantization", Format, format_name)
    return {"fc1": plugin.encode(weights.fc1.numpy()), "fc2": plugin.encode(weights.fc2.numpy())}


def decode(codes: Mapping[str, np.ndarray], format_name: FormatName, hidden_size: int) -> NetworkWeights:
    plugin, rank = load("coldpress.runtime.quantization", Format, format_name), len(codes["fc1"])
    fc1, fc2 = plugin.decode(codes["fc1"], hidden_size), plugin.decode(codes["fc2"], rank)
    return NetworkWeights(torch.from_numpy(fc1), torch.from_numpy(fc2))


def rows_of(experts: torch.Tensor, num_units: int) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
    """Yields (units, tokens, places) of each expert that any token uses, ascending; `experts` bool [num_tokens, E]; all
    have as many units. `tokens` int64 [n] use it, ascending; `places` int64 [n]: its position among each one's
    experts, from 0."""
    width, places = num_units // experts.shape[1], experts.cumsum(dim=1) - 1
    for expert, own in enumerate(experts.T):
        tokens = own.nonzero()[:, 0]
        if len(tokens):
            yield slice(expert * width, (expert + 1) * width), tokens, places[tokens, expert]


def scores(weights: NetworkWeights, inputs: torch.Tensor, experts: torch.Tensor | None = None) -> torch.Tensor:
    """Returns scores float32 [num_tokens, n] of all units; with `experts`, bool [num_tokens, E], only of those experts'
    units. Every token uses equally many experts; their units follow one another."""
    inner = torch.relu(inputs @ weights.fc1.T)
    if experts is None:
        return inner @ weights.fc2.T
    num_units = len(weights.fc2)
    found = inner.new_empty(len(inner), int(experts[0].sum()), num_units // experts.shape[1])
    for units, tokens, places in rows_of(experts, num_units):
        found[tokens, places] = inner[tokens] @ weights.fc2[units].T
    return found.flatten(1)


def over_all(values: torch.Tensor, experts: torch.Tensor, num_units: int) -> torch.Tensor:
    """Expands values for the units of each token's experts, [num_tokens, n], to all units: [num_tokens, num_units]; 0
    or False elsewhere."""
    found = values.new_zeros(len(values), num_units)
    each = values.unflatten(1, (-1, num_units // experts.shape[1]))
    for units, tokens, places in rows_of(experts, num_units):
        found[tokens, units] = each[tokens, places]
    return found
