"""Gives each layer, and the head, a format of its own: a whole model fits in DRAM where no single format lets it.

From the smallest format everywhere, each byte goes where it saves most divergence (search/by_layer.py). Effects
are those of one layer alone, and are taken to add up; the mix that fits is then measured as a whole.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from coldpress.compiler.cost_model import tensor_bytes, unit_bytes
from coldpress.compiler.kept_codes import keeping
from coldpress.compiler.search.by_layer import Options, Sizes, path_of
from coldpress.schemas.curves import HeadLoss
from coldpress.schemas.families import (
    Formats,
    HeadFormat,
    LayerFormats,
    dense_family,
    layer_format,
    num_units,
    with_head,
)
from coldpress.schemas.model import Model, role_shape


@dataclass(frozen=True)
class Mixes:
    model: Model
    names: Sequence[LayerFormats]
    """Formats of layers, the smallest first."""
    heads: Sequence[HeadLoss]
    """Formats of the head that are smaller than the usual one, the largest first."""

    def formats(self, sizes: Sizes) -> Formats:
        """Returns the formats at these sizes: a position in `names` for each layer, then one for the head, which counts
        from the smallest head up to the usual one."""
        *layers, head = sizes
        mixed = tuple(layer_format(self.names[at], layer) for layer, at in enumerate(layers))
        found = keeping(self.model, self.names[layers[0]] if len({*layers}) == 1 else mixed)
        return found if head == len(self.heads) else self._with_head(found, self.heads[-1 - head])

    def path(self, effects: Sequence[np.ndarray]) -> tuple[list[Sizes], list[float]]:
        """Returns ever larger sizes, and the divergence of each, from the effects of each name, float64 [L] each."""
        options = [self._of_layer(layer, tuple(one[layer] for one in effects)) for layer in range(len(effects[0]))]
        options.append(self._of_head())
        path = path_of(options)
        return path, [sum(own.effect[at] for own, at in zip(options, sizes, strict=True)) for sizes in path]

    def _of_layer(self, layer: int, effect: tuple[float, ...]) -> Options:
        spec, family = self.model.spec, dense_family(self.model.spec)
        units = num_units(family, spec)
        nbytes = (units * unit_bytes(family, spec, layer_format(name, layer)) for name in self.names)
        return Options(tuple(nbytes), effect)

    def _of_head(self) -> Options:
        usual = keeping(self.model, self.names[-1])
        smaller = [self._with_head(usual, loss) for loss in reversed(self.heads)]
        role = self.model.spec.head_role
        nbytes = (tensor_bytes(role, role_shape(self.model.spec, role), one) for one in (*smaller, usual))
        return Options(tuple(nbytes), (*(loss.mean_kld for loss in reversed(self.heads)), 0.0))

    def _with_head(self, formats: Formats, loss: HeadLoss) -> Formats:
        return with_head(formats, HeadFormat(role=self.model.spec.head_role, format=loss.format))


def last_that_fits(path: Sequence[Sizes], fits: Callable[[Sizes], bool]) -> int:
    """Returns the position of the largest sizes that fit, if all smaller ones do, too; -1 if none does."""
    return bisect_left(path, True, key=lambda sizes: not fits(sizes)) - 1
