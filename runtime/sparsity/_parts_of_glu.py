"""What pruning by one vector of the GLU has in common: `gate`, `up` and `glu` (DIP 3.2).

Each is top-k on a vector that some of the MLP's matrices give; a runtime has to compute with those in full, so only the
others lie on flash. As an oracle the same choice counts all matrices as left out: a bound for tables of quality, which
nothing can run.
"""

from pydantic import Field

from coldpress.runtime.sparsity import ReadingOptions
from coldpress.schemas.errors import ColdpressError
from coldpress.schemas.model import ModelSpec


class Options(ReadingOptions):
    """Whether it is to be built or only to be judged."""

    oracle: bool = Field(
        default=False,
        description="true or false: whether the matrices that decide count as left out, too; evaluation alone takes it",
    )


def families(method: str, gated: str, spec: ModelSpec, options: Options) -> tuple[str, ...]:
    """The family `gated`, or the down projection's columns where there is no gate.

    Raises:
        ColdpressError: if it is to be an oracle.
    """
    if options.oracle:
        raise ColdpressError(
            f"method {method} with oracle=true decides by what the matrices that it leaves out would give, so no "
            "artifact can run it; build with oracle=false"
        )
    return (gated,) if spec.gated_mlp else ("mlp_mid",)
