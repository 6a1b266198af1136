"""Runs a source model over blocks of text, for the logits of every token."""

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from coldpress.compiler.steps import Steps
from coldpress.schemas.model import Model

if TYPE_CHECKING:
    from coldpress.compiler.activity.forward import BlockHooks, Hooks

PIECES = 4
"""Pieces of a block that the head multiplies by themselves: as many cores can share it, and its bits depend on none."""


class SourceLogits:
    """Maps a block to the source's logits, float32 [block_tokens, vocab_size]. Only the last hidden states and the head
    stay in memory: blocks come when they are asked for, and all share one reading of the head."""

    def __init__(self, model: Model, blocks: np.ndarray, threads: int = 1, title: str = "verify, source") -> None:
        """Runs the model on `blocks` int32 [num_blocks, block_tokens] on so many cores; `title` begins its progress."""
        from coldpress.compiler.activity.forward import LayerStream  # here, since it loads torch

        self._stream = LayerStream(model, threads)
        steps = Steps(title, model.spec.num_hidden_layers, "layers")
        self._hidden = self._stream.embed(blocks.astype(np.int64))
        self.router_scores: dict[int, list[np.ndarray]] = {}
        """Layer with experts -> of each block, the scores that its router chose by, float32 [block_tokens, E]."""
        for layer in range(model.spec.num_hidden_layers):
            has_experts = model.spec.is_mixture and not model.spec.is_dense(layer)
            self._hidden = self._stream.run_layer(layer, self._hidden, self._recorder(layer) if has_experts else None)
            steps.add()
        self._head = list(self._stream.head_weights())

    def _recorder(self, layer: int) -> "BlockHooks":
        kept = self.router_scores[layer] = [np.empty(0, np.float32)] * len(self._hidden)

        def hooks(block: int) -> "Hooks":
            def keep(scores: Any) -> None:
                kept[block] = scores.detach().float().cpu().numpy().reshape(-1, scores.shape[-1]).copy()

            return {"router_scores": keep}

        return hooks

    def __call__(self, block: int) -> np.ndarray:
        """Returns the logits of one block; cores share its pieces."""
        hidden = self._hidden[block]
        pieces = hidden.reshape(math.gcd(PIECES, len(hidden)), -1, hidden.shape[-1])
        return self._stream.head(pieces, self._head).reshape(len(hidden), -1).numpy()
