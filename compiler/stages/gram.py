"""gram: computes X Xᵀ of the inputs of every matrix, for error-correcting algorithms of `quantize` (GPTQ, Eq. 1).

Streams the compiled model layer by layer over calibration text; each layer sees its signals after the build's selector,
so that a matrix is rounded for the inputs that it will have. Writes one array file per layer with one matrix per
signal. Holds one layer's matrices, its weights, and the hidden states of the text. A build has this stage only if its
algorithm asks for it.
"""

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import numpy as np
from pydantic import Field

from coldpress.compiler.activity.calibration_pass import ComputeConfig, stream_of
from coldpress.compiler.activity.choice import Choice, choice_of
from coldpress.compiler.activity.forward import Hooks, LayerStream
from coldpress.compiler.io import Workspace, array_file, load_arrays
from coldpress.runtime.plugins import load
from coldpress.runtime.sparsity import Selector
from coldpress.schemas.base import PositiveCount
from coldpress.schemas.config import Key
from coldpress.schemas.corpus import Corpus
from coldpress.schemas.families import Signal, activity_of
from coldpress.schemas.gram import INPUT_OF, GramMatrices, LayerGram
from coldpress.schemas.model import ATTENTION_ROLES, Model
from coldpress.schemas.preflight import StageNeeds
from coldpress.schemas.sparsity import Sparsity

if TYPE_CHECKING:
    from torch import Tensor

    from coldpress.compiler.activity.taps import Change
    from coldpress.compiler.needs import Build

log = logging.getLogger(__name__)

TILE_ROWS = 512
"""Rows of a Gram matrix that one core adds up. The size is fixed, so the number of cores changes no sum."""


class GramConfig(ComputeConfig):
    """Settings of `gram`."""

    gram_tokens: Annotated[PositiveCount, Key()] = Field(
        default=32768, description="calibration tokens that algorithm=gptq corrects rounding by; whole blocks"
    )


def run(
    config: GramConfig, model: Model, corpus: Corpus, sparsity: Sparsity, work: Workspace, threads: int
) -> GramMatrices:
    """Computes the Gram matrices of every layer, over the first calibration blocks.

    Raises:
        ColdpressError: if torch has no such device.
    """
    blocks = load_arrays(corpus.split("calibration").arrays)["tokens"]
    tokens = blocks[: max(1, config.gram_tokens // blocks.shape[1])]
    stream, _ = stream_of(config, model, threads)
    sparsity = sparsity.smallest
    left_out = not (sparsity.is_whole or load("coldpress.runtime.sparsity", Selector, sparsity.method).EXACT)
    # each expert sees few tokens, so experts are rounded without Gram matrices (compiler/stages/quantize/gptq.py)
    roles = ATTENTION_ROLES if model.spec.is_mixture else tuple(INPUT_OF)
    signals: tuple[Signal, ...] = tuple(dict.fromkeys(INPUT_OF[role] for role in roles))
    masks = _Masks(sparsity.families, signals, choice_of(sparsity, model.spec) if left_out else None)
    hidden, found = stream.embed(tokens), []
    for layer in range(model.spec.num_hidden_layers):
        log.info("gram: layer %d of %d", layer + 1, model.spec.num_hidden_layers)
        key = f"layer-{layer}"
        if work.has(key):
            hidden = stream.run_layer(layer, hidden, lambda _, layer=layer: masks.hooks(layer, {}))
        else:
            hidden, grams = _through(stream, layer, hidden, masks, threads)
            work.save(key, grams)
        found.append(LayerGram(layer=layer, arrays=array_file(work.path(key))))
    return GramMatrices(num_tokens=tokens.size, weights_sha256=model.weights_sha256, layers=tuple(found))


def needs(build: "Build") -> StageNeeds:
    """Counts a layer's weights and Gram matrices, the text's hidden states twice, and the blocks that run."""
    spec = build.model.spec
    tokens = min(build.settings["gram"]["gram_tokens"], build.num_tokens)
    running = build.running_bytes(8, 12 * spec.num_experts)
    hidden, grams = 2 * 4 * tokens * spec.hidden_size, sum(build.gram_bytes)
    ram_bytes = build.TORCH_BYTES + build.layer_weights_bytes + running + hidden + grams
    products = spec.num_hidden_layers * sum(build.gram_bytes) // 4 * 2 * tokens
    return StageNeeds(
        stage="gram",
        ram_bytes=ram_bytes,
        disk_bytes=spec.num_hidden_layers * grams,
        runtime_s=build.TORCH_S + build.forward_s(tokens) + build.compute_s(products / build.threads),
    )


@dataclass(frozen=True)
class _Masks:
    """Applies the build's selector to a layer's signals."""

    families: tuple[str, ...]
    signals: tuple[Signal, ...]
    choice: Choice | None
    """The selector's choice; None where it leaves out nothing."""

    def hooks(self, layer: int, seen: "dict[Signal, Tensor]") -> Hooks:
        """Returns hooks that mask the signals of a block and put masked `signals`, float32 [T, n], into `seen`."""
        signals: dict[Signal, None] = dict.fromkeys(self.signals)
        if self.choice is not None:
            signals |= dict.fromkeys(activity_of(family, self.choice.spec) for family in self.families)
        return {signal: self._change(layer, signal, seen) for signal in signals}

    def _change(self, layer: int, signal: Signal, seen: "dict[Signal, Tensor]") -> "Change":
        def change(part: "Tensor") -> "Tensor | None":
            import torch

            left = part
            for family in self.families:
                if self.choice is not None and activity_of(family, self.choice.spec) == signal:
                    mask = self.choice.mask(layer, family, left.float().cpu().numpy())
                    left = torch.where(torch.from_numpy(mask).to(part.device), left, 0.0)
            if signal in self.signals:
                seen[signal] = left.float().cpu()
            return None if left is part else left

        return change


def _through(
    stream: LayerStream, layer: int, hidden: "Tensor", masks: _Masks, threads: int
) -> "tuple[Tensor, dict[str, np.ndarray]]":
    """Returns (hidden states after the layer, its Gram matrices by signal), from the hidden states before it.

    As many blocks run at a time as there are cores; then their signals are added to the sums, block after block, a
    tile of rows on each core.
    """
    import torch

    loaded = stream.load_layer(layer, hidden.shape[1])
    out, sums = torch.empty_like(hidden), dict[Signal, "Tensor"]()
    for start in range(0, len(hidden), threads):
        wave = range(start, min(start + threads, len(hidden)))
        seen: list[dict[Signal, Tensor]] = [{} for _ in wave]

        def forward(index: int, wave: range = wave, seen: "list[dict[Signal, Tensor]]" = seen) -> None:
            block = wave[index]
            out[block] = loaded.run(hidden[block : block + 1], masks.hooks(layer, seen[index]))[0]

        stream.each(forward, len(wave))
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
