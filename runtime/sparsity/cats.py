"""CATS: the units whose |act(gate)| reaches the threshold of their layer (contextually aware thresholding, DIP 6.1).

Reads act(gate), whose matrix stays in DRAM, like `gate`. But `gate` takes a fixed number of units, while here a token
uses all units that reach the threshold, computed for a density from calibration's magnitudes. In a model without a gate
it reads the inner activation.
"""

from coldpress.runtime.sparsity import ReadingOptions
from coldpress.runtime.sparsity._parts_of_glu import beside_gate
from coldpress.runtime.sparsity.threshold import Threshold
from coldpress.schemas.model import ModelSpec


class Plugin(Threshold[ReadingOptions]):
    CHOOSES = ("up_down", "mlp_mid")
    OPTIONS = ReadingOptions

    def families(self, spec: ModelSpec, options: ReadingOptions) -> tuple[str, ...]:
        return beside_gate(spec)
