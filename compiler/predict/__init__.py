"""Trains low-rank activation predictors (LLM in a flash 3.1, B), each layer's of the size it needs.

Reads a layer's MLP inputs and activation bits; returns fc1, fc2 and a threshold, with recall, precision and predicted
density on tokens that neither training nor any choice has seen. All of these are of the weights as they are stored, in
the format that `allocate` chose. A layer all of whose units are used gets no predictor.

Sizes grow from what the layer's sparsity suggests (PowerInfer Fig. 9) until enough active units are found without
predicting too many, or the rank that `allocate` granted is reached. That is a part of PowerInfer 5.1, which also looks
at the skewness of a layer's activations and tunes sizes until the model's perplexity with its predictors is within
0.1 % of that without. Here neither skewness nor perplexity plays a part, and no size is made smaller again.
"""

import logging
import math
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Annotated

import numpy as np
from pydantic import Field

from compiler._io import Workspace, load_arrays
from compiler._shared_settings import SeedSetting
from compiler.activity.counted import counted
from compiler.checkpoint.tensors import read_role
from compiler.cost_model import whole_rank
from schemas.activations import Activations, LayerStatistics
from schemas.base import PositiveCount
from schemas.config import Key
from schemas.errors import ColdpressError
from schemas.families import FamilyName, FormatName
from schemas.model import Model
from schemas.predictors import LayerPredictor, Predictors
from schemas.sparsity import Sparsity

if TYPE_CHECKING:
    import torch

    from compiler.predict import _training as training

LOG = logging.getLogger(__name__)
FAMILY: FamilyName = "neuron"
MIN_TOKENS = 64
RANK_STEP = 8
GROWTH = 1.5


class PredictConfig(SeedSetting):
    """Settings of `predict`."""

    target_recall: Annotated[float, Key()] = Field(
        default=0.97, gt=0, le=1, description="share of the active units that a predictor must find"
    )
    overprediction: Annotated[float, Key()] = Field(
        default=1.75, ge=1, description="predicted over true density up to which a predictor counts as large enough"
    )
    steps: Annotated[PositiveCount, Key("predictor_steps")] = Field(
        default=120, description="updates per rank of a predictor that is tried"
    )
    batch_tokens: Annotated[PositiveCount, Key("predictor_batch_tokens")] = Field(
        default=1024, description="tokens per update of a predictor"
    )
    held_out_share: Annotated[float, Key()] = Field(
        default=0.2,
        gt=0,
        lt=1,
        description="share of the calibration tokens kept for choosing predictors and for judging them",
    )


def run(
    config: PredictConfig,
    model: Model,
    activations: Activations,
    sparsity: Sparsity,
    layers: tuple[int, ...],
    work: Workspace,
    threads: int,
) -> Predictors:
    """Trains the predictors of those of `layers` that get one, `threads` of them at a time with one core each.

    None where the method that `allocate` chose needs none.

    Raises:
        ColdpressError: if bits are missing or of other weights, or tokens are too few.
    """
    format_name = sparsity.predictor_format
    if not sparsity.predictor_rank or format_name is None:
        LOG.info("predict: method %s needs no predictors", sparsity.method)
        return Predictors(weights_sha256=model.weights_sha256, layers=())
    import torch

    if activations.weights_sha256 not in (None, model.weights_sha256):
        raise ColdpressError(
            f"the activations are not those of {model.name}'s weights; "
            "delete recalibrate.json from the build folder and build again"
        )
    entries = {entry.layer: entry for entry in activations.layers}
    before = torch.get_num_threads()

    def layer_predictor(layer: int) -> LayerPredictor:
        torch.set_num_threads(1)  # holds per thread; sums in one order whatever the number of cores
        max_rank = sparsity.predictor_rank[layer]
        return _layer_predictor(config, model, activations, entries[layer], max_rank, format_name, work)

    predicted = [layer for layer in layers if sparsity.predictor_rank[layer]]
    try:
        with ThreadPoolExecutor(threads) as pool:
            return Predictors(weights_sha256=model.weights_sha256, layers=tuple(pool.map(layer_predictor, predicted)))
    finally:
        torch.set_num_threads(before)


