"""Refine: reads the low bits of the units that matter; all others compute with their high bits, which are in DRAM.

Needs a format in planes (runtime/quantization/_planes.py). Reads the activity of each family: of `neuron` the inner
activation, as computed from coarse planes; with `inputs` the MLP's input for `mlp_in` and the inner activation for
`mlp_mid` (DecDEC, 2412.20185, which fetches residuals of the largest inputs' columns over PCIe). Importance, prices of
reads, intervals and units in DRAM are those of `flash`: what `flash` would use, this selector refines.
"""

from pydantic import Field

from coldpress.runtime.sparsity import flash
from coldpress.schemas.model import ModelSpec


class Options(flash.FreeUnits):
    """What a unit is."""

    inputs: bool = Field(
        default=False, description="true or false: whether units are columns of inputs instead of whole neurons"
    )


class Plugin(flash.Flash[Options]):
    """Refines the units that are worth their reading time."""

    CHOOSES = ("neuron", "mlp_in", "mlp_mid")
    OPTIONS = Options
    IN_PLANES = True
    DENSITY = 0.1  # loses about a hundredth of a nat (docs/experiments/planes.md)

    def families(self, spec: ModelSpec, options: Options) -> tuple[str, ...]:
        return ("mlp_in", "mlp_mid") if options.inputs else ("neuron",)
