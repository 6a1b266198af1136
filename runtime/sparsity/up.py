"""Up pruning: the k units of largest |up projection| (DIP 3.2, after Eq. 5).

Reads the up projection's output, whose matrix stays in DRAM. Leaves out rows of the gate and columns of down, at most
two thirds of the MLP. In a model without a gate it reads the inner activation.
"""

from coldpress.runtime.sparsity._parts_of_glu import PartOfGlu


class Plugin(PartOfGlu):
    CHOOSES = ("gate_down", "mlp_mid")
    GATED = "gate_down"
