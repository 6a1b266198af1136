"""Measures what a finer coarse plane is worth in each matrix of each layer's MLP, in one pass over a little text.

Units of the model are in planes, and each token refines a few of them. The model runs with the coarser planes in all
matrices, and then with the finer ones in each matrix alone. All these models share the reading of layers, and each
joins the pass at its own layer. The gain is how much smaller the divergence from the source is. Gains of single
matrices nearly add up. Cheaper measures mislead: by the error of the layer's output a down projection seems worth twice
as much as it is, and with nothing refined the order is another one (docs/experiments/planes.md).
"""

from dataclasses import dataclass, field

import numpy as np

from coldpress.compiler.activity.choice import Choice
from coldpress.compiler.activity.forward import LayerStream
from coldpress.compiler.activity.in_planes import InPlanes, in_model
from coldpress.compiler.activity.unit_statistics import NORMS, unit_norms
from coldpress.compiler.activity.variants import compare
from coldpress.compiler.rounding._matrix import Rounding
from coldpress.compiler.rounding._weights import Axis
from coldpress.runtime.plugins import load
from coldpress.runtime.sparsity import Selector
from coldpress.schemas.families import (
    WHOLE_MLP,
    FormatName,
    layers_of,
    slices,
    unit_format,
    used_share,
)
from coldpress.schemas.model import Model

REFINED_SHARE = 0.05
"""Share of a layer's units that a token refines."""
REFINE = "refine"


@dataclass(frozen=True)
class Largest(Choice):
    """Refines the units with the largest inner activation times the norm of their down column."""

    share: float
    """Share of a layer's units."""

    def mask(self, layer: int, family: str, activity: np.ndarray) -> np.ndarray:
        units, chosen = activity.shape[1], np.zeros(activity.shape, bool)
        order = (np.abs(activity) * self.arrays[layer, family][NORMS]).argsort(axis=1)
        count = round(self.share * used_share(family, self.spec) * units)
        np.put_along_axis(chosen, order[:, units - count :], True, axis=1)
        return chosen


def largest(model: Model, share: float) -> Choice:
    layers = layers_of(WHOLE_MLP, model.spec)
    norms = {(layer, WHOLE_MLP): {NORMS: unit_norms(model, layer, "mlp_mid")} for layer in layers}
    return in_model(Largest(load("coldpress.runtime.sparsity", Selector, REFINE), norms, model.spec, share))


@dataclass(frozen=True)
class _Once(Rounding):
    known: dict[tuple[str, FormatName], np.ndarray] = field(default_factory=dict[tuple[str, FormatName], np.ndarray])

    def codes(self, model: Model, role: str, axis: Axis, format_name: FormatName) -> np.ndarray:
        if (role, format_name) not in self.known:
            self.known[role, format_name] = super().codes(model, role, axis, format_name)
        return self.known[role, format_name]


def matrix_gains(
    stream: LayerStream, tokens: np.ndarray, formats: tuple[FormatName, FormatName], rounding: Rounding
) -> np.ndarray:
    """Returns how much less the model loses with the finer coarse planes in one matrix alone, in nats a token, float64
    [num_layers, matrices]: of gate, up and down, or up and down; 0 in layers without units. `formats` are the coarser
    format in planes and the finer one; `tokens` is int [num_blocks, T]."""
    import torch

    (coarser, finer), once = formats, _Once(rounding.algorithm, rounding.gram)
    count, having = len(slices(WHOLE_MLP, stream.spec)), layers_of(WHOLE_MLP, stream.spec)
    names = [unit_format([finer if at == one else coarser for at in range(count)]) for one in range(count)]
    coarse, *others = (InPlanes(stream, name, (WHOLE_MLP,), once) for name in (coarser, *names))
    choice, hidden = largest(stream.model, REFINED_SHARE), stream.embed(tokens)
    for layer in range(stream.spec.num_hidden_layers):
        changes, first = choice.changes(layer, (WHOLE_MLP,)) if layer in having else {}, hidden[: len(tokens)]
        models = [(coarse, hidden), *((other, first) for other in others if layer in having)]
        hidden = torch.cat([model.run_layer(layer, states, lambda _, own=changes: own) for model, states in models])
        once.known.clear()
    whole = stream.last_hidden(tokens)
    loss = compare(stream, tokens, whole, hidden).kld.mean(axis=(1, 2))
    gains = np.zeros((stream.spec.num_hidden_layers, count))
    gains[list(having)] = (loss[0] - loss[1:]).reshape(-1, count)
    return gains
