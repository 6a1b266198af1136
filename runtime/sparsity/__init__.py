"""Selectors: which units a token uses. One file per selector.

A file has one class `Plugin`, which extends `Selector`. Calibration, distillation, evaluation, search, simulation and
the runtime all use this class, so that the compiler measures exactly the choice that the runtime makes. A selector has
no state: `fit` makes the arrays that it needs at run time, once for each family of each layer.
"""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Literal

import numpy as np
from pydantic import Field
from typing_extensions import TypeVar  # that of Python 3.13, which knows defaults

from coldpress.runtime import plugins
from coldpress.runtime.cache import CachePolicy
from coldpress.schemas.base import Record
from coldpress.schemas.errors import ColdpressError
from coldpress.schemas.families import mlp_shares, resident_share
from coldpress.schemas.layout import Plan
from coldpress.schemas.model import ModelSpec
from coldpress.schemas.sparsity import Sparsity

DensitySource = Literal["whole", "measured", "budget", "capped"]
"""Sources of densities. `whole`: every unit. `measured`: the share that is not exactly zero. `budget`: the user's
density, or the one that the DRAM budget allows (ActiveFlow 4.1), divided among the families by the selector. `capped`:
as `budget`, but at most the share that is not exactly zero."""
OptionsT = TypeVar("OptionsT", bound=Record, default=Any)
"""The record of a selector's options; `Any` for a selector loaded by name."""


@dataclass(frozen=True)
class Kept:
    dtype: str
    length: int | None = 1
    """Number of entries; None for one entry per unit."""
    bounds: tuple[tuple[float, float], ...] = ()
    """The least and the largest value of each entry; none means any."""

    def holds(self, values: np.ndarray) -> bool:
        return all(low <= value <= high for value, (low, high) in zip(values.tolist(), self.bounds, strict=False))

    def shape(self, num_units: int) -> tuple[int, ...]:
        return (num_units if self.length is None else self.length,)

    def __str__(self) -> str:
        return f"{self.dtype} [{'one per unit' if self.length is None else self.length}]"


@dataclass(frozen=True)
class Residency:
    """The places of the units of one family of one layer when a token selects among them."""

    present: np.ndarray
    """bool [num_units]: whether the unit is in DRAM, so that using it needs no read."""
    position: np.ndarray
    """int32 [num_units]: the unit's place on flash, within its section."""


class ReadingOptions(Record):
    """The option of a selector that is not exact: a token may use further units that cost no read."""

    use_read_units: bool = Field(
        default=False,
        description="true or false: whether a token also uses what is in DRAM, and what the reads for its units bring",
    )


