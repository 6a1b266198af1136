"""Lists what is measured of each selector: densities, and sizes of DRAM for one whose choice depends on residency."""

import logging
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from coldpress.compiler.activity.choice import CachedChoice, Choice
from coldpress.compiler.activity.unit_statistics import all_statistics, fit_all
from coldpress.compiler.activity.variants import Variant
from coldpress.compiler.candidates import DEFAULT_FORMAT
from coldpress.compiler.cost_model import read_units_of, unit_bytes
from coldpress.runtime.plugins import load, options_of
from coldpress.runtime.sparsity import Selector
from coldpress.schemas.activations import Activations
from coldpress.schemas.base import Options
from coldpress.schemas.errors import ColdpressError
from coldpress.schemas.families import Method, used_share
from coldpress.schemas.model import Model, ModelSpec

LOG = logging.getLogger(__name__)
DENSITIES = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
RESIDENT_SHARES, CACHED_DENSITIES = (0.25, 0.6), (0.3, 0.5, 0.7, 0.9)
"""DRAM and densities of selectors that see residency: they choose token by token, which takes longer."""
REFERENCE_FLASH = (42_000, 4096, 420_000, 1.0)
"""Break-even gap, page, bytes of the first byte's latency, and overlap: a phone with UFS 3.1, 100,000 reads a second,
4.2 GB/s and 0.1 ms (ActiveFlow, Table 2; Ripple 2.2)."""


class Along(NamedTuple):
    """A curve to measure: a selector, and the share of the units that a cache holds meanwhile."""

    method: Method
    resident_share: float | None
    """None for a selector that does not see residency."""

    @property
    def densities(self) -> tuple[float, ...]:
        """The densities at which it is measured, those out of the selector's reach included."""
        return DENSITIES if self.resident_share is None else CACHED_DENSITIES

    @property
    def title(self) -> str:
        """The curve's name, for logs and for the file of its pass."""
        return self.method if self.resident_share is None else f"{self.method}-{self.resident_share:g}-resident"


def curves_of(method: Method) -> list[Along]:
    """Returns the curves that are measured of a selector."""
    sees = load("coldpress.runtime.sparsity", Selector, method).SEES_RESIDENCY
    return [Along(method, share) for share in (RESIDENT_SHARES if sees else (None,))]


def why_not(method: Method) -> str | None:
    """Returns why a candidate's loss is not measured; None if it is."""
    selector = load("coldpress.runtime.sparsity", Selector, method)
    if selector.is_whole:
        return "uses every unit, so it loses nothing"
    if selector.EXACT:
        return "leaves out exact zeros only, so it loses nothing"
    if selector.NEEDS_PREDICTORS:
        return "its predictors are trained after this choice, to predictor_tolerance"
    return None


def reached(along: Along, options: Options, spec: ModelSpec) -> tuple[float, ...]:
    """Returns the densities that the selector can reach."""
    selector = load("coldpress.runtime.sparsity", Selector, along.method)
    own, found = options_of(selector, options), []
    for density in along.densities:
        try:
            selector.divide(density, spec, own)
        except ColdpressError as error:
            LOG.info("explore: %s is not measured at a density of %g: %s", along.method, density, error)
        else:
            found.append(density)
    return tuple(found)


def variants(along: Along, options: Options, model: Model, activations: Activations) -> Iterator[Variant]:
    """Yields a selector at each density that it can reach, with the arrays that it would have in the artifact."""
    selector, held = load("coldpress.runtime.sparsity", Selector, along.method), along.resident_share
    own, spec = options_of(selector, options), model.spec
    families = selector.families(spec, own)
    reads = None if held is None else _reference_reads(families, spec)
    statistics = all_statistics(model, activations, families, reads, held or 0.0)
    for density in reached(along, options, spec):
        shares = selector.divide(density, spec, own)
        per_layer = {
            family: (used_share(family, spec) * shares[family],) * spec.num_hidden_layers for family in families
        }
        arrays = fit_all(selector, own, per_layer, spec, statistics)
        choice = Choice(selector, arrays, spec)
        if held is not None:
            choice = CachedChoice(selector, arrays, spec, held, getattr(own, "use_read_units", False))
        yield Variant(choice, tuple(families))


def _reference_reads(families: Sequence[str], spec: ModelSpec) -> dict[str, np.ndarray]:
    """Returns what a read costs on the reference flash; see `all_statistics`."""
    return {family: read_units_of(*REFERENCE_FLASH, unit_bytes(family, spec, DEFAULT_FORMAT)) for family in families}
