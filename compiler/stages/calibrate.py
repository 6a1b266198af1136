"""calibrate: one pass over the calibration text that counts which units fire (PowerInfer 6.1, Ripple 4.1).

Streams the model layer by layer (compiler/activity/statistics.py) for the families of the method. A ReLU model's zeros
are exact, so its activity is known now; for the others only magnitudes are, until `allocate` has chosen densities and
`recalibrate` counts again.
"""

from coldpress.compiler.activity.calibration_pass import PassConfig, count_activity
from coldpress.compiler.activity.layer_counts import Activity, exact_families
from coldpress.compiler.activity.shards import merge
from coldpress.compiler.candidates import families_for, methods_for
from coldpress.compiler.io import Workspace
from coldpress.compiler.shared_settings import MethodSetting
from coldpress.runtime.plugins import load
from coldpress.runtime.sparsity import Selector
from coldpress.schemas.activations import Activations
from coldpress.schemas.corpus import Corpus
from coldpress.schemas.errors import ColdpressError
from coldpress.schemas.model import Model


class CalibrateConfig(MethodSetting, PassConfig):
    """Settings of `calibrate`: the method decides the families that are counted."""


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
    exact = model.spec.exact_zeros
    for method in methods_for(config.method, exact, model.spec.is_mixture):
        if load("coldpress.runtime.sparsity", Selector, method).NEEDS_EXACT_ZEROS and not exact:
            raise ColdpressError(
                f"method {method} needs exact zeros, but the activation of {model.name} is {model.spec.hidden_act}; "
                "choose topk or predictor"
            )
    families = families_for(config.method, config.options, model.spec)
    activity = Activity(exact_families(families, model.spec))
    return count_activity(config, model, corpus, families, activity, work, threads)
