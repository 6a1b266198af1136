"""Gate pruning: the k units of largest |act(gate)| (DIP Eq. 5).

Reads act(gate), whose matrix stays in DRAM. Leaves out rows of up and columns of down, at most two thirds of the MLP.
In a model without a gate it reads the inner activation.
"""

from coldpress.runtime.sparsity._parts_of_glu import PartOfGlu


class Plugin(PartOfGlu):
    CHOOSES = ("up_down", "mlp_mid")
    GATED = "up_down"
