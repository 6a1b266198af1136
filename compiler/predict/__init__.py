"""Trains low-rank activation predictors, each layer's of the size it needs (PowerInfer 5.1, LLM in a flash 3.1, B).

Reads a layer's MLP inputs and activation bits; returns fc1, fc2 and a threshold, with recall, precision and predicted
density on tokens that neither training nor any choice has seen. Sizes grow from what the layer's sparsity suggests
(PowerInfer Fig. 9) until enough active units are found without predicting too many, or the rank that `allocate` granted
is reached.
"""

import logging
import math
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
from pydantic import Field

from compiler._io import Workspace, load_arrays
from compiler.checkpoint.tensors import read_role
from schemas.activations import Activations, LayerStatistics
from schemas.base import PositiveCount, Record
from schemas.errors import ColdpressError
from schemas.families import FamilyName
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


class PredictConfig(Record):
    """Settings of `predict`."""

    target_recall: float = Field(default=0.97, gt=0, le=1, description="share of the active units that must be found")
    overprediction: float = Field(
        default=1.75, ge=1, description="predicted over true density up to which a predictor counts as large enough"
    )
    steps: PositiveCount = Field(default=120, description="updates per rank that is tried")
    batch_tokens: PositiveCount = Field(default=1024, description="tokens per update")
    held_out_share: float = Field(
        default=0.2, gt=0, lt=1, description="share of the calibration tokens kept for choosing and for judging"
    )
    seed: int = Field(default=0, ge=0, description="seed; each layer derives its own")


def run(
    config: PredictConfig,
    model: Model,
    activations: Activations,
    sparsity: Sparsity,
    layers: tuple[int, ...],
    work: Workspace,
    threads: int,
) -> Predictors:
    """Trains the predictors of `layers`, `threads` of them at a time with one core each.

    Raises:
        ColdpressError: if the method has no predictors, bits are missing or of other weights, or tokens are too few.
    """
    import torch

    if not sparsity.predictor_rank:
        raise ColdpressError(f"method {sparsity.method} has no predictors; build with method=predictor")
    if activations.weights_sha256 not in (None, model.weights_sha256):
        raise ColdpressError(f"the activations are not those of {model.name}'s weights; run recalibrate again")
    entries = {entry.layer: entry for entry in activations.layers}
    before = torch.get_num_threads()

    def layer_predictor(layer: int) -> LayerPredictor:
        torch.set_num_threads(1)  # holds per thread; sums in one order whatever the number of cores
        return _layer_predictor(config, model, activations, entries[layer], sparsity.predictor_rank[layer], work)

    try:
        with ThreadPoolExecutor(threads) as pool:
            return Predictors(weights_sha256=model.weights_sha256, layers=tuple(pool.map(layer_predictor, layers)))
    finally:
        torch.set_num_threads(before)


def _layer_predictor(
    config: PredictConfig,
    model: Model,
    activations: Activations,
    entry: LayerStatistics,
    max_rank: int,
    work: Workspace,
) -> LayerPredictor:
    import torch

    from compiler.predict import _training as training

    fitted, chosen_by, judged_on = training.split(*_data(entry, activations.num_tokens), config.held_out_share)

    def make() -> dict[str, np.ndarray]:
        weights = _grow(config, model, activations, entry.layer, max_rank, fitted, chosen_by)
        return {"fc1": weights.fc1.half().numpy(), "fc2": weights.fc2.half().numpy()}

    arrays = work.once(f"layer-{entry.layer}", make)
    stored = load_arrays(arrays, "fc1", "fc2")
    weights = training.Weights(*(torch.tensor(stored[name].astype(np.float32)) for name in ("fc1", "fc2")))
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
        threshold=threshold,
        arrays=arrays,
        recall=found.recall,
        precision=found.precision,
        predicted_density=found.predicted_density,
    )


def _data(entry: LayerStatistics, num_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """MLP inputs float16 [num_tokens, hidden_size] and packed activation bits."""
    statistics = next((found for found in entry.families if found.family == FAMILY), None)
    if statistics is None or statistics.density is None:
        raise ColdpressError(
            f"layer {entry.layer}: no activation bits of family {FAMILY}; "
            "run recalibrate at the densities that allocate chose"
        )
    if num_tokens < MIN_TOKENS:
        raise ColdpressError(
            f"layer {entry.layer}: {num_tokens} calibration tokens, a predictor needs at least {MIN_TOKENS}; "
            "raise calibration_tokens"
        )
    inputs = load_arrays(entry.inputs, "mlp_inputs")["mlp_inputs"]
    return inputs, load_arrays(statistics.arrays, "bits")["bits"]


def first_rank(density: float, hidden_size: int, max_rank: int) -> int:
    """The size that a layer's sparsity suggests: the sparser, the smaller (PowerInfer Fig. 9).

    LLM in a flash B.3 uses 128 for OPT-6.7B's layers of 3 % (hidden size 4096), 1024 for its densest: density times
    hidden_size is of that order.
    """
    return min(max_rank, max(RANK_STEP, -(-round(density * hidden_size) // RANK_STEP) * RANK_STEP))


def _grow(
    config: PredictConfig,
    model: Model,
    activations: Activations,
    layer: int,
    max_rank: int,
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
    rank = first_rank(density, fitted.inputs.shape[1], max_rank)
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
            dtype,
            hopeless,
        )
        threshold = training.choose_threshold(weights, chosen_by, config.target_recall)
        predicted = training.quality(weights, threshold, chosen_by).predicted_density
        if rank >= max_rank or predicted <= limit:
            return weights
        excess = predicted * (training.REST_GAIN if predicted > hopeless else 1) / max(limit, 1e-9)
        rank = min(max_rank, -(-round(rank * max(GROWTH, excess)) // RANK_STEP) * RANK_STEP)


def _gate(model: Model, exact_zeros: bool, layer: int, seed: int) -> "torch.Tensor":
    """The matrix whose output's sign is the activity, float32 [intermediate_size, hidden_size]; else a random one."""
    import torch

    from compiler.predict import _training as training

    spec = model.spec
    if not exact_zeros:
        return training.random_gate(spec.intermediate_size, spec.hidden_size, seed + layer)
    role = "gate_proj" if spec.gated_mlp else "up_proj"
    return torch.tensor(read_role(model, f"layers.{layer}.{role}.weight"))
