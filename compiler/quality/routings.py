"""Lists what is measured of each way of routing: strengths, equal in all layers, at two sizes of DRAM."""

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from coldpress.compiler.activity.cached_routing import CachedRouting
from coldpress.compiler.activity.forward import LayerStream
from coldpress.compiler.candidates import routings_for
from coldpress.compiler.quality.variants import RESIDENT_SHARES
from coldpress.compiler.shared_settings import DEFAULT_CACHE
from coldpress.runtime.cache import CachePolicy, Known, make
from coldpress.runtime.plugins import load
from coldpress.runtime.routing import PACKAGE, Routing
from coldpress.schemas.families import dense_family, num_units
from coldpress.schemas.layout import RoutingName
from coldpress.schemas.model import ModelSpec

if TYPE_CHECKING:
    from torch import Tensor

STRENGTHS = (0.05, 0.1, 0.2, 0.4, 0.8)


class AlongStrengths(NamedTuple):
    """A curve to measure: a way of routing, and the share of the experts' units that a cache holds meanwhile."""

    routing: RoutingName
    resident_share: float

    @property
    def title(self) -> str:
        return f"{self.routing}-{self.resident_share:g}-resident"

    def last_hidden(self, stream: LayerStream, tokens: np.ndarray) -> "Tensor":
        """Returns the hidden states after the last layer at all strengths, [len(STRENGTHS) * B, T, hidden_size]."""
        spec = stream.spec
        units = num_units(dense_family(spec), spec)
        slots, natural = max(1, round(self.resident_share * units)), np.arange(units, dtype=np.int32)

        def cache(_: int) -> CachePolicy:
            return make(DEFAULT_CACHE, {}, Known(units, slots, np.empty(0, np.int32), natural))

        routing = CachedRouting(stream, load(PACKAGE, Routing, self.routing), cache)
        return routing.run(tokens, np.tile(np.array(STRENGTHS)[:, None], spec.num_hidden_layers)).hidden


def routing_curves(named: str, spec: ModelSpec) -> list[AlongStrengths]:
    """Returns the curves that are measured: of the routing that the user named, or with `auto` of all; none for a model
    without experts."""
    names = routings_for(named, spec.is_mixture)
    return [AlongStrengths(name, share) for name in names for share in RESIDENT_SHARES]
