"""Dense: every unit of every family, on every token. The baseline of all comparisons, and right for any artifact."""

from collections.abc import Mapping

import numpy as np
from pydantic import Field

from coldpress.runtime.sparsity import DensitySource, Kept, Residency
from coldpress.schemas.base import Record
from coldpress.schemas.errors import ColdpressError
from coldpress.schemas.families import FAMILIES, slices
from coldpress.schemas.model import ModelSpec

CHOOSES: tuple[str, ...] = tuple(FAMILIES)
KEPT: Mapping[str, Kept] = {}
NEEDS_PREDICTORS = False
NEEDS_EXACT_ZEROS = False
EXACT = True
MISSED_SHARE = 0.0
SEES_RESIDENCY = False


class Options(Record):
    """What of the model lies on flash."""

    families: str = Field(
        default="neuron", description="the families that lie on flash, joined by +, as neuron+attn_in"
    )


def families(spec: ModelSpec, options: Options) -> tuple[str, ...]:
    """Those that the options name.

    Raises:
        ColdpressError: if one is unknown, or they are of no use to this model together.
    """
    found = tuple(options.families.split("+"))
    unknown = [name for name in found if name not in FAMILIES]
    if unknown:
        raise ColdpressError(f"families={options.families}: unknown '{unknown[0]}', known are {', '.join(FAMILIES)}")
    roles = [piece.role for name in found for piece in slices(name, spec)]
    if len(set(roles)) != len(roles):
        twice = next(role for role in roles if roles.count(role) > 1)
        raise ColdpressError(f"families={options.families}: {twice} is in two of them, expected it in one")
    return found


def densities(exact_zeros: bool) -> DensitySource:
    """All units."""
    return "whole"


def fit(
    num_units: int, density: float, statistics: Mapping[str, np.ndarray], options: Options
) -> dict[str, np.ndarray]:
    """Nothing to know."""
    return {}


def select(signal: np.ndarray, arrays: Mapping[str, np.ndarray], residency: Residency) -> np.ndarray:
    """All ids, int32 [num_units] ascending."""
    return np.arange(residency.present.size, dtype=np.int32)


def select_many(activity: np.ndarray, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    """True everywhere, bool [T, num_units]."""
    return np.ones(activity.shape, bool)
