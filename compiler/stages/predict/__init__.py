"""predict: trains low-rank activation predictors of several sizes for each layer (LLM in a flash 3.1, B; PowerInfer
5.1).

Figures are for the weights as stored, in the format that `allocate` chose, on tokens that neither training nor any
choice has seen. A layer that uses all its units gets no predictor. In a mixture of experts a layer has one predictor
for all experts, which scores the units of a token's own experts.

Sizes lie around the size that the layer's sparsity and the skewness of its activations suggest (PowerInfer Fig. 9).
Training ends at a predictor that reaches the target recall without predicting too much, when larger ones find no more,
or at the rank that `allocate` allows. The model's perplexity decides which size a layer gets (compiler/stages/size).
PowerInfer trains one size, measures the perplexity and trains the next; here all sizes are trained before any is
chosen, so that layers train independently.
"""

import functools
import logging
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
from pydantic import Field

from coldpress.compiler.activity.packed_bits import counted
from coldpress.compiler.activity.routing import router_logits, router_of
from coldpress.compiler.checkpoint.tensors import read_role
from coldpress.compiler.cost_model import predictor_bytes, whole_rank
from coldpress.compiler.io import Workspace, load_arrays
from coldpress.compiler.shared_settings import OVERPREDICTION, SeedSetting
from coldpress.schemas.activations import Activations, LayerStatistics
from coldpress.schemas.base import PositiveCount
from coldpress.schemas.errors import ColdpressError
from coldpress.schemas.families import WHOLE_MLP, FamilyName, FormatName, num_units
from coldpress.schemas.model import Model, matrices
from coldpress.schemas.predictors import Point, PredictorSize, TrainedLayer, TrainedPredictors
from coldpress.schemas.preflight import StageNeeds
from coldpress.schemas.sparsity import Sparsity

if TYPE_CHECKING:
    import torch

    from coldpress.compiler.activity.predictor_network import NetworkWeights
    from coldpress.compiler.needs import Build

LOG = logging.getLogger(__name__)
MIN_TOKENS = 64
RANK_STEP = 8
LOWEST = 0.3
"""The first rank, as a share of the expected rank."""
LEAST_GAIN, PATIENCE = 0.005, 2
"""Training also ends after PATIENCE sizes in a row whose recall rises by less than LEAST_GAIN."""
LEAST_DIRECTIONS = 256
"""Fewest starting directions that are computed at once."""
PREDICTOR_STATE_BYTES = 20
"""Bytes per parameter of a predictor: weights, gradients, two moments and the best weights so far, in float32."""
SAFER_RECALLS = (0.97, 0.99, 0.997, 0.999)
"""Recalls of a predictor's further thresholds, whatever density they predict."""
STEPS, BATCH_TOKENS = 120, 256
"""Updates of each predictor that is trained, and the tokens of each."""
TARGET_RECALL = 0.99
"""Share of the active units that the largest predictor tried should find."""
HELD_OUT_SHARE = 0.2
"""Share of the calibration tokens kept for choosing predictors and for judging them."""


class PredictConfig(SeedSetting):
    """Settings of `predict`."""

    predictor_steps: PositiveCount = Field(default=STEPS, description="updates of each predictor that is trained")


def run(
    config: PredictConfig,
    model: Model,
    activations: Activations,
    sparsity: Sparsity,
    layers: tuple[int, ...],
    work: Workspace,
    threads: int,
) -> TrainedPredictors:
    """Trains the predictors of those `layers` that get one, `threads` layers at a time with one core each; none if the
    method that `allocate` chose needs no predictors. Raises ColdpressError if bits are missing or belong to other
    weights, or tokens are too few."""
    if not sparsity.predictor_rank:
        LOG.info("predict: method %s needs no predictors", sparsity.method)
        return TrainedPredictors(weights_sha256=model.weights_sha256, layers=())
    import torch

    if activations.weights_sha256 not in (None, model.weights_sha256):
        raise ColdpressError(
            f"the activations are not those of {model.name}'s weights; "
            "delete recalibrate.json from the build folder and build again"
        )
    entries = {entry.layer: entry for entry in activations.layers}
    before = torch.get_num_threads()

    def train(layer: int) -> TrainedLayer:
        torch.set_num_threads(1)  # set per thread, so that sums have one order on any number of cores
        return _trained(config, model, activations, sparsity, entries[layer], work)

    predicted = [layer for layer in layers if sparsity.predictor_rank[layer]]
    try:
        with ThreadPoolExecutor(threads) as pool:
            return TrainedPredictors(weights_sha256=model.weights_sha256, layers=tuple(pool.map(train, predicted)))
    finally:
        torch.set_num_threads(before)


