"""size: chooses the size of each layer's activation predictor by the model's perplexity (PowerInfer 5.1).

The effect of each layer's predictors on the model, one layer at a time, shows which layers are sensitive. Starting from
the smallest predictors everywhere, each next byte goes to the layer where it saves most. The search walks this path: it
begins where sparsity and skewness suggest, and grows or shrinks the sizes until the perplexity with all predictors is
just within `tolerance` of that without, or the bytes reach the limit of `allocate`. If even the largest sizes are not
enough, all thresholds are lowered; predictors then predict more than OVERPREDICTION.

PowerInfer tunes each layer's hidden size by training anew; it does not say how it treats layers of different
sensitivity or a limit on memory.
"""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from pydantic import Field

from coldpress.compiler.activity.calibration_pass import ComputeConfig, stream_of
from coldpress.compiler.activity.choice import selector_arrays
from coldpress.compiler.io import load_arrays
from coldpress.compiler.search.by_layer import LayerOptions, Sizes, first_that_meets, path_of, scaled_effects
from coldpress.runtime.plugins import load
from coldpress.runtime.sparsity import Selector
from coldpress.schemas.config import Key
from coldpress.schemas.corpus import Corpus
from coldpress.schemas.errors import ColdpressError
from coldpress.schemas.model import Model
from coldpress.schemas.predictors import (
    LayerPredictor,
    Point,
    Predictors,
    PredictorSize,
    SizesTried,
    TrainedLayer,
    TrainedPredictors,
    matrix_shapes,
)
from coldpress.schemas.preflight import StageNeeds
from coldpress.schemas.sparsity import Sparsity

if TYPE_CHECKING:
    from coldpress.compiler.activity.forward import LayerStream
    from coldpress.compiler.needs import Build
    from coldpress.compiler.stages.size.passes import Network

LOG = logging.getLogger(__name__)
EFFECT_TOKENS = 1024
"""Tokens for the effect of each layer's predictors alone: that pass holds hidden states of as many variants as
layers."""
MOST_TOKENS = 4096
"""Most tokens of validation text that predictors' sizes are chosen by."""


class SizeConfig(ComputeConfig):
    """Settings of `size`."""

    predictor_tolerance: Annotated[float, Key()] = Field(
        default=0.001,
        ge=0,
        description="share by which predictors may raise the perplexity of validation text; more for smaller "
        "predictors",
    )


