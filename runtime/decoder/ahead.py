"""What the next layers will ask for, guessed from this layer's inputs, so that it is read while they compute
(ActiveFlow 3, Figs. 8 and 10).

Inputs are much alike from layer to layer, so the next section's selector, given this layer's input, chooses most of the
units that it will choose. Reads are begun when all that this layer asks for is there: what is asked for now comes
first. Where sections hold one layer, a layer reads ahead for the next one; where they hold N, each of a group's layers
reads its share of flash for the whole next group, with the freshest input that there is. Guessing is one more choice
per section, of a selector that reads the input itself; a matrix is never multiplied for it alone. Of what is chosen a
plan may take the largest entries of the input only, which are the surest to be large in the next layer, too. In a
mixture of experts the next layer's router says of which experts units are guessed.
"""

import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np

from coldpress.runtime.decoder.experts import taken
from coldpress.runtime.decoder.selection import Selection, union
from coldpress.runtime.store.ahead_room import guessed_families
from coldpress.runtime.store.store import Store
from coldpress.schemas.families import FAMILIES, signal_of
from coldpress.schemas.layout import Section
from coldpress.schemas.model import ModelSpec

Router = Callable[[str, np.ndarray], tuple[np.ndarray, np.ndarray]]
"""A family and the MLP's input, float32 [T, hidden_size] -> what its selector sees, float32 [T, n], and the experts
that each token uses, bool [T, E]."""


class Ahead:
    """Has a store read ahead, if its plan has room for that."""

    def __init__(
        self,
        spec: ModelSpec,
        store: Store,
        selection: Selection,
        sections: Sequence[Section],
        routers: Sequence[Router | None],
    ) -> None:
        """Nothing is guessed before `note`; `routers` are those of all layers, None where there are no experts."""
        self._spec, self._store, self._selection, self._routers = spec, store, selection, routers
        self._noted: dict[str, tuple[int, np.ndarray]] = {}
        self._following: dict[tuple[int, str], tuple[Section, Section]] = {}
        """(layer, family) -> the section that it is of, and the one after it."""
        if not store.plan.preload_buffer_bytes:
            return
        for family in guessed_families(dict.fromkeys(section.family for section in sections)):
            own = [section for section in sections if section.family == family]
            for section, following in itertools.pairwise(own):
                self._following |= {(layer, family): (section, following) for layer in section.layers}

    def note(self, layer: int, family: str, signal: np.ndarray, experts: np.ndarray | None = None) -> None:
        """A layer chooses by `signal`, float32 [T, n], among units of `experts`, bool [T, E]."""
        if (layer, family) in self._following:
            if experts is not None and signal_of(family, self._spec) == "expert_inputs":
                signal = taken(signal, experts)
            self._noted[family] = layer, signal

    def layer_done(self) -> None:
        """All that the layer of the last notes asked for is there: begins to read what the next ones will."""
        for family, (layer, signal) in self._noted.items():
            section, following = self._following[layer, family]
            there = {target: self._store.residency(target, family) for target in following.layers}
            chosen, all_seen = list[np.ndarray](), list[np.ndarray]()
            for target, residency in there.items():
                router = self._routers[target] if FAMILIES[family].signal == "mlp_input" else None
                seen, experts = router(family, signal) if router else (signal, None)
                chosen += self._selection.select_each(target, family, seen, residency, experts)
                all_seen.append(seen)
            ids, _ = union(chosen, following.num_units)
            if FAMILIES[following.family].axis == "hidden_size":
                ids = surest(ids, np.concatenate(all_seen), self._store.plan.preload_guess)
            position = there[following.first_layer].position[ids]
            share = position * len(section.layers) // following.num_units == layer - section.first_layer
            self._store.preload(following.first_layer, family, ids[share])
        self._noted.clear()


def surest(ids: np.ndarray, signal: np.ndarray, share: float) -> np.ndarray:
    """A `share` of `ids`, int32 ascending, one of them at least: those at which any token's `signal`, float32 [T, n],
    is largest; ties go to the lower id."""
    count = max(1, math.ceil(share * ids.size))
    if count >= ids.size:
        return ids
    sizes = np.abs(signal[:, ids]).max(axis=0)
    least = np.partition(sizes, ids.size - count)[ids.size - count]
    chosen = sizes > least
    tied = np.flatnonzero(sizes == least)[: count - np.count_nonzero(chosen)]
    chosen[tied] = True
    return ids[chosen]
