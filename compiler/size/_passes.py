"""The source model on validation text with predictors in some of its layers, one layer at a time.

Two passes: one in which every layer's smallest predictor works alone, and one in which all layers have theirs.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from compiler._io import load_arrays
from compiler.activity.forward import BlockHooks, Hooks, LayerStream
from compiler.activity.predictor_network import Weights, decode, scores
from compiler.checkpoint.tensors import read_role
from runtime._plugins import load
from schemas.families import FormatName
from schemas.predictors import Ladder, LayerPredictor, Point, Rung

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Network:
    """A predictor that decides as the runtime's does."""

    weights: Weights
    arrays: Mapping[str, np.ndarray]
    """What decides by scores (runtime/sparsity/predictor.py)."""

    def predicted(self, inputs: "Tensor") -> "Tensor":
        """bool [T, num_units] from the MLP's inputs [T, hidden_size]."""
        selector = load("runtime.sparsity", "predictor")  # by name: it concerns no build that has another
        found = scores(self.weights, inputs.float().cpu()).numpy()
        return torch.from_numpy(selector.by_scores(found, self.arrays)).to(inputs.device)


def network_of(
    format_name: FormatName,
    stored: Rung | LayerPredictor,
    point: Point,
    hidden_size: int,
    num_selected: int = 0,
) -> Network:
    """A stored predictor at one of its thresholds; or, where that is not 0, with as many units for every token."""
    weights = decode(load_arrays(stored.arrays, "fc1", "fc2"), format_name, hidden_size)
    return Network(weights, {"num_selected": np.array([num_selected]), "threshold": np.array(point.threshold)})


def effects_alone(
    stream: LayerStream, tokens: np.ndarray, ladders: Mapping[int, Ladder], num_selected: Mapping[int, int]
) -> tuple[dict[int, np.ndarray], dict[int, float]]:
    """What each layer's predictors do while all other layers are whole; `num_selected` as in `network_of`, by layer.

    Blocks of a variant of the model join the pass at the layer whose smallest predictor works in it, so each layer is
    read once; in memory are the hidden states of all variants: at 7B, for 1,024 tokens, as much as a layer.

    Returns:
        Per layer the squared error of the MLP's output with each size, float64, and half the mean square of what its
        smallest predictor adds to a token's log likelihood. For small changes that is the divergence of the two models
        in nats; the mean itself would be lost among its errors.
    """
    hidden, count = stream.embed(tokens), len(tokens)
    errors: dict[int, np.ndarray] = {}
    for layer in range(stream.spec.num_hidden_layers):
        hooks = None
        if layer in ladders:
            hidden = torch.cat([hidden, hidden[:count]])
            ladder, hidden_size = ladders[layer], stream.spec.hidden_size
            networks = [
                network_of(ladder.format, rung, rung.points[0], hidden_size, num_selected[layer])
                for rung in ladder.rungs
            ]
            found = np.zeros((count, len(networks)))
            hooks = _watching(networks, _down(stream, layer), found, len(hidden) - count)
            errors[layer] = found
        hidden = stream.run_layer(layer, hidden, hooks)
    variants = 1 + len(ladders)
    nll = stream.score(hidden, np.concatenate([tokens] * variants)).nll.reshape(variants, *tokens[:, 1:].shape)
    changed = {layer: float(np.square(nll[1 + place] - nll[0]).mean()) / 2 for place, layer in enumerate(errors)}
    return {layer: found.sum(axis=0) for layer, found in errors.items()}, changed


def _down(stream: LayerStream, layer: int) -> "Tensor":
    """The transposed down projection, float32 [intermediate_size, hidden_size]."""
    return torch.from_numpy(read_role(stream.model, f"layers.{layer}.down_proj.weight")).float().T.to(stream.device)


def _watching(networks: list[Network], down: "Tensor", found: np.ndarray, first_block: int) -> BlockHooks:
    """From `first_block` on, notes the squared error of each network and lets the first one decide."""

    def hooks(block: int) -> Hooks:
        if block < first_block:
            return {}
        seen: list[Tensor] = []

        def change(inner: "Tensor") -> "Tensor":
            masks = [network.predicted(seen[0]) for network in networks]
            for place, mask in enumerate(masks):
                lost = torch.where(mask, 0.0, inner.float()) @ down
                found[block - first_block, place] = float(lost.double().square().sum())
            return torch.where(masks[0], inner, 0.0)

        return {"mlp_input": seen.append, "mlp_inner": change}

    return hooks


def nll_with(
    stream: LayerStream, tokens: np.ndarray, networks: Mapping[int, Network]
) -> tuple[np.ndarray, dict[int, float]]:
    """(Negative log likelihood of every token, float64 [num_blocks, T - 1]; per layer the mean cosine of the MLP's
    output with and without what its predictor leaves out) where every layer of `networks` has its predictor."""
    cosines = {layer: np.zeros(len(tokens)) for layer in networks}

    def of_layer(layer: int) -> BlockHooks | None:
        return _deciding(networks[layer], _down(stream, layer), cosines[layer]) if layer in networks else None

    nll = stream.token_nll(tokens, of_layer).nll
    return nll, {layer: float(found.mean()) for layer, found in cosines.items()}


def _deciding(network: Network, down: "Tensor", cosines: np.ndarray) -> BlockHooks:
    def hooks(block: int) -> Hooks:
        seen: list[Tensor] = []

        def change(inner: "Tensor") -> "Tensor":
            left = torch.where(network.predicted(seen[0]), inner, 0.0)
            pair = torch.nn.functional.cosine_similarity(inner.float() @ down, left.float() @ down, dim=-1)
            cosines[block] = float(pair.double().mean())
            return left

        return {"mlp_input": seen.append, "mlp_inner": change}

    return hooks
