"""Shared code for pruning by one vector of the gated MLP: `gate`, `up` and `glu` (DIP 3.2), `cats` and the ReLUs.

One or two matrices of the MLP compute the deciding vector. A runtime must compute them in full, so they stay in DRAM
and only the other matrices are on flash. As an oracle, the same choice also leaves out the deciding matrices: a bound
for tables of quality, which no artifact can run.
"""

from typing import ClassVar

from pydantic import Field

from coldpress.runtime.sparsity import ReadingOptions
from coldpress.runtime.sparsity.topk import TopK
from coldpress.schemas.errors import ColdpressError
from coldpress.schemas.model import ModelSpec


class Options(ReadingOptions):
    oracle: bool = Field(
        default=False,
        description="true or false: whether the matrices that decide count as left out, too; evaluation alone takes it",
    )


def beside_gate(spec: ModelSpec) -> tuple[str, ...]:
    """Returns the family on flash if the gate decides: up and down; in a model without a gate, down."""
    return ("up_down",) if spec.gated_mlp else ("mlp_mid",)


class PartOfGlu(TopK[Options]):
    OPTIONS = Options
    GATED: ClassVar[str]
    """The family on flash if the model has a gate; without a gate it is `mlp_mid`, the down projection's columns."""

    def families(self, spec: ModelSpec, options: Options) -> tuple[str, ...]:
        """Raises `ColdpressError` if the option `oracle` is set."""
        if options.oracle:
            raise ColdpressError(
                f"method {self.name()} with oracle=true decides by what the matrices that it leaves out would give, so "
                "no artifact can run it; build with oracle=false"
            )
        return (self.GATED,) if spec.gated_mlp else ("mlp_mid",)
