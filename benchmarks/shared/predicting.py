"""Trains predictors of a model whose activations are not exact zeros: they aim at the largest neurons of each token."""

from pathlib import Path

from benchmarks.evaluation.evaluate import Sparse
from benchmarks.shared.cases import Case
from coldpress.compiler.activity.calibration_pass import PassConfig, count_activity
from coldpress.compiler.activity.choice import Choice
from coldpress.compiler.activity.layer_counts import ActivityRule
from coldpress.compiler.io import Workspace, load_arrays
from coldpress.compiler.stages.predict import PredictConfig
from coldpress.compiler.stages.predict import run as predict
from coldpress.runtime.plugins import load
from coldpress.runtime.sparsity import Selector
from coldpress.schemas.families import WHOLE_MLP as FAMILY
from coldpress.schemas.families import FormatName, num_units, used_share
from coldpress.schemas.model import ModelSpec
from tests.support.statistics import sparsity_of

FORMAT: FormatName = "int8_group32"


def aiming(spec: ModelSpec, density: float, topk_ratio: float = 0.0) -> Choice:
    """Returns the selector, aimed in every layer at `density` of the units that a token may use."""
    selector = load("coldpress.runtime.sparsity", Selector, "predictor")
    share = used_share(FAMILY, spec) * density
    arrays = selector.fit(
        num_units(FAMILY, spec), share, {}, selector.OPTIONS.model_validate({"topk_ratio": topk_ratio})
    )
    return Choice(selector, {(layer, FAMILY): arrays for layer in range(spec.num_hidden_layers)}, spec)


def largest_rank(spec: ModelSpec) -> int:
    """Returns the rank at which a predictor has as many parameters as the matrix whose sign it predicts; in a mixture,
    as the rows of one token's experts."""
    inner = spec.intermediate_size * spec.num_experts_per_tok
    return spec.hidden_size * inner // (spec.hidden_size + inner) // 32 * 32


def predicting(case: Case, density: float, folder: Path) -> Sparse:
    """Returns the largest predictors, trained; each token uses the `density` of its units that they score highest."""
    choice, spec = aiming(case.model.spec, density, topk_ratio=1.0), case.model.spec
    layers = tuple(range(spec.num_hidden_layers))
    activity, work = ActivityRule(frozenset(), choice), Workspace(folder / f"aim-{density}", "benchmark")
    counted = count_activity(PassConfig(), case.model, case.corpus(), (FAMILY,), activity, work, case.stream.threads)
    asked = sparsity_of(
        "predictor",
        {FAMILY: (used_share(FAMILY, spec) * density,) * len(layers)},
        predictor_rank=(largest_rank(spec),) * len(layers),
        predictor_format=FORMAT,
    )
    work = Workspace(folder / f"predict-{density}", "benchmark")
    arrays = dict(choice.arrays)
    for trained_layer in predict(PredictConfig(), case.model, counted, asked, layers, work, 1).layers:
        size = trained_layer.sizes[-1]
        network = {**load_arrays(size.arrays), "format": trained_layer.format, "threshold": size.points[0].threshold}
        arrays[trained_layer.layer, FAMILY] = {**arrays[trained_layer.layer, FAMILY], **network}
    return Sparse(choice.selector, (FAMILY,), arrays)
