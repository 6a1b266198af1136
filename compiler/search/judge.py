"""Searches the candidates of one DRAM budget: for `allocate`, and for a quote before any build (compiler/quote). The
judge of a candidate divides the budget, replays held-out tokens, and reads the quality curves."""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from coldpress.compiler.candidates import (
    AUTO,
    caches_for,
    candidates,
    compared_formats,
    formats_for,
    misfit,
    own_cache_options,
    own_options,
    routings_for,
    with_attention,
)
from coldpress.compiler.cost_model import flash_bytes, llm_sparsity, weight_bytes
from coldpress.compiler.draft_passes import MODEL
from coldpress.compiler.kept_codes import keeping
from coldpress.compiler.search import Candidate, Goal, Judged, Search, Space, beam, fastest_dense
from coldpress.compiler.search.density import UNIFORM, AllocationInputs
from coldpress.compiler.search.drafts import DraftSavings, without
from coldpress.compiler.search.dram_shares import asked_budgets_of, divided
from coldpress.compiler.search.floor import Floor
from coldpress.compiler.search.replay import Replays, held_share
from coldpress.compiler.search.settings import AllocateConfig
from coldpress.compiler.search.words import tried_of
from coldpress.compiler.seconds import TokenCost
from coldpress.runtime.drafts import NO_DRAFT
from coldpress.runtime.dram.kv_cache import KV_CACHE_FORMATS
from coldpress.runtime.plugins import load
from coldpress.runtime.quantization._mixed import coarsest, in_words
from coldpress.runtime.sparsity import Selector
from coldpress.schemas.base import Options
from coldpress.schemas.errors import ColdpressError
from coldpress.schemas.families import Formats, Method, by_layer, head_of, names_in, of_layers
from coldpress.schemas.layout import KvCacheFormat
from coldpress.schemas.memory import OverBudgetError
from coldpress.schemas.sparsity import SearchedRouting, Sparsity, Tried