class Selector(plugins.PluginBase, Generic[OptionsT]):
    """Chooses the units of a token. The base class of all selectors; its constants are the defaults."""

    CHOOSES: ClassVar[tuple[str, ...]]
    KEPT: ClassVar[Mapping[str, Kept]] = {}
    """The arrays of `fit` that are stored in the artifact, with the dtype and shape that the reader checks."""
    NEEDS_PREDICTORS: ClassVar[bool] = False
    """True if each layer needs a predictor network (`predict`, `size`)."""
    NEEDS_EXACT_ZEROS: ClassVar[bool] = False
    """True if the selector only works for models whose activation is exactly zero for part of its inputs."""
    EXACT: ClassVar[bool] = False
    """True if the units that the selector leaves out would add exactly nothing."""
    MISSED_SHARE: ClassVar[float] = 0.0
    """Share of the active units that the selector may miss; distillation leaves out this share, too."""
    SEES_RESIDENCY: ClassVar[bool] = False
    """True if the choice depends on which units are in DRAM."""

    @abstractmethod
    def families(self, spec: ModelSpec, options: OptionsT) -> tuple[str, ...]:
        """Returns the families that an artifact made for this selector keeps on flash. Raises `ColdpressError` if the
        options contradict each other or do not fit this model."""

    def densities(self, exact_zeros: bool) -> DensitySource:
        """Returns where densities come from, for a model with or without exact zeros."""
        return "budget"

    @property
    def is_whole(self) -> bool:
        """Tells whether every token uses every unit, so that nothing is sparse."""
        return self.densities(exact_zeros=True) == "whole"

    def divide(self, density: float, spec: ModelSpec, options: OptionsT) -> dict[str, float]:
        """Returns the share of each family's units that a token uses, so that it uses `density` of the MLP's weights.

        Attention's families, if the options name them, get the share `density` of their own units. In a mixture, all
        shares are of the experts that the router picks. Raises `ColdpressError` as `flash_density`, or if the options
        allow no such division.
        """
        on_flash = self.flash_density(density, spec, options)
        held = mlp_shares(self.families(spec, options), spec)
        return {family: on_flash if weight else density for family, weight in held.items()}

    def flash_density(self, density: float, spec: ModelSpec, options: OptionsT) -> float:
        """Returns the share that a token uses of the MLP's weights on flash, if it uses `density` of all of them.

        The MLP's matrices that stay in DRAM are used whole. Raises `ColdpressError` if those matrices alone exceed
        `density`.
        """
        least = resident_share(self.families(spec, options), spec)
        if density >= 1:
            return 1.0
        if density <= least:
            raise ColdpressError(
                f"density={density:g} was asked for, but method {self.name()} uses {least:.3g} of the MLP's weights on "
                f"every token, as their matrices stay in DRAM; use a density above {least:.3g}, or another method"
            )
        return (density - least) / (1 - least)

    def fit(
        self, num_units: int, density: float, statistics: Mapping[str, np.ndarray], options: OptionsT
    ) -> dict[str, np.ndarray]:
        """Computes the arrays for one family of one layer.

        Args:
            density: Share of the family's units that a token uses.
            statistics: Calibration's counts for the family (schemas/activations.py), except arrays that grow with the
                text; `unit_norms` float32 [num_units], the Euclidean norm of each unit's weights in the source;
                `read_units` float64 [4], the costs of `coldpress.runtime.kernels.intervals.Times`; `resident_share`
                float64 [1], the share of the family that DRAM will hold. Empty if the selector runs another method's
                artifact.

        Raises:
            ColdpressError: if `statistics` lacks an array that the selector needs.
        """
        return {}

    def select(self, signal: np.ndarray, arrays: Mapping[str, np.ndarray], residency: Residency) -> np.ndarray:
        """Chooses the units that one token uses: ids, int32, distinct, ascending. `signal` is the family's
        (schemas/families.py), float32 [n]; the selector must not change it."""
        return self.select_many(signal[None], arrays)[0].nonzero()[0].astype(np.int32)

    def select_among(
        self, signal: np.ndarray, arrays: Mapping[str, np.ndarray], residency: Residency, experts: np.ndarray | None
    ) -> np.ndarray:
        """Chooses as `select`; in a mixture only units of the `experts` that the router picked, bool [num_experts];
        None where units do not belong to experts."""
        ids = self.select(signal, arrays, residency)
        return ids if experts is None else ids[experts[ids // (residency.present.size // experts.size)]]

    @abstractmethod
    def select_many(self, activity: np.ndarray, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
        """Makes the same decision for many tokens: float32 [T, num_units] -> bool [T, num_units].

        `activity` is the family's activity (schemas/families.py), which has an entry per unit. A selector whose signal
        is not per unit (a predictor) returns its training target. A selector that sees residency decides as if DRAM
        were empty and units lay on flash in the order of their ids.
        """

    def by_scores(self, scores: np.ndarray, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
        """Chooses units by the scores of a predictor network: float32 [T, n] -> bool [T, n]; the stage `size` uses it.
        Only a selector with NEEDS_PREDICTORS has scores. There is one score for each unit that a token may use."""
        raise NotImplementedError(f"the selector {self.name()} has no predictors, so no scores")


def used_experts(activity: np.ndarray, num_experts: int) -> np.ndarray:
    """Returns the experts that each token uses, bool [T, E], from activity [T, num_units]: those with any active unit.
    A picked expert whose units are all 0 counts as unused."""
    return np.asarray(activity.reshape(len(activity), num_experts, -1).any(axis=2))


def sees_residency(plan: Plan) -> bool:
    """Tells whether the units of a token depend on what is in DRAM, under this plan."""
    selector = plugins.load("coldpress.runtime.sparsity", Selector, plan.method)
    return plan.routing is not None or selector.SEES_RESIDENCY or uses_read_units(plan)


def sees_others(plan: Plan) -> bool:
    """Tells whether the units of a token depend on what other tokens read, under this plan. Where the cache admits
    nothing, a selector that sees residency chooses for each token what it would choose alone."""
    admits = plugins.load_class("coldpress.runtime.cache", CachePolicy, plan.cache).admits
    return uses_read_units(plan) or (sees_residency(plan) and admits)


def uses_read_units(choice: Plan | Sparsity) -> bool:
    """Tells whether a token also uses all units in DRAM and all that its reads bring, under this plan or choice."""
    options = plugins.options_of(plugins.load("coldpress.runtime.sparsity", Selector, choice.method), choice.options)
    return bool(getattr(options, "use_read_units", False))
