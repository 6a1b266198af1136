"""calibrate: one pass over the calibration text that counts which units fire (PowerInfer 6.1, Ripple 4.1).

Streams the model layer by layer (compiler/activity/statistics.py) for the families of the method. A ReLU model's zeros
are exact, so its activity is known now; for the others only magnitudes are, until `allocate` has chosen densities and
`recalibrate` counts again.
"""

from pydantic import Field

from compiler._io import Workspace
from compiler.activity.calibration_pass import PassConfig, count_activity
from compiler.activity.layer_counts import Activity
from compiler.activity.shards import merge
from runtime._plugins import load
from schemas.activations import Activations
from schemas.corpus import Corpus
from schemas.errors import ColdpressError
from schemas.families import Method, families_of
from schemas.model import Model


class CalibrateConfig(PassConfig):
    """Settings of `calibrate`."""

    method: Method = Field(description="dense, relu, predictor or topk: decides the families that are counted")


def run(
    config: CalibrateConfig,
    model: Model,
    corpus: Corpus,
    work: Workspace,
    threads: int,
    shards: tuple[Activations, ...] | None = None,
) -> Activations:
    """Statistics of every layer; activity only where it is exact zeros that make a unit inactive.

    With `shards` nothing is computed: they are put together.

    Raises:
        ColdpressError: if the method needs a ReLU model and this is none, or the shards are not those of the text.
    """
    if shards:
        return merge(shards, work)
    relu = model.spec.hidden_act == "relu"
    if load("runtime.sparsity", config.method).NEEDS_EXACT_ZEROS and not relu:
        raise ColdpressError(
            f"method {config.method} needs exact zeros, but the activation of {model.name} is {model.spec.hidden_act}; "
            "choose topk or predictor"
        )
    families = families_of(config.method, model.spec)
    activity = Activity(exact_zeros=relu and "mlp_in" not in families)
    return count_activity(config, model, corpus, families, activity, work, threads)