LOG = logging.getLogger(__name__)
DENSITIES = (0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
"""The densities above the lowest that keeps the quality."""


class BudgetJudge:
    def __init__(self, config: AllocateConfig, inputs: AllocationInputs, floor: Floor, replays: Replays) -> None:
        """If the budget is a share, each candidate has this share of what its own formats take."""
        self._config, self._inputs, self._floor, self._replays = config, inputs, floor, replays
        self._known: dict[Candidate, Judged] = {}
        self._drafts = DraftSavings(config.draft, inputs)
        self.refusals: dict[Method, ColdpressError] = {}
        """By selector, why candidates were refused: for lack of DRAM the least need, else the first reason."""

    @property
    def dram_budget_bytes(self) -> int:
        """The budget that candidates are judged under; a share counts the default formats where they are open."""
        return next(iter(asked_budgets_of(self._config, self._inputs.model, self._inputs.device)))

    def budget_bytes(self, candidate: Candidate) -> int:
        inputs = self._inputs
        return next(iter(asked_budgets_of(self.config_of(candidate), inputs.model, inputs.device, inputs.caches)))

    @property
    def judged(self) -> tuple[Judged, ...]:
        return tuple(self._known.values())

    @property
    def space(self) -> Space:
        config, model = self._config, self._inputs.model
        num_layers = model.spec.num_hidden_layers
        formats = tuple(by_layer(keeping(model, name), num_layers) for name in self._floor.formats(self.formats))
        return Space(
            methods=candidates(model.spec, config.options),
            formats=formats,
            caches=caches_for(config.cache),
            densities=self.densities,
            kv_caches=self.kv_caches,
            heads=self._heads,
            routings=self.routings,
            streams_attention=(False,) if self._with_attention is None else (False, True),
            budget_density=1 - llm_sparsity(self.dram_budget_bytes, weight_bytes(model, formats[0])),
        )

    @property
    def _with_attention(self) -> Options | None:
        return with_attention(self._config.options, self._inputs.model.spec, self._config.layers_per_group)

    def _heads(self, formats: Formats) -> list[Formats]:
        found = self._floor.with_heads(formats, self._inputs.model.spec)
        return [one for one in found if head_of(one) is not None]

    @property
    def formats(self) -> tuple[Formats, ...]:
        """The formats that are compared: those whose loss was measured, or the one that the user named."""
        named, known = self._config.format, {*formats_for(AUTO)}  # of an older version, some may be no longer known
        losses = {loss.formats for loss in self._floor.curves.formats}
        measured = tuple(sorted((one for one in losses if names_in(of_layers(one)) <= known), key=str))
        return measured if named == AUTO and measured else compared_formats(named, self._inputs.model.spec)

    @property
    def kv_caches(self) -> tuple[KvCacheFormat, ...]:
        if self._config.kv_cache != AUTO:
            return (self._config.kv_cache,)
        return tuple(name for name in KV_CACHE_FORMATS if self._floor.kv_cache_ratio(name) is not None)

    def __call__(self, candidate: Candidate) -> Judged:
        if candidate not in self._known:
            try:
                self._known[candidate] = self._cost(candidate)
            except ColdpressError as error:  # too large for the budget, or the selector leaves nothing out
                needed = error.needed_bytes if isinstance(error, OverBudgetError) else None
                self._known[candidate] = Judged(candidate, refusal=str(error), needed_bytes=needed)
                self._refuse(candidate.method, error)
        return self._known[candidate]

    def config_of(self, candidate: Candidate, has_draft_model: bool = False) -> AllocateConfig:
        config = self._config
        draft = MODEL if has_draft_model else without(config.draft)
        options = self._with_attention if candidate.streams_attention else None
        return config.model_copy(
            update={
                "method": candidate.method,
                "options": own_options(candidate.method, config.options) if options is None else options,
                "format": coarsest(candidate.format),
                "density": candidate.density,
                "cache": candidate.cache,
                "kv_cache": candidate.kv_cache,
                "cache_options": own_cache_options(candidate.cache, config.cache_options),
                "draft": draft,
            }
        )

    def densities(self, method: Method, formats: Formats) -> Sequence[float | None]:
        try:
            return self._kept_densities(method, formats)
        except ColdpressError as error:
            self._refuse(method, error)
            return ()

    def routings(self, method: Method, formats: Formats) -> Sequence[SearchedRouting]:
        """Returns the routings of a selector in a format that keep the quality; see `Space`. Empty for a selector that
        leaves out units of experts, and for a build that drafts, since drafts must not change what is in DRAM."""
        config, spec = self._config, self._inputs.model.spec
        names = routings_for(config.routing, spec.is_mixture)
        is_whole = load("coldpress.runtime.sparsity", Selector, method).is_whole
        if not names or not is_whole or config.draft not in (None, AUTO, NO_DRAFT):
            return ()
        cache = caches_for(config.cache)[0]
        try:
            division = self._divided(Candidate(method, formats, None, cache, self.kv_caches[0]))
        except ColdpressError:  # judging the plain candidate reports this
            return ()
        held = held_share(division, self._inputs.model)
        most_kld = math.inf if config.routing == AUTO else config.routing_kl
        return [one for name in names for one in self._floor.routings(name, formats, held, most_kld)]

    def up_to_all(self, method: Method, known: Sequence[float | None]) -> Sequence[float | None]:
        """Adds a density of 1 to a selector's densities where density is a choice: it loses only what the format does,
        however much a selector that sees residency loses with this much DRAM."""
        is_choice = self._config.density is None and self._floor.curves.of(method) and None not in known
        return (*known, 1.0) if is_choice else known

    def _refuse(self, method: Method, error: ColdpressError) -> None:
        """Keeps one reason per selector: of refusals for lack of DRAM the one that needs the least, else the first."""
        known = self.refusals.setdefault(method, error)
        if isinstance(error, OverBudgetError):
            needing = [one for one in (known, error) if isinstance(one, OverBudgetError)]
            self.refusals[method] = min(needing, key=lambda one: one.needed_bytes)

    def _kept_densities(self, method: Method, format_name: Formats) -> Sequence[float | None]:
        """Returns the densities that keep the quality; raises ColdpressError with the reason if there are none."""
        floor, asked = self._floor, self._config.density
        if (reason := floor.why_unexplored(method)) is not None:
            raise ColdpressError(reason)
        if not floor.is_known(format_name, method):
            raise ColdpressError(f"{in_words(format_name)} was not measured with columns of down, which its units have")
        if not floor.curves.of(method):
            return (None,)  # every unit, or what zeros and predictors say
        held = self._resident_share(method, format_name)
        if asked is not None:
            ratio = floor.ratio(method, format_name, asked, held)
            if ratio is not None and ratio > floor.max_ppl_ratio:
                raise ColdpressError(
                    f"at density {asked:g} perplexity is {ratio:.3f} times the source's; the limit, max_ppl_ratio, is "
                    f"{floor.max_ppl_ratio:g}"
                )
            return (asked,)
        if math.isinf(floor.max_ppl_ratio):
            return (None,)  # from the budget
        least = floor.least_density(method, format_name, held)
        if least is None:
            raise ColdpressError(
                f"no density below 1 keeps perplexity within {floor.max_ppl_ratio:g} times the source's; "
                f"{in_words(format_name)} alone has {floor.format_ratio(format_name, method):.3f} times"
            )
        return (least, *(density for density in DENSITIES if density > least))

    def _resident_share(self, method: Method, format_name: Formats) -> float:
        if not load("coldpress.runtime.sparsity", Selector, method).SEES_RESIDENCY:
            return 0.0
        cache = caches_for(self._config.cache)[0]
        division = self._divided(Candidate(method, format_name, DENSITIES[0], cache, self.kv_caches[0]))
        return held_share(division, self._inputs.model)

    def _divided(self, candidate: Candidate, has_draft_model: bool = False) -> Sparsity:
        """Divides the budget with the same density in all layers: the rule runs for the chosen candidate alone."""
        config = self.config_of(candidate, has_draft_model).model_copy(update={"density_allocation": UNIFORM})
        return divided(config, self._inputs, formats=candidate.format)

    def tokens(self, candidate: Candidate) -> tuple[Sparsity, list[TokenCost]]:
        division = self._divided(candidate)
        return division, self._replays.tokens(division, candidate.routing)

    def _cost(self, candidate: Candidate) -> Judged:
        self._check_attention(candidate)
        division = self._divided(candidate)
        token_s, hit_rate = self._replays.of(division, candidate.routing)
        drafting = self._drafts.of(division, token_s, lambda: self._divided(candidate, has_draft_model=True))
        if drafting is not None:
            division, token_s = drafting
        model, budget = self._inputs.model, division.budget
        density, held = division.mlp_density(model.spec), held_share(division, model)
        units = flash_bytes(division.families, model.spec, division.formats)
        is_whole = load("coldpress.runtime.sparsity", Selector, candidate.method).is_whole
        whole = units <= budget.cache_bytes + budget.buffer_bytes
        used = budget.dram_budget_bytes - (budget.cache_bytes + budget.buffer_bytes - units if whole else 0)
        ratio = self._ratio(candidate, density, held)
        return Judged(
            candidate,
            token_s,
            ratio,
            hit_rate,
            used,
            density,
            is_whole and candidate.routing is None,
            whole,
            has_draft_model=drafting is not None,
        )

    def _check_attention(self, candidate: Candidate) -> None:
        name = coarsest(candidate.format)
        if candidate.streams_attention and (role := misfit(name, self._inputs.model.spec)):
            raise ColdpressError(f"attention would be read from flash in {name}, which cannot hold columns of {role}")

    def _ratio(self, candidate: Candidate, density: float, held: float) -> float | None:
        """Returns the perplexity ratio to expect; None if nobody knows. Raises ColdpressError if keys and values lose
        more than the density and the format leave."""
        floor, kv_cache = self._floor, candidate.kv_cache
        ratio, of_keys = floor.ratio(candidate.method, candidate.format, density, held), floor.kv_cache_ratio(kv_cache)
        if ratio is None or of_keys is None:
            return None
        ratio *= 1.0 if candidate.routing is None else floor.routing_ratio(candidate.routing, held)
        if of_keys * ratio > floor.max_ppl_ratio >= ratio:
            raise ColdpressError(
                f"keys and values in {kv_cache} take perplexity from {ratio:.3f} to {of_keys * ratio:.3f} times the "
                f"source's; the limit, max_ppl_ratio, is {floor.max_ppl_ratio:g}"
            )
        return of_keys * ratio


@dataclass(frozen=True)
class Searched:
    judge: BudgetJudge
    goal: Goal
    search: Search
    space: Space
    judged: list[Judged] = field(default_factory=list)
    alone: Judged | None = None
    """The choice of this budget by itself, where several budgets share another one."""

    def within(self, space: Space) -> "Searched":
        return replace(self, judged=self.search(space, self.judge, self.goal))

    @cached_property
    def best(self) -> Judged | None:
        return self.goal.best(self.judged)

    @property
    def dense(self) -> Judged | None:
        return fastest_dense(self.judged)

    @property
    def tried(self) -> tuple[Tried, ...]:
        """The best candidate of each selector, the taken one first; empty if none fits."""
        if self.best is None:
            return ()
        return tried_of(self.best, self.judge.judged, self.judge.refusals, self.goal, self.alone)

    @property
    def refusal(self) -> ColdpressError:
        """The refusal that needs the least DRAM; the first refusal if none was for lack of DRAM."""
        needing = [one for one in self.judged if one.needed_bytes is not None]
        if not needing:
            return next(iter(self.judge.refusals.values()))
        least = min(needing, key=lambda one: one.needed_bytes or 0)
        return OverBudgetError(str(least.refusal), least.needed_bytes or 0)


def searched(
    config: AllocateConfig,
    inputs: AllocationInputs,
    floor: Floor,
    narrowed: Callable[[Space], Space] = lambda space: space,
    replays: Replays | None = None,
    search: Search = beam.judged,
) -> Searched:
    """Searches one budget of a build whose method is open, in the space that `narrowed` leaves. Searches of several
    budgets share `replays`, which hold the trace. Raises DoesNotFitError if the device has less DRAM."""
    asked_budgets_of(config, inputs.model, inputs.device)
    replays = replays or Replays(inputs)
    judge = BudgetJudge(config, inputs, floor, replays)
    goal = Goal(None if config.min_tokens_per_s is None else 1 / config.min_tokens_per_s)
    space = narrowed(judge.space)
    return Searched(judge, goal, search, space).within(space)
