"""calibrate: one pass over the calibration text that counts which units fire (PowerInfer 6.1, Ripple 4.1).

Streams the model layer by layer (compiler/statistics.py) for the families of the method. A ReLU model's zeros are
exact, so its activity is known now; for the others only magnitudes are, until `allocate` has chosen densities and
`recalibrate` counts again.
"""

from pydantic import Field

from compiler._io import Workspace, load_arrays
from compiler.forward import LayerStream
from compiler.statistics import Activity, collect
from runtime._plugins import load
from schemas.activations import Activations
from schemas.base import Record
from schemas.corpus import Corpus
from schemas.errors import ColdpressError
from schemas.families import Method, families_of
from schemas.model import Model


class CalibrateConfig(Record):
    """Settings of `calibrate`."""

    method: Method = Field(description="dense, relu, predictor or topk: decides the families that are counted")
    device: str = Field(default="cpu", description="torch's name of the device that computes; results differ in bits")


def run(config: CalibrateConfig, model: Model, corpus: Corpus, work: Workspace, threads: int) -> Activations:
    """Statistics of every layer; activity only where it is exact zeros that make a unit inactive.

    Raises:
        ColdpressError: if the method needs a ReLU model and this is none.
    """
    relu = model.spec.hidden_act == "relu"
    if load("runtime.sparsity", config.method).NEEDS_EXACT_ZEROS and not relu:
        raise ColdpressError(
            f"method {config.method} needs exact zeros, but the activation of {model.name} is {model.spec.hidden_act}; "
            "choose topk or predictor"
        )
    families = families_of(config.method, model.spec)
    tokens = load_arrays(corpus.split("calibration").arrays, "tokens")["tokens"]
    activity = Activity(exact_zeros=relu and "mlp_in" not in families)
    layers = collect(LayerStream(model, threads, config.device), tokens, families, activity, work)
    return Activations(
        num_tokens=tokens.size,
        exact_zeros=activity.exact_zeros,
        weights_sha256=model.weights_sha256,
        layers=layers,
    )
