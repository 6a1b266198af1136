"""Limits the sizes of predictors, before any is trained: `size` and `predict` stay within them."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from coldpress.compiler.cost_model import predictor_bytes, whole_rank
from coldpress.compiler.stages.allocate._config import AllocateConfig
from coldpress.runtime.plugins import load
from coldpress.runtime.sparsity import Selector
from coldpress.schemas.errors import ColdpressError
from coldpress.schemas.families import FamilyName, used_share
from coldpress.schemas.model import Model

MIN_RANK = 8
"""Smallest rank; raised to fill a group of the predictors' format: 32 in 8 bits."""
PREDICTOR_FREE_SHARE = 0.6
"""Predictors take at most this share of the DRAM that could hold units instead."""


@dataclass(frozen=True)
class PredictorSizes:
    largest: tuple[int, ...]
    """Highest rank of each layer's predictor; 0 if it has none."""
    limit_bytes: int
    expected_bytes: int


def predictor_sizes(
    config: AllocateConfig, model: Model, densities: dict[FamilyName, tuple[float, ...]], free_bytes: int
) -> PredictorSizes:
    """Returns the limit and the expected bytes of predictors; all 0 if the method needs none.

    The expected size follows from each layer's density (PowerInfer Fig. 9), as far as all fit. One predictor may take
    all bytes that the others' smallest sizes leave, but never more parameters than the matrix whose sign it predicts:
    that matrix would be the better predictor. A layer that uses all its units has none. In a mixture of experts all
    counts are for the units that one token uses.

    Raises:
        ColdpressError: if every unit of every layer is used.
    """
    if not load("coldpress.runtime.sparsity", Selector, config.method).NEEDS_PREDICTORS:
        return PredictorSizes((), 0, 0)
    spec, least = model.spec, whole_rank(MIN_RANK, config.predictor_format)
    ((family, shares),) = densities.items()
    per_layer = [share / used_share(family, spec) for share in shares]
    if min(per_layer) >= 1:
        raise ColdpressError(
            f"method {config.method} has nothing to predict: at a density of 1 every unit of {model.name} is used; use "
            "method=dense, or a lower density or dram_budget"
        )

    def stored(ranks: Iterable[int]) -> int:
        return sum(predictor_bytes(spec, rank, config.predictor_format) for rank in ranks)

    def wanted(density: float) -> int:
        return max(least, whole_rank(math.ceil(density * spec.hidden_size), config.predictor_format))

    predicted = sum(density < 1 for density in per_layer)
    smallest = stored([least] * predicted)
    limit = max(smallest, int(PREDICTOR_FREE_SHARE * free_bytes))
    alone = limit - stored([least] * (predicted - 1))
    inner = spec.intermediate_size * spec.num_experts_per_tok
    parity = spec.hidden_size * inner // (spec.hidden_size + inner)
    largest = least
    while largest + least <= parity and stored([largest + least]) <= alone:
        largest += least
    expected = min(limit, stored(min(largest, wanted(density)) for density in per_layer if density < 1))
    return PredictorSizes(tuple(largest if density < 1 else 0 for density in per_layer), limit, expected)
