"""Runs the source model on validation text with predictors, one layer at a time: in one pass, every layer's smallest
predictor works alone; in the other, all layers have theirs."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from coldpress.compiler.activity.forward import BlockHooks, Hooks, LayerStream
from coldpress.compiler.activity.predictor_network import NetworkWeights, decode, over_all, rows_of, scores
from coldpress.compiler.activity.routing import router_of
from coldpress.compiler.checkpoint.tensors import read_role
from coldpress.compiler.io import load_arrays
from coldpress.runtime.routers import Router
from coldpress.runtime.sparsity import Selector
from coldpress.schemas.families import FormatName
from coldpress.schemas.model import ModelSpec, matrices
from coldpress.schemas.predictors import LayerPredictor, Point, PredictorSize, TrainedLayer

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Network:
    """A predictor that decides as the runtime does."""

    weights: NetworkWeights
    arrays: Mapping[str, np.ndarray]
    selector: Selector[Any]

    def predicted(self, inputs: "Tensor", experts: "Tensor | None") -> "Tensor":
        """Maps the MLP's inputs [T, hidden_size] to bool [T, num_units]; by `experts`, bool [T, E], to their units."""
        found = scores(self.weights, inputs.float().cpu(), experts).numpy()
        chosen = torch.from_numpy(self.selector.by_scores(found, self.arrays))
        return chosen if experts is None else over_all(chosen, experts, len(self.weights.fc2))


def network_of(
    selector: Selector[Any],
    format_name: FormatName,
    stored: PredictorSize | LayerPredictor,
    point: Point,
    hidden_size: int,
    num_selected: int = 0,
) -> Network:
    """Returns a stored predictor at a threshold, or, if `num_selected` is not 0, with that many units per token."""
    weights = decode(load_arrays(stored.arrays, "fc1", "fc2"), format_name, hidden_size)
    arrays = {"num_selected": np.array([num_selected]), "threshold": np.array(point.threshold)}
    return Network(weights, arrays, selector)


def effects_alone(
    selector: Selector[Any],
    stream: LayerStream,
    tokens: np.ndarray,
    trained: Mapping[int, TrainedLayer],
    num_selected: Mapping[int, int],
) -> tuple[dict[int, np.ndarray], dict[int, float]]:
    """Measures each layer's predictors while all other layers are whole: per layer the squared error of the MLP's
    output with each size, float64, and half the mean square of what its smallest predictor adds to a token's log
    likelihood. For small changes that is the divergence of the two models in nats; the mean itself would be lost in
    noise.

    A variant of the model joins the pass at the layer whose smallest predictor it tests, so each layer is read once.
    Memory holds the hidden states of all variants: at 7B, for 1,024 tokens, as much as a layer. `num_selected` as in
    `network_of`, by layer.
    """
    hidden, count = stream.embed(tokens), len(tokens)
    errors: dict[int, np.ndarray] = {}
    for layer in range(stream.spec.num_hidden_layers):
        hooks = None
        if layer in trained:
            hidden = torch.cat([hidden, hidden[:count]])
            trained_layer, hidden_size = trained[layer], stream.spec.hidden_size
            networks = [
                network_of(selector, trained_layer.format, size, size.points[0], hidden_size, num_selected[layer])
                for size in trained_layer.sizes
            ]
            found = np.zeros((count, len(networks)))
            hooks = _watching(networks, _mlp(stream, layer), found, len(hidden) - count)
            errors[layer] = found
        hidden = stream.run_layer(layer, hidden, hooks)
    variants = 1 + len(trained)
    nll = stream.score(hidden, np.concatenate([tokens] * variants)).reshape(variants, *tokens[:, 1:].shape)
    changed = {layer: float(np.square(nll[1 + place] - nll[0]).mean()) / 2 for place, layer in enumerate(errors)}
    return {layer: found.sum(axis=0) for layer, found in errors.items()}, changed


