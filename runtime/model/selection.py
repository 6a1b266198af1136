"""The selector of a run: one method for all layers and families, checked against what the artifact can give it.

Reads what the method declares (runtime/sparsity: CHOOSES, NEEDS_PREDICTORS, NEEDS_EXACT_ZEROS) and the arrays that the
artifact keeps for the plan. `dense` runs any artifact; another method runs those that were laid out for it.
"""

from types import ModuleType

import numpy as np

from runtime import _plugins
from runtime.artifact.reader import Artifact
from runtime.sparsity import Residency
from schemas.errors import ColdpressError, UnknownNameError
from schemas.layout import PartPlan, Plan, placed_parts
from schemas.manifest import Manifest

PACKAGE = "runtime.sparsity"


def check_selector(name: str, manifest: Manifest) -> None:
    """Refuses a method that the artifact cannot serve.

    Raises:
        UnknownNameError: if there is no such method.
        ColdpressError: saying what the method lacks.
    """
    known = _plugins.names(PACKAGE)
    if name not in known:
        raise UnknownNameError("selector", name, known)
    lacks = _lacks(_plugins.load(PACKAGE, name), manifest)
    if lacks:
        usable = [other for other in known if not _lacks(_plugins.load(PACKAGE, other), manifest)]
        raise ColdpressError(f"the selector '{name}' {lacks}; choose one of: {', '.join(usable)}")


def _lacks(method: ModuleType, manifest: Manifest) -> str | None:
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
    """A method with its arrays for every layer and family of an artifact."""

    def __init__(self, artifact: Artifact, plan: Plan) -> None:
        """Takes what was fitted for the plan; a method that is not the artifact's own is fitted to the densities alone.

        Raises:
            ColdpressError: as `check_selector`, or if the method cannot be fitted without calibration.
        """
        check_selector(plan.method, artifact.manifest)
        self._method = _plugins.load(PACKAGE, plan.method)
        self._arrays = {
            (part.layer, part.family): self._fitted(artifact, plan, part, section.num_units)
            for part, section in placed_parts(plan, artifact.manifest.flash.sections)
        }

    def _fitted(self, artifact: Artifact, plan: Plan, part: PartPlan, num_units: int) -> dict[str, np.ndarray]:
        kept = artifact.selector_arrays(plan, part.layer, part.family)
        if kept is None:
            options = _plugins.options_of(self._method, plan.options)
            kept = self._method.fit(num_units, part.density, {}, options)
        return kept | (_predictor_arrays(artifact, part.layer) if self._method.NEEDS_PREDICTORS else {})

    def select(self, layer: int, family: str, signal: np.ndarray, residency: Residency) -> np.ndarray:
        """Ids to use for `signal` float32 [n], int32 ascending."""
        return self._method.select(signal, self._arrays[layer, family], residency)


def _predictor_arrays(artifact: Artifact, layer: int) -> dict[str, np.ndarray]:
    """Nothing for a layer without a predictor."""
    found = artifact.predictors.get(layer)
    if found is None:
        return {}
    return {
        "fc1": found.fc1,
        "fc2": found.fc2,
        "format": np.array(found.format),
        "threshold": np.array(found.threshold),
    }
