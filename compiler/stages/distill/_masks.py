"""Masks the units that a selector leaves out while a model trains: the build's own selection, with gradients that
pass."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from coldpress.compiler.activity import taps
from coldpress.compiler.activity.choice import choice_of
from coldpress.compiler.architectures._common import Modules
from coldpress.compiler.training.loop import Switch
from coldpress.compiler.training.source import layers_of
from coldpress.runtime.plugins import options_of
from coldpress.schemas.families import Signal, activity_of, num_units
from coldpress.schemas.model import ModelSpec
from coldpress.schemas.sparsity import Sparsity

Kept = Callable[[np.ndarray], np.ndarray]
"""From float32 [num_tokens, n] to bool of the same shape: the entries that the build's selector keeps."""


@dataclass(frozen=True)
class Mask:
    """The place where a layer is sparse, and the function that says which entries a token keeps there."""

    layer: int
    signal: Signal
    kept: Kept


def masks_of(spec: ModelSpec, sparsity: Sparsity) -> tuple[Mask, ...]:
    """Returns masks that do what the selector does and miss as many active units; empty if it leaves nothing out."""
    choice = choice_of(sparsity, spec)
    selector = choice.selector
    if selector.EXACT:
        return ()
    options = options_of(selector, sparsity.options)
    missed = selector.MISSED_SHARE if spec.exact_zeros else 0.0
    masks: list[Mask] = []
    for densities in sparsity.densities:
        family, total = densities.family, num_units(densities.family, spec)
        for layer, density in enumerate(densities.per_layer):
            arrays = choice.arrays[layer, family]
            if missed:
                arrays = selector.fit(total, (1 - missed) * density, {}, options)
            if missed or density < 1:
                kept = functools.partial(selector.select_many, arrays=arrays)
                masks.append(Mask(layer, activity_of(family, spec), kept))
    return tuple(masks)


def attach(
    model: nn.Module, modules: Modules, masks: tuple[Mask, ...], switch: Switch, straight_through: bool = True
) -> None:
    def change(kept: Kept) -> taps.Change:
        return lambda values: masked(values, kept, straight_through) if switch.on else None

    layers = list(layers_of(model, modules))
    for mask in masks:
        taps.attach(layers[mask.layer], modules, mask.signal, change(mask.kept))


def masked(values: Tensor, kept: Kept, straight_through: bool = True) -> Tensor:
    """Returns `values` [..., n] with masked entries set to 0 (Eq. 11). The backward pass is that of the identity (Eq.
    12), so that an entry masked now can still learn to matter; without `straight_through` only kept entries have a
    gradient."""
    with torch.no_grad():
        seen = values.reshape(-1, values.shape[-1]).float().cpu().numpy()
        mask = torch.from_numpy(kept(seen)).reshape(values.shape).to(values.device)
    if not straight_through:
        return torch.where(mask, values, 0.0)
    with torch.no_grad():
        removed = torch.where(mask, 0.0, -values)
    return values + removed