def run(
    config: SizeConfig,
    model: Model,
    corpus: Corpus,
    sparsity: Sparsity,
    trained: tuple[TrainedPredictors, ...],
    threads: int,
) -> Predictors:
    """Chooses one size for each layer; none if no predictors were trained. Raises ColdpressError if predictors belong
    to other weights."""
    for part in trained:
        if part.weights_sha256 != model.weights_sha256:
            raise ColdpressError(
                f"the predictors belong to weights {part.weights_sha256[:12]}, the model has "
                f"{model.weights_sha256[:12]}; delete the folder predict from the build folder and build again"
            )
    by_layer = {one.layer: one for part in trained for one in part.layers}
    if not by_layer:
        LOG.info("size: method %s needs no predictors", sparsity.method)
        return Predictors(weights_sha256=model.weights_sha256, layers=())
    blocks = load_arrays(corpus.split("validation").arrays, "tokens")["tokens"]
    tokens = blocks[: max(1, MOST_TOKENS // blocks.shape[1])]
    stream, _ = stream_of(config, model, threads)
    selector, kept = load("coldpress.runtime.sparsity", Selector, sparsity.method), selector_arrays(sparsity.smallest)
    (family,) = sparsity.families
    num_selected = {layer: int(kept[layer, family]["num_selected"][0]) for layer in by_layer}
    return choose(
        selector, stream, tokens, by_layer, sparsity.predictor_limit_bytes, config.predictor_tolerance, num_selected
    )


def needs(build: "Build") -> StageNeeds:
    spec = build.model.spec
    running = build.running_bytes(8, 8 if spec.is_mixture else 0)
    hidden = 2 * 4 * (spec.num_hidden_layers + 1) * EFFECT_TOKENS * spec.hidden_size
    networks = 4 * build.ALL_SIZES_SHARE * build.largest_predictor
    down = 4 * spec.hidden_size * build.inner_size
    ram_bytes = build.TORCH_BYTES + build.layer_weights_bytes + running + hidden + down + networks
    return StageNeeds(stage="size", ram_bytes=ram_bytes, disk_bytes=0)


def choose(
    selector: Selector[Any],
    stream: "LayerStream",
    tokens: np.ndarray,
    trained: Mapping[int, TrainedLayer],
    limit_bytes: int,
    tolerance: float,
    num_selected: Mapping[int, int],
) -> Predictors:
    """Returns the smallest predictors that keep the perplexity of token ids [num_blocks, T] within `tolerance`; if none
    up to `limit_bytes` do, the largest on the path at the lowest thresholds. `num_selected` is the number of units that
    every token uses in each layer; if it is not 0, thresholds have no effect."""
    from coldpress.compiler.stages.size.passes import effects_alone

    trained = dict(sorted(trained.items()))
    few = tokens[: max(1, EFFECT_TOKENS // tokens.shape[1])]
    errors, changed = effects_alone(selector, stream, few, trained, num_selected)
    options = [
        LayerOptions(
            nbytes=tuple(size.nbytes for size in trained_layer.sizes),
            effect=scaled_effects(changed[layer], errors[layer].tolist()),
        )
        for layer, trained_layer in trained.items()
    ]
    path = path_of(options, limit_bytes)
    trial = Trial(selector, stream, tokens, trained, num_selected, float(stream.token_nll(tokens).mean()))
    levels = max(len(size.points) for one in trained.values() for size in one.sizes)
    levels = 1 if any(num_selected.values()) else levels
    allowed = math.log1p(tolerance)
    level = next((at for at in range(levels) if trial.loss(path[-1], at) <= allowed), levels - 1)
    suggested = sum(size.nbytes for one in trained.values() for size in one.sizes if size.rank == one.suggested_rank)
    start = min(range(len(path)), key=lambda place: abs(trial.nbytes(path[place]) - suggested))
    sizes = path[first_that_meets(lambda place: trial.loss(path[place], level) <= allowed, len(path), start)]
    if trial.loss(sizes, level) > allowed:
        LOG.warning(
            "size: predictors raise the perplexity by %.2f %%, %.2f %% were asked for; more DRAM would help",
            *(100 * math.expm1(trial.loss(sizes, level)), 100 * tolerance),
        )
    return trial.record(sizes, level)


@dataclass
class Trial:
    """Perplexities of the model with all predictors in it; each is measured once."""

    selector: Selector[Any]
    stream: "LayerStream"
    tokens: np.ndarray
    trained: Mapping[int, TrainedLayer]
    num_selected: Mapping[int, int]
    nll_whole: float
    measured: dict[tuple[Sizes, int], tuple[float, dict[int, float]]] = field(default_factory=dict)

    def nbytes(self, sizes: Sizes) -> int:
        return sum(one.sizes[at].nbytes for one, at in zip(self.trained.values(), sizes, strict=True))

    def loss(self, sizes: Sizes, level: int) -> float:
        """Returns the rise in mean negative log likelihood, in nats; `level` is that of thresholds."""
        if (sizes, level) not in self.measured:
            from coldpress.compiler.stages.size.passes import network_of, nll_with

            positions = dict(zip(self.trained, sizes, strict=True))

            def network(layer: int) -> "Network":
                size = self.trained[layer].sizes[positions[layer]]
                shape = self.trained[layer].format, size, _point(size, level), self.stream.spec.hidden_size
                return network_of(self.selector, *shape, self.num_selected[layer])

            nll, cosines = nll_with(self.stream, self.tokens, self.trained, network)
            self.measured[sizes, level] = float(nll.mean()), cosines
            LOG.info(
                "size: %s bytes of predictors at thresholds %d: perplexity %.5f times that of the model without",
                *(f"{self.nbytes(sizes):,}", level, math.exp(float(nll.mean()) - self.nll_whole)),
            )
        return self.measured[sizes, level][0] - self.nll_whole

    def record(self, sizes: Sizes, level: int) -> Predictors:
        _, cosines = self.measured[sizes, level]
        tried = {self.nbytes(other): math.exp(nll) for (other, at), (nll, _) in self.measured.items() if at == level}
        spec = self.stream.spec
        return Predictors(
            weights_sha256=self.stream.model.weights_sha256,
            layers=tuple(
                LayerPredictor(
                    layer=layer,
                    rank=size.rank,
                    format=trained_layer.format,
                    arrays=size.arrays,
                    nbytes=size.nbytes,
                    density=trained_layer.density,
                    num_parameters=sum(map(math.prod, matrix_shapes(spec, size.rank).values())),
                    output_cosine=cosines[layer],
                    **_point(size, level).model_dump(),
                )
                for (layer, trained_layer), at in zip(self.trained.items(), sizes, strict=True)
                for size in [trained_layer.sizes[at]]
            ),
            ppl_without=math.exp(self.nll_whole),
            tried=tuple(SizesTried(predictor_bytes=nbytes, ppl=ppl) for nbytes, ppl in sorted(tried.items())),
        )


def _point(size: PredictorSize, level: int) -> Point:
    return size.points[min(level, len(size.points) - 1)]
