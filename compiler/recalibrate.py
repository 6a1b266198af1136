"""recalibrate: the activity that later stages work from, on the model and at the densities that will run.

Where zeros are exact and the weights are those that `calibrate` saw, or where every unit is used, that is what
`calibrate` found, unchanged. Otherwise the calibration text passes once more: the top units of each family at its
density are the active ones, and each layer sees what the layers before it left (ActiveFlow 4.1, DIP 3.2).
"""

import logging

from pydantic import Field

from compiler._io import Workspace, load_arrays
from compiler.forward import LayerStream
from compiler.statistics import Activity, Densities, collect
from schemas.activations import Activations
from schemas.base import Record
from schemas.corpus import Corpus
from schemas.families import families_of
from schemas.model import Model
from schemas.sparsity import Sparsity

log = logging.getLogger(__name__)


class RecalibrateConfig(Record):
    """Settings of `recalibrate`."""

    device: str = Field(default="cpu", description="torch's name of the device that computes; results differ in bits")


def run(
    config: RecalibrateConfig,
    model: Model,
    corpus: Corpus,
    sparsity: Sparsity,
    activations: Activations,
    work: Workspace,
    threads: int,
) -> Activations:
    """Statistics with activity, or `activations` as they are where they hold already."""
    same_weights = activations.weights_sha256 == model.weights_sha256
    whole = all(share == 1.0 for found in sparsity.densities for share in found.per_layer)
    if same_weights and (activations.exact_zeros or whole):
        log.info("recalibrate: the first statistics hold, nothing is computed again")
        return activations
    densities: Densities = {found.family: found.per_layer for found in sparsity.densities}
    activity = Activity(activations.exact_zeros, None if activations.exact_zeros or whole else densities)
    families = families_of(sparsity.method, model.spec)
    tokens = load_arrays(corpus.split("calibration").arrays, "tokens")["tokens"]
    layers = collect(LayerStream(model, threads, config.device), tokens, families, activity, work)
    return Activations(
        num_tokens=tokens.size,
        exact_zeros=activations.exact_zeros,
        weights_sha256=model.weights_sha256,
        layers=layers,
    )