def needs(build: "Build") -> StageNeeds:
    spec, tokens = build.model.spec, build.num_tokens
    labels = spec.intermediate_size * (spec.num_experts_per_tok + (2 if spec.is_mixture else 1))
    data = tokens * (6 * spec.hidden_size + labels) + tokens * num_units(WHOLE_MLP, spec) // 8
    gate = 2 * 4 * spec.hidden_size * num_units(WHOLE_MLP, spec)
    batch = min(BATCH_TOKENS, tokens)
    scores = 4 * 4 * max(batch, tokens // 10) * spec.intermediate_size * spec.num_experts_per_tok
    ram_bytes = build.TORCH_BYTES + data + gate + PREDICTOR_STATE_BYTES * build.largest_predictor + scores
    return StageNeeds(stage="predict", ram_bytes=ram_bytes, disk_bytes=build.ALL_SIZES_SHARE * build.predictor_bytes)


def _trained(
    config: PredictConfig,
    model: Model,
    activations: Activations,
    sparsity: Sparsity,
    entry: LayerStatistics,
    work: Workspace,
) -> TrainedLayer:
    """Trains size after size, until one reaches the target within its limit, or larger ones find no more."""
    layer, largest, format_name = entry.layer, sparsity.predictor_rank[entry.layer], sparsity.predictor_format
    if format_name is None:
        raise ColdpressError("the sparsity names no format of its predictors; delete allocate.json and build again")
    (family,) = sparsity.families
    trainer = Trainer(config, model, activations, entry, family, format_name, work)
    expected = trainer.fitted.density / trainer.fitted.used_share * (1 - trainer.skewness) * model.spec.hidden_size
    sizes: list[PredictorSize] = []
    best, idle = 0.0, 0
    for rank in ranks_tried(expected, largest, format_name):
        size, enough = trainer.size(rank)
        sizes.append(size)
        first = size.points[0]
        LOG.info(
            "predict: layer %d, rank %d of at most %d: recall %.3f, precision %.3f, density %.3f",
            *(layer, rank, largest, first.recall, first.precision, first.predicted_density),
        )
        best, idle = max(best, first.recall), 0 if first.recall > best + LEAST_GAIN else idle + 1
        if enough or idle == PATIENCE:
            break
    return TrainedLayer(
        layer=layer,
        format=format_name,
        density=trainer.judged_on.density,
        skewness=trainer.skewness,
        suggested_rank=min((size.rank for size in sizes), key=lambda rank: abs(rank - expected)),
        sizes=tuple(sizes),
    )


class Trainer:
    def __init__(
        self,
        config: PredictConfig,
        model: Model,
        activations: Activations,
        entry: LayerStatistics,
        family: FamilyName,
        format_name: FormatName,
        work: Workspace,
    ) -> None:
        import torch

        from coldpress.compiler.stages.predict import training as training

        inputs, bits = _data(activations, entry, family)
        experts = _experts(model, entry.layer, inputs, bits) if model.spec.is_mixture else None
        parts = training.split(inputs, bits, HELD_OUT_SHARE, experts)
        self.fitted, self.chosen_by, self.judged_on = parts
        self._training, self.skewness = training, training.skewness(self.fitted)
        self._config, self._model, self._layer = config, model, entry.layer
        self._exact_zeros, self._format, self._work = activations.exact_zeros, format_name, work
        self._num_units = num_units(family, model.spec)
        self._found: tuple[int, torch.Tensor] | None = None
        self._dtype = torch.bfloat16 if activations.compute_dtype == "bfloat16" else torch.float32

    def size(self, rank: int) -> tuple[PredictorSize, bool]:
        """Returns (a predictor of a rank, whether it reaches the target within its limit of predicted units)."""
        from coldpress.compiler.activity.predictor_network import decode, encode

        key = f"layer-{self._layer}.rank-{rank}"
        arrays = self._work.once(key, lambda: encode(self._train(rank), self._format))
        spec = self._model.spec
        weights = decode(load_arrays(arrays, "fc1", "fc2"), self._format, spec.hidden_size)
        points, enough = self._points(weights)
        nbytes = predictor_bytes(spec, rank, self._format)
        return PredictorSize(rank=rank, arrays=arrays, nbytes=nbytes, points=points), enough

    @functools.cached_property
    def _gate(self) -> "torch.Tensor":
        """The matrix whose output's sign is the activity, float32 [num_units, hidden_size]; else a random one."""
        import torch

        spec = self._model.spec
        if not self._exact_zeros:
            seed = self._config.seed + self._layer
            return self._training.random_gate(self._num_units, spec.hidden_size, seed)
        names = matrices("gate_proj" if spec.gated_mlp else "up_proj", spec)
        read = (read_role(self._model, f"layers.{self._layer}.{name}.weight") for name in names)
        parts = [torch.from_numpy(matrix).float() for matrix in read]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _train(self, rank: int) -> "NetworkWeights":
        # a power of two, shared by several ranks: all directions take minutes at a hidden size of 4096
        directions = self._directions(max(LEAST_DIRECTIONS, 1 << (rank - 1).bit_length()))
        return self._training.train(
            self._training.initial(rank, directions, self.fitted, self._gate),
            self.fitted,
            self.chosen_by,
            self._config.predictor_steps,
            BATCH_TOKENS,
            TARGET_RECALL,
            self._config.seed + self._layer,
            self._format,
            self._dtype,
        )

    def _directions(self, count: int) -> "torch.Tensor":
        if self._found is None or self._found[0] != count:
            self._found = count, self._training.main_directions(self.fitted, self._gate, count)
        return self._found[1]

    def _points(self, weights: "NetworkWeights") -> tuple[tuple[Point, ...], bool]:
        """Returns thresholds and their quality; the first has the target recall, or less if that predicts too much."""
        found = self._training.choose_threshold(weights, self.chosen_by, TARGET_RECALL)
        density = self.chosen_by.density
        limit = self._training.limit_threshold(weights, self.chosen_by, OVERPREDICTION * density)
        first = max(found, limit)
        safer = (self._training.choose_threshold(weights, self.chosen_by, recall) for recall in SAFER_RECALLS)
        thresholds = sorted({first, *(min(first, threshold) for threshold in safer)}, reverse=True)
        points = tuple(self._training.quality(weights, threshold, self.judged_on) for threshold in thresholds)
        return points, found >= limit


def _data(activations: Activations, entry: LayerStatistics, family: FamilyName) -> tuple[np.ndarray, np.ndarray]:
    """Returns MLP inputs float16 [num_tokens, hidden_size], and packed bits uint8 [num_units, ceil(num_tokens / 8)]."""
    statistics, num_tokens = counted(activations, entry.layer, family), activations.num_tokens
    if num_tokens < MIN_TOKENS:
        raise ColdpressError(
            f"layer {entry.layer}: {num_tokens} calibration tokens, a predictor needs at least {MIN_TOKENS}; "
            "raise calibration_tokens"
        )
    inputs = load_arrays(entry.inputs, "mlp_inputs")["mlp_inputs"]
    return inputs, load_arrays(statistics.arrays, "bits")["bits"]


def _experts(model: Model, layer: int, inputs: np.ndarray, bits: np.ndarray) -> np.ndarray:
    """Returns the experts that each token uses, bool [num_tokens, num_experts]: those with an active unit, then the
    router's best. Activity alone is not enough: an expert with a small weight may have no unit among the largest. Nor
    are the inputs alone: they are stored in fp16, which cannot separate two nearly equal logits."""
    spec = model.spec
    any_active = np.bitwise_or.reduce(bits.reshape(spec.num_experts, spec.intermediate_size, -1), axis=1)
    known = np.unpackbits(any_active, axis=1, count=len(inputs), bitorder="little").T.astype(bool)
    router = router_of(model, layer)
    scores = router.scores(router_logits(model, layer, inputs.astype(np.float32)))
    return router.choose(np.where(known, np.float32(np.inf), scores))


def ranks_tried(expected: float, largest: int, format_name: FormatName) -> tuple[int, ...]:
    """Returns the ranks to try: 8, 12, 16, 24, … rounded up to whole groups of the format, from well below `expected`
    to `largest`; and the smallest rank, which fits wherever `allocate` permits predictors.

    The expected rank is density times hidden_size, less what skewness saves. LLM in a flash C.1 takes 128 for the first
    28 layers of OPT-6.7B, as this rule does at their mean of 3 % (hidden size 4096), but 1024 for the last four; the
    last of them has 5.4 % (Table 6), and this rule expects 220. Larger ranks are tried for every layer.
    """
    steps = [size for power in range(3, largest.bit_length() + 1) for size in (1 << power, 3 << (power - 1))]
    every = [min(largest, whole_rank(-(-size // RANK_STEP) * RANK_STEP, format_name)) for size in (*steps, largest)]
    found = list(dict.fromkeys(every))
    first = next(place for place, rank in enumerate(found) if rank >= min(largest, LOWEST * expected))
    return tuple(dict.fromkeys((found[0], *found[first:])))
