"""Gram matrices of the inputs of a model's matrices on calibration text, by the build's own stage."""

import numpy as np

from benchmarks.shared.cases import Case
from coldpress.compiler.io import Workspace, load_arrays
from coldpress.compiler.stages import gram
from coldpress.compiler.stages.gram import GramConfig
from coldpress.schemas.families import WHOLE_MLP
from coldpress.schemas.gram import INPUT_OF, GramMatrices
from coldpress.schemas.model import MLP_ROLES
from tests.support.statistics import sparsity_of


def gram_of(case: Case) -> GramMatrices:
    """Returns the Gram matrices of the dense model's inputs."""
    whole = sparsity_of("dense", {WHOLE_MLP: (1.0,) * case.model.spec.num_hidden_layers})
    work = Workspace(case.folder / "gram", "benchmark")
    return gram.run(GramConfig(), case.model, case.corpus(), whole, work, case.stream.threads)


def grams_of(case: Case) -> dict[str, np.ndarray]:
    """Returns the Gram matrix of each MLP matrix's inputs in the dense model, float32 [inputs, inputs], by role."""
    found: dict[str, np.ndarray] = {}
    for layer in gram_of(case).layers:
        arrays = load_arrays(layer.arrays)
        found |= {f"layers.{layer.layer}.{role}.weight": arrays[INPUT_OF[role]] for role in MLP_ROLES}
    return found
