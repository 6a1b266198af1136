"""ReLU: the units whose activation is not exactly zero. The units left out add nothing: the result is the dense one.

Reads the exact activations, which resident matrices give before any read from flash (LLM in a flash, C.5: the gate as
an exact predictor): act(gate) for `up_down`, the MLP's inner activation for `mlp_mid`.
"""

from collections.abc import Mapping

import numpy as np

from coldpress.runtime.sparsity import DensitySource, Selector
from coldpress.runtime.sparsity._parts_of_glu import beside_gate
from coldpress.schemas.base import Record
from coldpress.schemas.model import ModelSpec


class Plugin(Selector[Record]):
    CHOOSES = ("up_down", "mlp_mid")
    NEEDS_EXACT_ZEROS = True
    EXACT = True

    def families(self, spec: ModelSpec, options: Record) -> tuple[str, ...]:
        return beside_gate(spec)

    def densities(self, exact_zeros: bool) -> DensitySource:
        return "measured"

    def select_many(self, activity: np.ndarray, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
        """Tests for zero, not for sign: a ReLU's output is never negative, but its product with the up projection can
        be."""
        return activity != 0
