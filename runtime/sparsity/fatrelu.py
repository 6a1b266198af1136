"""FATReLU: the units of a ReLU model whose activation reaches a threshold (LLM in a flash C.5; Kurtz et al. 2020).

Reads the exact activations, like `relu`: act(gate) for `up_down`, the inner activation for `mlp_mid`. A unit below the
threshold counts as zero. Calibration's magnitudes give the threshold for a density; if the density is above the share
of non-zero units, only zeros are left out.
"""

from coldpress.runtime.sparsity import DensitySource, ReadingOptions
from coldpress.runtime.sparsity._parts_of_glu import beside_gate
from coldpress.runtime.sparsity.threshold import Threshold
from coldpress.schemas.model import ModelSpec


class Plugin(Threshold[ReadingOptions]):
    CHOOSES = ("up_down", "mlp_mid")
    OPTIONS = ReadingOptions
    NEEDS_EXACT_ZEROS = True

    def families(self, spec: ModelSpec, options: ReadingOptions) -> tuple[str, ...]:
        return beside_gate(spec)

    def densities(self, exact_zeros: bool) -> DensitySource:
        return "capped"