def _layer_predictor(
    config: PredictConfig,
    model: Model,
    activations: Activations,
    entry: LayerStatistics,
    max_rank: int,
    format_name: FormatName,
    work: Workspace,
) -> LayerPredictor:
    from compiler.predict import _training as training

    fitted, chosen_by, judged_on = training.split(*_data(activations, entry), config.held_out_share)

    def make() -> dict[str, np.ndarray]:
        weights = _grow(config, model, activations, entry.layer, max_rank, format_name, fitted, chosen_by)
        return training.encode(weights, format_name)

    arrays = work.once(f"layer-{entry.layer}", make)
    weights = training.decode(load_arrays(arrays, "fc1", "fc2"), format_name, model.spec.hidden_size)
    threshold = training.choose_threshold(weights, chosen_by, config.target_recall)
    found = training.quality(weights, threshold, judged_on)
    LOG.info(
        "predict: layer %d, rank %d of at most %d: recall %.3f, precision %.3f, density %.3f (true %.3f)",
        *(entry.layer, len(weights.fc1), max_rank, found.recall, found.precision, found.predicted_density),
        float(judged_on.active.float().mean()),
    )
    return LayerPredictor(
        layer=entry.layer,
        rank=len(weights.fc1),
        format=format_name,
        threshold=threshold,
        arrays=arrays,
        recall=found.recall,
        precision=found.precision,
        predicted_density=found.predicted_density,
    )


def _data(activations: Activations, entry: LayerStatistics) -> tuple[np.ndarray, np.ndarray]:
    """MLP inputs float16 [num_tokens, hidden_size] and packed activation bits."""
    statistics, num_tokens = counted(activations, entry.layer, FAMILY), activations.num_tokens
    if num_tokens < MIN_TOKENS:
        raise ColdpressError(
            f"layer {entry.layer}: {num_tokens} calibration tokens, a predictor needs at least {MIN_TOKENS}; "
            "raise calibration_tokens"
        )
    inputs = load_arrays(entry.inputs, "mlp_inputs")["mlp_inputs"]
    return inputs, load_arrays(statistics.arrays, "bits")["bits"]


def first_rank(density: float, hidden_size: int, max_rank: int, format_name: FormatName) -> int:
    """The size that a layer's sparsity suggests: the sparser, the smaller (PowerInfer Fig. 9).

    It is density times hidden_size. LLM in a flash C.1 takes 128 for the first 28 layers of OPT-6.7B, as this rule does
    at their mean of 3 % (hidden size 4096), but 1024 for the last four, so as to miss less; for the last one, of 5.4 %
    (Table 6), this rule says 224, and `allocate` grants twice that at most.
    """
    return _next_rank(density * hidden_size, max_rank, format_name)


def _next_rank(wanted: float, max_rank: int, format_name: FormatName) -> int:
    """The first size from `wanted` on that is a multiple of RANK_STEP and leaves no group of the format unfilled."""
    return min(max_rank, whole_rank(max(1, -(-round(wanted) // RANK_STEP)) * RANK_STEP, format_name))


def _grow(
    config: PredictConfig,
    model: Model,
    activations: Activations,
    layer: int,
    max_rank: int,
    format_name: FormatName,
    fitted: "training.Part",
    chosen_by: "training.Part",
) -> "training.Weights":
    """The first rank that does not predict too much; each one is trained from its own best start."""
    import torch

    from compiler.predict import _training as training

    dtype = torch.bfloat16 if activations.compute_dtype == "bfloat16" else torch.float32
    gate = _gate(model, activations.exact_zeros, layer, config.seed)
    directions = training.main_directions(fitted, gate, max_rank)
    density = float(chosen_by.active.float().mean())
    limit = config.overprediction * density
    rank = first_rank(density, fitted.inputs.shape[1], max_rank, format_name)
    while True:
        # no time is spent on a rank that will not do, unless there is no larger one
        hopeless = limit / training.REST_GAIN if rank < max_rank else math.inf
        start = training.initial(rank, directions, fitted, gate)
        weights = training.train(
            start,
            fitted,
            chosen_by,
            config.steps,
            config.batch_tokens,
            config.target_recall,
            config.seed + layer,
            format_name,
            dtype,
            hopeless,
        )
        threshold = training.choose_threshold(weights, chosen_by, config.target_recall)
        predicted = training.quality(weights, threshold, chosen_by).predicted_density
        if rank >= max_rank or predicted <= limit:
            return weights
        excess = predicted * (training.REST_GAIN if predicted > hopeless else 1) / max(limit, 1e-9)
        rank = _next_rank(rank * max(GROWTH, excess), max_rank, format_name)


def _gate(model: Model, exact_zeros: bool, layer: int, seed: int) -> "torch.Tensor":
    """The matrix whose output's sign is the activity, float32 [intermediate_size, hidden_size]; else a random one."""
    import torch

    from compiler.predict import _training as training

    spec = model.spec
    if not exact_zeros:
        return training.random_gate(spec.intermediate_size, spec.hidden_size, seed + layer)
    role = "gate_proj" if spec.gated_mlp else "up_proj"
    return torch.tensor(read_role(model, f"layers.{layer}.{role}.weight"))
