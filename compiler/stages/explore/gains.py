"""Measures what a finer coarse plane is worth in each layer, in one pass over text.

A layer runs three times on the source's hidden states: as in the source, and with the coarse planes of its units alone
in either format. Its error is that of its output, over the hidden state after it, squared, on average over tokens: what
is added to a large state changes little of what later layers see. The gain is how much smaller the finer format's error
is. Gains of single layers nearly add up, and rank them as well as passes over the whole model for each layer do
(docs/experiments/planes.md); the error over the MLP's own output ranks them worse than chance.
"""

from collections.abc import Sequence

import numpy as np

from coldpress.compiler.activity.forward import LayerStream
from coldpress.compiler.activity.in_planes import InPlanes
from coldpress.compiler.activity.variants import state_error
from coldpress.compiler.rounding._matrix import Rounding
from coldpress.schemas.families import FamilyName, FormatName


def layer_gains(
    stream: LayerStream,
    tokens: np.ndarray,
    formats: tuple[FormatName, FormatName],
    families: Sequence[FamilyName],
    rounding: Rounding,
) -> np.ndarray:
    """Returns how much smaller each layer's error is with the finer coarse planes, float64 [num_layers].

    Args:
        stream: The source.
        tokens: Token blocks, int [num_blocks, T].
        formats: The coarser format in planes and the finer one.
        families: Those whose units have planes.
        rounding: How codes are chosen.
    """
    coarse, fine = (InPlanes(stream, name, families, rounding, coarse_alone=True) for name in formats)
    hidden, gains = stream.embed(tokens), np.zeros(stream.spec.num_hidden_layers)
    for layer in range(gains.size):
        after = stream.run_layer(layer, hidden)
        errors = [state_error(model.run_layer(layer, hidden), after) for model in (coarse, fine)]
        gains[layer] = errors[0] - errors[1]
        hidden = after
    return gains
