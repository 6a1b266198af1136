"""The pass over calibration text that adds up Gram matrices, X Xᵀ of the inputs of every matrix (GPTQ, Eq. 1).

Holds one layer's matrices, its weights, and the hidden states of the text. `gram` runs it with the build's selector;
`explore`, which decides before there is one, with every unit.
"""

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from coldpress.compiler.activity.choice import Choice
from coldpress.compiler.activity.forward import Hooks, LayerStream
from coldpress.compiler.io import Workspace, array_file, load_arrays
from coldpress.schemas.corpus import Corpus
from coldpress.schemas.families import Signal
from coldpress.schemas.gram import INPUT_OF, GramMatrices, LayerArrays, measured_roles

if TYPE_CHECKING:
    from torch import Tensor

    from coldpress.compiler.activity.taps import Change

LOG = logging.getLogger(__name__)
TILE_ROWS = 512
"""Rows of a Gram matrix that one core adds up. The size is fixed, so the number of cores changes no sum."""

GRAM_TOKENS = 32768
"""Most calibration tokens that algorithm=gptq corrects rounding by; whole blocks, at least one."""


def add_grams(
    stream: LayerStream, corpus: Corpus, work: Workspace, families: Sequence[str] = (), choice: Choice | None = None
) -> GramMatrices:
    """Computes the Gram matrices of every layer, over the first calibration blocks; one file per layer in `work`, where
    an interrupted run of the same inputs may have left some. `choice` leaves out units of `families`; None leaves out
    nothing."""
    blocks = load_arrays(corpus.split("calibration").arrays)["tokens"]
    tokens = blocks[: max(1, GRAM_TOKENS // blocks.shape[1])]
    model = stream.model
    roles = measured_roles(model.spec)
    signals: tuple[Signal, ...] = tuple(dict.fromkeys(INPUT_OF[role] for role in INPUT_OF if role in roles))

    def hooks(layer: int, seen: "dict[Signal, Tensor]") -> Hooks:
        """Returns hooks that mask the signals of a block and put masked `signals`, float32 [T, n], into `seen`."""
        masked: dict[Signal, Change] = choice.changes(layer, families) if choice else {}
        watched: dict[Signal, None] = dict.fromkeys((*signals, *masked))
        return {
            signal: _watching(masked.get(signal), signal, seen if signal in signals else None) for signal in watched
        }

    hidden, found = stream.embed(tokens), []
    for layer in range(model.spec.num_hidden_layers):
        LOG.info("gram: layer %d of %d", layer + 1, model.spec.num_hidden_layers)
        key = f"layer-{layer}"
        if work.has(key):
            hidden = stream.run_layer(layer, hidden, lambda _, layer=layer: hooks(layer, {}))
        else:
            hidden, grams = _through(stream, layer, hidden, hooks)
            work.save(key, grams)
        found.append(LayerArrays(layer=layer, arrays=array_file(work.path(key))))
    return GramMatrices(num_tokens=tokens.size, weights_sha256=model.weights_sha256, layers=tuple(found))


def _watching(masked: "Change | None", signal: Signal, seen: "dict[Signal, Tensor] | None") -> "Change":
    def change(part: "Tensor") -> "Tensor | None":
        left = masked(part) if masked else None
        if seen is not None:
            seen[signal] = (part if left is None else left).float().cpu()
        return left

    return change


def _through(
    stream: LayerStream, layer: int, hidden: "Tensor", hooks: "Callable[[int, dict[Signal, Tensor]], Hooks]"
) -> "tuple[Tensor, dict[str, np.ndarray]]":
    """Returns (hidden states after the layer, its Gram matrices by signal), from the hidden states before it. As many
    blocks run at a time as there are cores, or as share the reading of experts; then their signals are added to the
    sums, block after block, a tile of rows on each core."""
    import torch

    loaded = stream.load_layer(layer, hidden.shape[1])
    out, sums = torch.empty_like(hidden), dict[Signal, "Tensor"]()
    step = stream.threads if loaded.lender is None else loaded.lender.at_once
    for start in range(0, len(hidden), step):
        wave = range(start, min(start + step, len(hidden)))
        seen: list[dict[Signal, Tensor]] = [{} for _ in wave]

        def forward(index: int, wave: range = wave, seen: "list[dict[Signal, Tensor]]" = seen) -> None:
            block = wave[index]
            out[block] = loaded.run(hidden[block : block + 1], hooks(layer, seen[index]))[0]

        stream.each_block(loaded, forward, len(wave))
        for signal, first in seen[0].items():
            total = sums.setdefault(signal, torch.zeros(first.shape[1], first.shape[1]))
            _add(stream, total, [block[signal] for block in seen])
    return out, {signal: total.numpy() for signal, total in sums.items()}


def _add(stream: LayerStream, total: "Tensor", blocks: "list[Tensor]") -> None:
    """Adds xᵀ x of each block [T, n] to `total` float32 [n, n], in the order of the blocks."""

    def tile(index: int) -> None:
        rows = slice(index * TILE_ROWS, (index + 1) * TILE_ROWS)
        for block in blocks:
            total[rows].addmm_(block[:, rows].T, block)

    stream.each(tile, -(-len(total) // TILE_ROWS))
