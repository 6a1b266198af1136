"""CATS: the units whose |act(gate)| reaches the threshold of their layer (contextually aware thresholding, DIP 6.1).

Reads act(gate), whose matrix stays in DRAM, as `gate` does. A token uses as many units as reach the threshold, which
calibration's magnitudes give for a density, where `gate` takes a fixed number. In a model without a gate it reads the
inner activation.
"""

from coldpress.runtime.sparsity import ReadingOptions
from coldpress.runtime.sparsity._parts_of_glu import beside_gate
from coldpress.runtime.sparsity.threshold import Threshold
from coldpress.schemas.model import ModelSpec


class Plugin(Threshold[ReadingOptions]):
    """A threshold on act(gate)."""

    CHOOSES = ("up_down", "mlp_mid")
    OPTIONS = ReadingOptions

    def families(self, spec: ModelSpec, options: ReadingOptions) -> tuple[str, ...]:
        """Up and down; without a gate, down."""
        return beside_gate(spec)
