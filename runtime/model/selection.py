"""The selector of a run: one method for all layers and families, checked against what the artifact can give it.

Reads what the method declares (runtime/sparsity/<method>.py: FAMILIES, NEEDS_PREDICTORS, NEEDS_EXACT_ZEROS) and the
plan's densities. `dense` runs any artifact; another method runs those that were laid out for it.
"""

from types import ModuleType
from typing import Any

import numpy as np

from runtime import _plugins
from runtime.artifact.reader import Artifact
from schemas.errors import ColdpressError, UnknownNameError
from schemas.families import FamilyName
from schemas.layout import Plan
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
    foreign = [family for family in families if family not in method.FAMILIES]
    if foreign:
        return f"cannot choose units of the family {foreign[0]}, which this artifact keeps on flash"
    if method.NEEDS_EXACT_ZEROS and manifest.model.hidden_act != "relu":
        return f"needs exact zeros, but the model's activation is {manifest.model.hidden_act}"
    if method.NEEDS_PREDICTORS and not manifest.predictors:
        return "needs predictors, and this artifact has none"
    return None


class Selection:
    """A method with its parameters for every section of an artifact."""

    def __init__(self, name: str, artifact: Artifact, plan: Plan) -> None:
        """Fits the method to the plan's densities.

        Raises:
            ColdpressError: as `check_selector`.
        """
        check_selector(name, artifact.manifest)
        self.name = name
        self._method = _plugins.load(PACKAGE, name)
        self._parameters: dict[tuple[int, FamilyName], Any] = {}
        for part, section in zip(plan.sections, artifact.manifest.flash.sections, strict=True):
            arrays = _predictor_arrays(artifact, part.layer) if self._method.NEEDS_PREDICTORS else {}
            fitted = self._method.fit(section.num_units, part.density, arrays)
            self._parameters[part.layer, part.family] = fitted

    def select(self, layer: int, family: FamilyName, signal: np.ndarray, cached: np.ndarray) -> np.ndarray:
        """Ids to use for `signal` float32 [n], int32 ascending; `cached` bool [num_units] says what is in memory."""
        return self._method.select(signal, self._parameters[layer, family], cached)


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
