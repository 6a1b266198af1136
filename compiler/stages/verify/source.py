"""Runs the source model on test text."""

import math

import numpy as np

from coldpress.compiler.steps import Steps
from coldpress.schemas.model import Model

PIECES = 4
"""Pieces of a block that the head multiplies by themselves: as many cores can share it, and its bits depend on none."""


class SourceLogits:
    """Maps a block to the source's logits, float32 [block_tokens, vocab_size].

    transformers runs one layer at a time over all blocks, once. Only the last hidden states and the head stay in
    memory: blocks come when they are asked for, and all share one reading of the head.
    """

    def __init__(self, model: Model, blocks: np.ndarray, threads: int = 1) -> None:
        """Runs the model on `blocks` int32 [num_blocks, block_tokens], on so many cores."""
        from coldpress.compiler.activity.forward import LayerStream  # here, since it loads torch

        self._stream = LayerStream(model, threads)
        steps = Steps("verify, source", model.spec.num_hidden_layers, "layers")
        self._hidden = self._stream.embed(blocks.astype(np.int64))
        for layer in range(model.spec.num_hidden_layers):
            self._hidden = self._stream.run_layer(layer, self._hidden)
            steps.add()
        self._head = list(self._stream.head_weights())

    def __call__(self, block: int) -> np.ndarray:
        """Returns the logits of one block; cores share its pieces."""
        hidden = self._hidden[block]
        pieces = hidden.reshape(math.gcd(PIECES, len(hidden)), -1, hidden.shape[-1])
        return self._stream.head(pieces, self._head).reshape(len(hidden), -1).numpy()
