"""DIP, dynamic input pruning: the largest |x| of the MLP's inputs, then the largest |GLU~(x)| (DIP Eqs. 7-8).

Reads the MLP's input for `mlp_in`, whose units are columns of gate and up, and for `mlp_mid`, columns of down, the
inner activation as the pruned inputs leave it. What a user asks for is the density of the whole MLP, counted over its
matrices; inputs and inner activation have different shares in it. The paper fits that rule to a search (B.1): the logit
of the inputs' density is a linear function of the logit of the MLP's.
"""

import math
from collections.abc import Mapping
from typing import Annotated

from pydantic import Field

from coldpress.runtime.sparsity import DensitySource, Kept, ReadingOptions, topk
from coldpress.schemas.config import Key
from coldpress.schemas.errors import ColdpressError
from coldpress.schemas.families import slices
from coldpress.schemas.model import ModelSpec

CHOOSES: tuple[str, ...] = ("mlp_in", "mlp_mid")
KEPT: Mapping[str, Kept] = topk.KEPT
NEEDS_PREDICTORS = False
NEEDS_EXACT_ZEROS = False
EXACT = False
MISSED_SHARE = 0.0
SEES_RESIDENCY = False

SLOPE, OFFSET = 1.01, 0.22
"""logit(density of the inputs) = SLOPE * logit(density of the MLP) + OFFSET: the line through the best of a search
(EXPERIMENTS.md); the paper does not print its own."""
LEAST = 0.02
"""No part is left with less."""


class Options(ReadingOptions):
    """How the MLP's density is divided; the paper's rule where nothing is said."""

    input_density: Annotated[float | None, Key(default="by the rule that a search gave")] = Field(
        default=None, gt=0, le=1, description="share of the MLP's inputs that a token uses"
    )
    glu_density: Annotated[float | None, Key(default="what the inputs leave of `density`")] = Field(
        default=None, gt=0, le=1, description="share of the MLP's inner activation that a token uses"
    )


def families(spec: ModelSpec, options: Options) -> tuple[str, ...]:
    """The inputs of the MLP's matrices."""
    return ("mlp_in", "mlp_mid")


def densities(exact_zeros: bool) -> DensitySource:
    """A choice, divided among the families."""
    return "divided"


def divide(density: float, spec: ModelSpec, options: Options) -> dict[str, float]:
    """Density of each family, so that the MLP's, by the weights of its matrices, is `density`.

    With both options given, `density` plays no part.

    Raises:
        ColdpressError: if the one that is given leaves nothing sensible for the other.
    """
    on_inputs, on_glu = (len(slices(family, spec)) for family in ("mlp_in", "mlp_mid"))
    weight = on_inputs / (on_inputs + on_glu)
    inputs, glu = options.input_density, options.glu_density
    if inputs is None:
        inputs = _by_rule(density, weight) if glu is None else (density - (1 - weight) * glu) / weight
    if glu is None:
        glu = (density - weight * inputs) / (1 - weight)
    if not (0 < inputs <= 1 and 0 < glu <= 1):
        raise ColdpressError(
            f"an MLP of density {density:.3g} with input_density={options.input_density} and "
            f"glu_density={options.glu_density} would need {inputs:.3g} of its inputs and {glu:.3g} of its inner "
            "activation, expected both above 0 and at most 1; change one of them, or density"
        )
    return {"mlp_in": inputs, "mlp_mid": glu}


def _by_rule(density: float, weight: float) -> float:
    """The inputs' density (B.1), within what leaves the inner activation between LEAST and 1."""
    if density >= 1:
        return 1.0
    wanted = 1 / (1 + math.exp(-SLOPE * math.log(density / (1 - density)) - OFFSET))
    least = max(min(LEAST, density), (density - (1 - weight)) / weight)
    most = min(1.0, (density - (1 - weight) * min(LEAST, density)) / weight)
    return min(max(wanted, least), most)


fit, select, select_many = topk.fit, topk.select, topk.select_many
