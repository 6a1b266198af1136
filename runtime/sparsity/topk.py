"""Top-k: the k units of largest |signal|, where k is the family's density times its units (ActiveFlow 2.1).

Reads the vector that multiplies the units or measures their importance: the MLP's input for `mlp_in`; its inner
activation, as computed from the pruned inputs, for `mlp_mid` (DIP Eqs. 7-8 with one density); act(gate) for `up_down`
and the up projection for `gate_down` (gate and up pruning); with `attention` the inputs of attention's matrices (TEAL).
Ties go to the lower id, so that the choice depends only on the signal.
"""

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
from pydantic import Field

from coldpress.runtime.arithmetic import largest
from coldpress.runtime.sparsity import Kept, OptionsT, ReadingOptions, Selector
from coldpress.schemas.model import ModelSpec


class Options(ReadingOptions):
    attention: bool = Field(default=False, description="true or false: whether attention's matrices are pruned, too")


class TopK(Selector[OptionsT]):
    CHOOSES = ("up_down", "gate_down", "mlp_in", "mlp_mid", "attn_in", "attn_out")
    KEPT: ClassVar[Mapping[str, Kept]] = {"num_selected": Kept("int32")}

    def fit(
        self, num_units: int, density: float, statistics: Mapping[str, np.ndarray], options: OptionsT
    ) -> dict[str, np.ndarray]:
        """Computes `num_selected` int32 [1]: k."""
        return {"num_selected": np.array([num_selected(num_units, density)], np.int32)}

    def select_many(self, activity: np.ndarray, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
        """Marks the k largest |activity| of each token: float32 [T, num_units] -> bool [T, num_units]."""
        return largest(np.abs(activity), max(1, int(arrays["num_selected"][0])))


class Plugin(TopK[Options]):
    OPTIONS = Options

    def families(self, spec: ModelSpec, options: Options) -> tuple[str, ...]:
        return linear_inputs(options)


def linear_inputs(options: Options) -> tuple[str, ...]:
    """Returns the families over inputs of linear layers: the MLP's, and attention's if `attention` is set."""
    return ("attn_in", "attn_out", "mlp_in", "mlp_mid") if options.attention else ("mlp_in", "mlp_mid")


def num_selected(num_units: int, density: float) -> int:
    """Returns k = density * num_units, rounded (half to even), at least 1 and at most `num_units`."""
    return min(num_units, max(1, round(density * num_units)))
