"""Dense: every unit of every family, on every token. The baseline of all comparisons; it can run any artifact."""

from collections.abc import Mapping

import numpy as np
from pydantic import Field

from coldpress.runtime.sparsity import DensitySource, Residency, Selector
from coldpress.schemas.base import Record
from coldpress.schemas.errors import ColdpressError
from coldpress.schemas.families import BLOCK_SIZES, BLOCKS, FAMILIES, WHOLE_MLP, block_neurons, dense_family, slices
from coldpress.schemas.model import ModelSpec


class Options(Record):
    families: str | None = Field(
        default=None,
        description="the families that lie on flash, joined by +, as neuron+attn_in; default: block, or neuron where "
        "the MLP has no whole number of blocks",
    )


class Plugin(Selector[Options]):
    CHOOSES = tuple(FAMILIES)
    OPTIONS = Options
    EXACT = True

    def families(self, spec: ModelSpec, options: Options) -> tuple[str, ...]:
        """Raises `ColdpressError` if a family is unknown or the model has no units of it, or if two of them hold the
        same matrix."""
        if options.families is None:
            return (dense_family(spec),)
        found = tuple(options.families.split("+"))
        unknown = [name for name in found if name not in FAMILIES]
        if unknown:
            raise ColdpressError(
                f"families={options.families}: unknown '{unknown[0]}', known are {', '.join(FAMILIES)}"
            )
        if BLOCKS in found and not block_neurons(spec):
            raise ColdpressError(
                f"families={options.families}: a block has {' or '.join(map(str, BLOCK_SIZES))} neurons, and this "
                f"MLP has {spec.intermediate_size}; use families={WHOLE_MLP}"
            )
        roles = [piece.role for name in found for piece in slices(name, spec)]
        if len(set(roles)) != len(roles):
            twice = next(role for role in roles if roles.count(role) > 1)
            raise ColdpressError(f"families={options.families}: {twice} is in two of them, expected it in one")
        return found

    def densities(self, exact_zeros: bool) -> DensitySource:
        return "whole"

    def select(self, signal: np.ndarray, arrays: Mapping[str, np.ndarray], residency: Residency) -> np.ndarray:
        return np.arange(residency.present.size, dtype=np.int32)

    def select_many(self, activity: np.ndarray, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
        return np.ones(activity.shape, bool)
