"""What pruning by one vector of the gated MLP has in common: `gate`, `up` and `glu` (DIP 3.2), `cats` and the ReLUs.

Some matrices of the MLP compute the vector that decides. A runtime has to compute with those in full, so they stay in
DRAM and only the other matrices lie on flash. As an oracle, the same choice also leaves out the matrices that decide:
a bound for tables of quality, which no artifact can run.
"""

from typing import ClassVar

from pydantic import Field

from coldpress.runtime.sparsity import ReadingOptions
from coldpress.runtime.sparsity.topk import TopK
from coldpress.schemas.errors import ColdpressError
from coldpress.schemas.model import ModelSpec


class Options(ReadingOptions):
    """Whether the choice is to be built, or only to be judged."""

    oracle: bool = Field(
        default=False,
        description="true or false: whether the matrices that decide count as left out, too; evaluation alone takes it",
    )


def beside_gate(spec: ModelSpec) -> tuple[str, ...]:
    """The family that is left on flash where the gate decides: up and down; in a model without a gate, down."""
    return ("up_down",) if spec.gated_mlp else ("mlp_mid",)


class PartOfGlu(TopK[Options]):
    """Top-k on a vector that some of the MLP's matrices give."""

    OPTIONS = Options
    GATED: ClassVar[str]
    """The family on flash where the model has a gate; without one it is `mlp_mid`, the down projection's columns."""

    def families(self, spec: ModelSpec, options: Options) -> tuple[str, ...]:
        """The family of the matrices that do not decide.

        Raises:
            ColdpressError: if it is to be an oracle.
        """
        if options.oracle:
            raise ColdpressError(
                f"method {self.name()} with oracle=true decides by what the matrices that it leaves out would give, so "
                "no artifact can run it; build with oracle=false"
            )
        return (self.GATED,) if spec.gated_mlp else ("mlp_mid",)
