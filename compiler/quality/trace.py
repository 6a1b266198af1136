"""Runs the whole model once: its hidden states, with which all passes are compared, and the trace of signals."""

from typing import TYPE_CHECKING, Any

import numpy as np

from coldpress.compiler.activity.forward import Hooks, LayerStream
from coldpress.compiler.activity.layer_counts import countable_families
from coldpress.compiler.activity.unit_statistics import NORMS, unit_norms
from coldpress.compiler.io import PACKED, Workspace, load_arrays
from coldpress.schemas.base import ArrayFile
from coldpress.schemas.families import Signal, activity_of
from coldpress.schemas.model import Model

if TYPE_CHECKING:
    from torch import Tensor

TRACE_TOKENS = 256
SHORT_BLOCK_TOKENS = 128
"""Tokens of a block of few tokens: one core computes a block, so that two blocks keep two cores busy."""
TRACE = f"trace{PACKED}"
SCORES: Signal = "router_scores"
TRACE_BITS = 5
"""Mantissa bits that the trace keeps of float16's ten: the file is a third smaller, and one chosen unit in 300 differs
(docs/experiments/builds.md)."""


def few_tokens(blocks: np.ndarray) -> np.ndarray:
    """Cuts the first TRACE_TOKENS tokens of blocks, int [num_blocks, T], into short blocks."""
    length = min(SHORT_BLOCK_TOKENS, blocks.shape[1])
    cut = blocks[:, : blocks.shape[1] // length * length].reshape(-1, length)
    return cut[: max(1, TRACE_TOKENS // length)]


def whole_run(
    stream: LayerStream, tokens: np.ndarray, layers: tuple[int, ...], work: Workspace
) -> tuple[ArrayFile, "Tensor"]:
    """Returns the trace, and the hidden states after the last layer; an interrupted run may have left them."""
    import torch

    trace, kept = work.current(TRACE), work.current("whole")
    if trace is None or kept is None:
        traced, whole = _traced(stream, tokens, layers)
        traced |= _norms(stream.model, layers)
        trace, kept = work.save(TRACE, traced), work.save("whole", {"hidden": whole.float().numpy()})
    return trace, torch.from_numpy(load_arrays(kept)["hidden"]).to(stream.dtype)


def _norms(model: Model, layers: tuple[int, ...]) -> dict[str, np.ndarray]:
    """Returns the norms of the traced layers' units, so that selectors can be fitted where no weights are."""
    families = countable_families(model.spec)
    return {f"{layer}.{family}.{NORMS}": unit_norms(model, layer, family) for layer in layers for family in families}


def _traced(stream: LayerStream, tokens: np.ndarray, layers: tuple[int, ...]) -> tuple[dict[str, np.ndarray], "Tensor"]:
    families = countable_families(stream.spec)
    signals: tuple[Signal, ...] = tuple(dict.fromkeys(activity_of(family, stream.spec) for family in families))
    signals += (SCORES,) if stream.spec.is_mixture else ()
    num_blocks = min(len(tokens), max(1, TRACE_TOKENS // tokens.shape[1]))
    seen: dict[tuple[int, Signal, int], np.ndarray] = {}

    def hooks(layer: int) -> Any:
        def of_block(block: int) -> Hooks:
            def record(signal: Signal) -> Any:
                def change(values: "Tensor") -> None:
                    found = values.float().cpu().numpy().astype(np.float16)
                    seen[layer, signal, block] = found if signal == SCORES else rounded(found)

                return change

            return {signal: record(signal) for signal in signals} if block < num_blocks else {}

        return of_block if layer in layers else None

    whole = stream.last_hidden(tokens, hooks)
    trace = {
        f"{layer}.{signal}": np.concatenate([seen[layer, signal, block] for block in range(num_blocks)])
        for layer in layers
        for signal in signals
        if (layer, signal, 0) in seen
    }
    return trace, whole


def rounded(values: np.ndarray) -> np.ndarray:
    """Rounds float16 to TRACE_BITS bits of mantissa, to nearest, halves away from zero."""
    dropped = 10 - TRACE_BITS
    codes = values.view(np.uint16).astype(np.uint32) + (1 << (dropped - 1))
    return (codes >> dropped << dropped).astype(np.uint16).view(np.float16)
