"""A build's selector with its arrays for every family of every layer: selects units for many tokens at once.

The selector is the runtime's own file (runtime/sparsity); `allocate` fits the arrays and `package` puts them into the
artifact's tables. So calibration, distillation and evaluation leave out what the runtime leaves out.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from coldpress.compiler.io import load_arrays
from coldpress.compiler.shared_settings import DEFAULT_CACHE
from coldpress.runtime.cache import CacheFacts, make
from coldpress.runtime.plugins import load
from coldpress.runtime.sparsity import Residency, Selector, used_experts
from coldpress.schemas.families import WHOLE_MLP, Signal, activity_of, layers_of, num_experts
from coldpress.schemas.model import ModelSpec
from coldpress.schemas.sparsity import Sparsity

if TYPE_CHECKING:
    from torch import Tensor

    from coldpress.compiler.activity.taps import Change

Arrays = Mapping[tuple[int, str], Mapping[str, np.ndarray]]
"""A selector's arrays by layer and family."""


REPLAYED_LAYERS = 4


def replayed_layers(spec: ModelSpec) -> tuple[int, ...]:
    """Returns the layers, of those whose MLP has units, whose requests stand for those of all layers."""
    having = layers_of(WHOLE_MLP, spec)
    picked = np.unique(np.linspace(0, len(having) - 1, min(REPLAYED_LAYERS, len(having))).round().astype(int))
    return tuple(having[place] for place in picked.tolist())


@dataclass(frozen=True)
class Choice:
    """Selects the units that tokens use."""

    selector: Selector[Any]
    arrays: Arrays
    spec: ModelSpec

    def mask(self, layer: int, family: str, activity: np.ndarray) -> np.ndarray:
        """Returns the units that each token uses, bool of the shape of `activity`, float32 [T, num_units]."""
        chosen = self.selector.select_many(activity, self.arrays[layer, family])
        experts = num_experts(family, self.spec)
        return chosen & of_experts(used_experts(activity, experts), activity.shape[1]) if experts > 1 else chosen

    def changes(self, layer: int, families: Iterable[str]) -> "dict[Signal, Change]":
        """Returns hooks of a layer's forward pass (compiler/activity/forward.py) that set unselected units of its
        signals to 0. A unit whose activation is 0 adds nothing: masking it there equals leaving out its slices."""
        of_signal: dict[Signal, list[str]] = {}
        for family in families:
            of_signal.setdefault(activity_of(family, self.spec), []).append(family)
        return {signal: self._change(layer, names) for signal, names in of_signal.items()}

    def _change(self, layer: int, families: list[str]) -> "Change":
        def change(part: "Tensor") -> "Tensor":
            import torch

            for family in families:
                mask = self.mask(layer, family, part.float().cpu().numpy())
                part = torch.where(torch.from_numpy(mask).to(part.device), part, 0.0)
            return part

        return change


@dataclass(frozen=True)
class CachedChoice(Choice):
    """A selector that sees residency, with the units that a cache holds while it chooses, token after token. The tokens
    of a call are consecutive, and the cache is empty before them: it fills within a few tokens. What reads bring
    besides is not used, since that depends on the device."""

    resident_share: float
    """Share of each family's units that the cache holds."""
    uses_resident: bool
    """True if a token also uses all units in DRAM (`use_read_units`)."""

    def mask(self, layer: int, family: str, activity: np.ndarray) -> np.ndarray:
        num_units, experts = activity.shape[1], num_experts(family, self.spec)
        natural, own = np.arange(num_units, dtype=np.int32), used_experts(activity, experts)
        slots = max(1, round(self.resident_share * num_units))
        cache = make(DEFAULT_CACHE, {}, CacheFacts(num_units, slots, np.empty(0, np.int32), natural))
        used = np.zeros(activity.shape, bool)
        for token, signal in enumerate(activity):
            present = cache.present
            among = own[token] if experts > 1 else None
            ids = self.selector.select_among(signal, self.arrays[layer, family], Residency(present, natural), among)
            used[token, ids] = True
            if self.uses_resident:
                used[token] |= present
            cache.serve(ids)
        return used & of_experts(own, num_units) if experts > 1 else used


def of_experts(experts: np.ndarray, num_units: int) -> np.ndarray:
    """Expands `experts`, bool [T, E], to their units: bool [T, num_units]."""
    return np.repeat(experts, num_units // experts.shape[1], axis=1)


def selector_arrays(sparsity: Sparsity) -> dict[tuple[int, str], dict[str, np.ndarray]]:
    """Returns the arrays that `allocate` fitted, by layer and family; empty if the selector needs none."""
    found: dict[tuple[int, str], dict[str, np.ndarray]] = {
        (layer, entry.family): {} for entry in sparsity.densities for layer in range(len(entry.per_layer))
    }
    if sparsity.arrays is not None:
        for key, array in load_arrays(sparsity.arrays).items():
            layer, family, name = key.split(".")
            found[int(layer), family][name] = array
    return found


def choice_of(sparsity: Sparsity, spec: ModelSpec) -> Choice:
    return Choice(load("coldpress.runtime.sparsity", Selector, sparsity.method), selector_arrays(sparsity), spec)
