"""GLU pruning: the k units of largest |GLU(x)|, the inner activation (DIP Eq. 4).

Gate and up must be computed in full first, so a runtime can only leave out columns of the down projection, at most a
third of the MLP. As an oracle, which knows the units in advance, it is the bound in DIP's tables.
"""

from coldpress.runtime.sparsity._parts_of_glu import PartOfGlu


class Plugin(PartOfGlu):
    CHOOSES = ("mlp_mid",)
    GATED = "mlp_mid"
