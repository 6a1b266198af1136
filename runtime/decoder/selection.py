"""The selector of a run: one method for all layers and families, checked against the artifact.

Uses the method's declarations (runtime/sparsity: CHOOSES, NEEDS_PREDICTORS, NEEDS_EXACT_ZEROS) and the arrays that the
artifact stores for the plan. `dense` runs any artifact; other methods run artifacts with families they can choose from.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from coldpress.runtime import plugins
from coldpress.runtime.artifact.reader import Artifact
from coldpress.runtime.routing import PACKAGE as ROUTING
from coldpress.runtime.routing import Routing
from coldpress.runtime.sparsity import Residency, Selector, sees_others, sees_residency
from coldpress.runtime.store.facts import Key
from coldpress.schemas.errors import ColdpressError, UnknownNameError
from coldpress.schemas.layout import PartPlan, Plan, placed_parts
from coldpress.schemas.manifest import Manifest

PACKAGE = "coldpress.runtime.sparsity"


def check_selector(name: str, manifest: Manifest) -> None:
    """Raises `UnknownNameError` if there is no such method, and `ColdpressError` if the artifact lacks something that
    the method needs; the message says what."""
    known = plugins.names(PACKAGE)
    if name not in known:
        raise UnknownNameError("selector", name, known)
    lacks = _lacks(plugins.load(PACKAGE, Selector, name), manifest)
    if lacks:
        usable = [other for other in known if not _lacks(plugins.load(PACKAGE, Selector, other), manifest)]
        raise ColdpressError(f"the selector '{name}' {lacks}; choose one of: {', '.join(usable)}")


def _lacks(method: Selector[Any], manifest: Manifest) -> str | None:
    families = [entry.family for entry in manifest.families]
    foreign = [family for family in families if family not in method.CHOOSES]
    if foreign:
        return f"cannot choose units of the family {foreign[0]}, which this artifact keeps on flash"
    if method.NEEDS_EXACT_ZEROS and not manifest.model.exact_zeros:
        return f"needs exact zeros, but the model's activation is {manifest.model.hidden_act}"
    if method.NEEDS_PREDICTORS and not manifest.predictors:
        return "needs predictors, and this artifact has none"
    return None


class Selection:
    routing: Routing | None = None
    """The change of routers' choices; None for the choice that the model was trained with."""
    routing_strengths: Sequence[float] = ()
    """By layer, how much its router prefers experts in DRAM; empty without `routing`."""

    def __init__(self, artifact: Artifact, plan: Plan) -> None:
        """Takes the arrays fitted for the plan; a method without arrays in the artifact is fitted to densities only.
        Raises `ColdpressError` as `check_selector`, or if the method cannot be fitted without calibration."""
        check_selector(plan.method, artifact.manifest)
        self.method = plugins.load(PACKAGE, Selector, plan.method)
        self._title = f"the selector '{plan.method}'" if plan.routing is None else f"the routing '{plan.routing}'"
        self.sees_residency, self.sees_others = sees_residency(plan), sees_others(plan)
        self.routing = None if plan.routing is None else plugins.load(ROUTING, Routing, plan.routing)
        self.routing_strengths = plan.routing_strengths
        self.arrays = {
            (part.layer, part.family): self._fitted(artifact, plan, part, section.num_units)
            for part, section in placed_parts(plan, artifact.manifest.flash.sections)
        }

    @property
    def is_whole(self) -> bool:
        return self.method.is_whole

    def _fitted(self, artifact: Artifact, plan: Plan, part: PartPlan, num_units: int) -> dict[str, np.ndarray]:
        arrays = artifact.selector_arrays(plan, part.layer, part.family)
        if arrays is None:
            options = plugins.options_of(self.method, plan.options)
            arrays = self.method.fit(num_units, part.density, {}, options)
        return arrays | (_predictor_arrays(artifact, part.layer) if self.method.NEEDS_PREDICTORS else {})

    def select(
        self, key: Key, signal_Tn: np.ndarray, residency: Residency, experts_TE: np.ndarray | None = None
    ) -> list[np.ndarray]:
        """Returns the ids that each token uses, int32 ascending, from its signal, float32 [T, n]. `experts_TE` bool
        [T, E]: the experts that each token uses; None if units do not belong to experts."""
        arrays = self.arrays[key]
        if experts_TE is None and len(signal_Tn) > 1 and type(self.method).select is Selector.select:
            # the default `select` calls `select_many` for one token; one call for all tokens takes half as long
            return [ids.astype(np.int32) for ids in map(np.flatnonzero, self.method.select_many(signal_Tn, arrays))]
        pairs = zip(signal_Tn, [None] * len(signal_Tn) if experts_TE is None else experts_TE, strict=True)
        return [self.method.select_among(signal, arrays, residency, experts) for signal, experts in pairs]

    def check_many(self) -> None:
        """Refuses to choose for several tokens of a sequence at once if one changes what the next one uses. Raises
        `ColdpressError` if choosing one token after the other could give other units."""
        if self.sees_others:
            raise ColdpressError(
                f"{self._title} uses what is in DRAM, and what earlier tokens read changes that, so that tokens "
                "decoded together would be computed with other units than one after the other; decode one at a time, "
                "or choose use_read_units=false, and another selector, another routing or the cache 'static'"
            )

    def check_batch(self) -> None:
        """Refuses to choose for several sequences at once if the choice depends on what is in DRAM: their keys and
        values take room from pinned units. Raises `ColdpressError` if a sequence alone could get other units."""
        if self.sees_residency:
            raise ColdpressError(
                f"{self._title} uses what is in DRAM, so that sequences decoded together would be "
                "computed with other units than alone; decode one at a time, or choose a selector, or "
                "use_read_units=false, or the routing top_k, that does not"
            )


def union(chosen: Sequence[np.ndarray], num_units: int) -> tuple[np.ndarray, np.ndarray | None]:
    """Merges the units of several tokens, int32 ascending each; ids are below `num_units`.

    Returns the ids that at least one token uses, int32 ascending; and which token uses which unit, bool [T, num_units],
    or None for a single token, which uses all of them.
    """
    if len(chosen) == 1:
        return chosen[0], None
    used_TU = np.zeros((len(chosen), num_units), bool)
    for used, ids in zip(used_TU, chosen, strict=True):
        used[ids] = True
    return np.flatnonzero(used_TU.any(axis=0)).astype(np.int32), used_TU


def _predictor_arrays(artifact: Artifact, layer: int) -> dict[str, np.ndarray]:
    """Returns the arrays of a layer's predictor; none for a layer without one, whose tokens use all units."""
    found = artifact.predictors.get(layer)
    return {} if found is None else {name: np.asarray(value) for name, value in vars(found).items()}
