"""The result of `plan`: an artifact's plans, one per DRAM budget, with what was tried for each and the reasons."""

from pydantic import Field

from coldpress.schemas.base import Extended, Many, Record, Share
from coldpress.schemas.experts import ExpertCurve
from coldpress.schemas.layout import Plan, by_budget


class TriedSetting(Record):
    """One change to a plan, and its cost on held-out tokens."""

    setting: str
    """The change in words, such as `cache linked` or `gap of 8192 bytes`."""
    token_s: float = Field(ge=0)
    """Modelled seconds of a decoded token with it, and with all changes that were kept before."""
    kept: bool


class RoutingChoice(Record):
    """Cost and savings on validation text of routers that prefer experts in DRAM, over the model's own routing."""

    mean_kld: float
    """Mean Kullback-Leibler divergence of next-token distributions, nats per token."""
    mean_kld_error: float
    """Standard error over blocks; 0 for one block."""
    miss_ratio: float = Field(ge=0)
    """Units that tokens used and DRAM did not hold, over those of the model's own routing with the same caches."""


class PlanChoice(Record):
    plan: str
    default_token_s: float | None = Field(default=None, ge=0)
    """Modelled seconds of a decoded token under the default settings; None if nothing was tried."""
    token_s: float | None = Field(default=None, ge=0)
    """The same under the plan, on the same tokens."""
    hit_rate: Share | None = None
    """Requested units that were in DRAM, pinned or cached, over all, under the plan."""
    tried: tuple[TriedSetting, ...] = ()
    routing: RoutingChoice | None = None
    """Cost and savings of the plan's routing; None if routers choose as the model was trained."""
    reasons: tuple[str, ...]
    """One sentence per decision."""


class Plans(Extended):
    LATER = ("experts",)

    plans: Many[Plan] = Field(min_length=1)
    """The largest budget first."""
    choices: tuple[PlanChoice, ...]
    """One per plan, in the same order."""
    experts: ExpertCurve | None = None
    """Calibration's curve of experts, for the artifact; None, which is left out of the file, without experts."""

    @property
    def largest_plan(self) -> Plan:
        """Returns the plan that runs if no budget is given."""
        return by_budget(self.plans)[-1]