@dataclass(frozen=True)
class MeasuredMlp:
    spec: ModelSpec
    down: "Tensor"
    """The transposed down projection, of all experts, float32 [num_units, hidden_size]."""
    router: Router

    def hooks(self, change: "Callable[[Tensor, Tensor, Tensor | None], Tensor]") -> Hooks:
        """Returns hooks of a block in which `change` replaces the inner activation [T, num_units]; it is called with
        that, the MLP's input [T, hidden_size], and the experts that tokens use, bool [T, E], or None."""
        seen: dict[str, Tensor] = {}

        def inner(part: "Tensor") -> "Tensor":
            rows = part.reshape(-1, part.shape[-1])
            return change(rows, seen["input"], seen.get("experts")).reshape(part.shape)

        def keep(name: str) -> "Callable[[Tensor], None]":
            return lambda part: seen.update({name: part.reshape(-1, part.shape[-1])})

        def routed(part: "Tensor") -> None:
            logits = part.float().cpu().reshape(-1, part.shape[-1]).numpy()
            seen["experts"] = torch.from_numpy(self.router.choose(self.router.scores(logits)))

        hooks: Hooks = {"mlp_input": keep("input"), "mlp_inner": inner}
        return {**hooks, "router_logits": routed} if self.spec.is_mixture else hooks

    def output(self, inner: "Tensor", experts: "Tensor | None") -> "Tensor":
        """Returns the MLP's output for an inner activation, float32 [T, hidden_size]."""
        if experts is None:
            return inner.float() @ self.down
        found = self.down.new_zeros(len(inner), self.down.shape[1])
        for units, tokens, _ in rows_of(experts, len(self.down)):
            found[tokens] += inner[tokens, units].float() @ self.down[units]
        return found


def _mlp(stream: LayerStream, layer: int) -> MeasuredMlp:
    spec = stream.spec
    names = [f"layers.{layer}.{name}.weight" for name in matrices("down_proj", spec)]
    parts = [torch.from_numpy(read_role(stream.model, name)).float().T for name in names]
    down = (parts[0] if len(parts) == 1 else torch.cat(parts)).to(stream.device)
    return MeasuredMlp(spec, down, router_of(stream.model, layer))


def _watching(networks: list[Network], mlp: MeasuredMlp, found: np.ndarray, first_block: int) -> BlockHooks:
    """Notes each network's squared error from `first_block` on, and lets the first one decide."""

    def hooks(block: int) -> Hooks:
        if block < first_block:
            return {}

        def change(inner: "Tensor", inputs: "Tensor", experts: "Tensor | None") -> "Tensor":
            masks = [network.predicted(inputs, experts).to(inner.device) for network in networks]
            for place, mask in enumerate(masks):
                lost = mlp.output(torch.where(mask, 0.0, inner), experts)
                found[block - first_block, place] = float(lost.double().square().sum())
            return torch.where(masks[0], inner, 0.0)

        return mlp.hooks(change)

    return hooks


def nll_with(
    stream: LayerStream, tokens: np.ndarray, layers: Iterable[int], network: Callable[[int], Network]
) -> tuple[np.ndarray, dict[int, float]]:
    """Returns the negative log likelihood of every token with the predictors of `layers`, float64 [num_blocks, T - 1],
    and per layer the mean cosine of the MLP's output with and without the units that its predictor leaves out.
    `network` gives the predictor of a layer when it runs, so that memory holds one."""
    cosines = {layer: np.zeros(len(tokens)) for layer in layers}

    def of_layer(layer: int) -> BlockHooks | None:
        return _deciding(network(layer), _mlp(stream, layer), cosines[layer]) if layer in cosines else None

    nll = stream.token_nll(tokens, of_layer)
    return nll, {layer: float(found.mean()) for layer, found in cosines.items()}


def _deciding(network: Network, mlp: MeasuredMlp, cosines: np.ndarray) -> BlockHooks:
    def hooks(block: int) -> Hooks:
        def change(inner: "Tensor", inputs: "Tensor", experts: "Tensor | None") -> "Tensor":
            left = torch.where(network.predicted(inputs, experts).to(inner.device), inner, 0.0)
            outputs = [mlp.output(part, experts) for part in (inner, left)]
            pair = torch.nn.functional.cosine_similarity(*outputs, dim=-1)
            cosines[block] = float(pair.double().mean())
            return left

        return mlp.hooks(change)

    return hooks
