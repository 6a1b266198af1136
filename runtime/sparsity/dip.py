"""DIP, dynamic input pruning: the largest |x| of the MLP's inputs, then the largest |GLU~(x)| (DIP Eqs. 7-8).

Reads the MLP's input for `mlp_in`, whose units are columns of gate and up; for `mlp_mid`, columns of down, it reads the
inner activation, as computed from the pruned inputs. Inputs and inner activation get different densities. The paper
fits the rule to a search (B.1): the logit of the inputs' density is a linear function of the logit of the MLP's
density.
"""

import math
from typing import Annotated

from pydantic import Field
from typing_extensions import TypeVar

from coldpress.runtime.sparsity import ReadingOptions
from coldpress.runtime.sparsity.topk import TopK
from coldpress.schemas.config import Key
from coldpress.schemas.errors import ColdpressError
from coldpress.schemas.families import mlp_shares
from coldpress.schemas.model import ModelSpec

SLOPE, OFFSET = 1.01, 0.22
"""logit(density of the inputs) = SLOPE * logit(density of the MLP) + OFFSET: a line fitted to the best points of our
search (docs/experiments/selectors.md), because the paper does not print its coefficients."""
LEAST = 0.02
"""Least density of a family."""


class Options(ReadingOptions):
    input_density: Annotated[float | None, Key(default="by the rule that a search gave")] = Field(
        default=None, gt=0, le=1, description="share of the MLP's inputs that a token uses"
    )
    glu_density: Annotated[float | None, Key(default="what the inputs leave of `density`")] = Field(
        default=None, gt=0, le=1, description="share of the MLP's inner activation that a token uses"
    )


DipOptionsT = TypeVar("DipOptionsT", bound=Options)


class Dip(TopK[DipOptionsT]):
    CHOOSES = ("mlp_in", "mlp_mid")
    OPTIONS = Options

    def families(self, spec: ModelSpec, options: DipOptionsT) -> tuple[str, ...]:
        return ("mlp_in", "mlp_mid")

    def divide(self, density: float, spec: ModelSpec, options: DipOptionsT) -> dict[str, float]:
        """Returns each family's density, so that the MLP's density, counted by weights, is `density`.

        If both options are given, `density` has no effect. Raises `ColdpressError` if the given option leaves no
        density between 0 and 1 for the other family.
        """
        weight = mlp_shares(("mlp_in", "mlp_mid"), spec)["mlp_in"]
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


class Plugin(Dip[Options]):
    """DIP as published."""


def _by_rule(density: float, weight: float) -> float:
    """Returns the inputs' density (B.1), bounded so that the inner activation's is between LEAST and 1."""
    if density >= 1:
        return 1.0
    wanted = 1 / (1 + math.exp(-SLOPE * math.log(density / (1 - density)) - OFFSET))
    least = max(min(LEAST, density), (density - (1 - weight)) / weight)
    most = min(1.0, (density - (1 - weight) * min(LEAST, density)) / weight)
    return min(max(wanted, least), most)
