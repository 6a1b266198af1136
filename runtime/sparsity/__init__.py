"""Which units a token uses. A file is a selector, whole; its module has what the runtime and the compiler rely on:

`Options`, a record of its own settings, each with a default; `CHOOSES`, the families it can choose from, and
`families(spec, options)`, those that an artifact made for it keeps on flash; `densities(exact_zeros)`, where its
densities come from; `NEEDS_PREDICTORS`; `NEEDS_EXACT_ZEROS` (a ReLU model); `EXACT`, whether what it leaves out would
have added nothing; `MISSED_SHARE`, what it may miss of the units that are active; `SEES_RESIDENCY`, whether its choice
hangs on what is in DRAM. One whose densities are divided has `divide(density, spec, options)` -> the density of each of
its families, of that of all their weights together.

`fit(num_units, density, statistics, options)` -> the arrays of one family of one layer; `KEPT` (name to `Kept`), those
of them that stay in the artifact's tables, and what a reader holds them against. `statistics` has what calibration
counted of the family (schemas/activations.py), but for what grows with the text; `unit_norms` float32 [num_units], the
Euclidean norm of each unit's weights in the source; and `read_units` float64 [3], what reading costs besides units,
counted in the time of a unit's bytes: a read's own time, that of bytes that are nobody's, and the least of a request
(`coldpress.runtime.kernels.intervals.Times`); and `resident_share` float64 [1], how much of the family DRAM will hold.
It is empty where a method runs an artifact of another.
`select(signal, arrays, residency)` -> ids for one token, int32, distinct, ascending, from the family's signal; one with
NEEDS_PREDICTORS takes `experts`, too, bool [E] or None: of a mixture those that the token uses, among whose units alone
it chooses (`select_of` keeps to them for the others);
`select_many(activity, arrays)` -> the same decision for many tokens, bool like `activity`, from the family's activity
(schemas/families.py). A selector that decides before there is an entry per unit says there what it aims at; one that
sees residency decides there as if nothing were in DRAM, and every unit lay on flash where its id says.

With `ReadingOptions` among its options, and `use_read_units` set, the store (runtime/store/store.py) adds to a choice
what costs no read: it computes with more, and keeps in its cache what was chosen.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Literal

import numpy as np
from pydantic import Field

from coldpress.runtime import plugins
from coldpress.schemas.base import Record
from coldpress.schemas.layout import Plan

DensitySource = Literal["whole", "measured", "budget", "capped", "divided"]
"""Every unit; the share that is not exactly zero; what the user says or the DRAM budget allows (ActiveFlow 4.1), in
every family; the same, but never more than the share that is not exactly zero; the same, divided among the families."""


@dataclass(frozen=True)
class Kept:
    """What an array of a selector is in the artifact's tables, of one axis."""

    dtype: str
    length: int | None = 1
    """None: an entry per unit."""

    def shape(self, num_units: int) -> tuple[int, ...]:
        """Of a family that has so many units."""
        return (num_units if self.length is None else self.length,)

    def __str__(self) -> str:
        """Type and shape, for sentences."""
        return f"{self.dtype} [{'one per unit' if self.length is None else self.length}]"


@dataclass(frozen=True)
class Residency:
    """Where the units of one family of one layer are when a token selects among them."""

    present: np.ndarray
    """bool [num_units]: in DRAM, so that using it reads nothing."""
    position: np.ndarray
    """int32 [num_units]: the unit's place on flash, in the order of its section."""


class ReadingOptions(Record):
    """What a selector whose choice is not exact leaves to the store."""

    use_read_units: bool = Field(
        default=False,
        description="true or false: whether a token also uses what is in DRAM, and what the reads for its units bring",
    )


def select_of(
    selector: ModuleType,
    signal: np.ndarray,
    arrays: Mapping[str, np.ndarray],
    residency: Residency,
    experts: np.ndarray | None,
) -> np.ndarray:
    """Ids that a selector chooses for one token, int32 ascending; of `experts`, bool [E], where units are theirs."""
    if experts is None:
        return selector.select(signal, arrays, residency)
    if selector.NEEDS_PREDICTORS:
        return selector.select(signal, arrays, residency, experts)
    ids = selector.select(signal, arrays, residency)
    return ids[experts[ids // (residency.present.size // experts.size)]]


def uses_read_units(plan: Plan) -> bool:
    """Whether a token also uses what is in DRAM, and what the reads for its units bring (runtime/sparsity)."""
    options = plugins.options_of(plugins.load("coldpress.runtime.sparsity", plan.method), plan.options)
    return bool(getattr(options, "use_read_units", False))
