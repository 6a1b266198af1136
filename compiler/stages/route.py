"""route: settles how much each layer's router prefers experts in DRAM, for the fewest reads that a quality allows.

A router that prefers experts in DRAM (runtime/routing) reads less and is no longer the model's own. This stage gives
every layer of every plan a strength, such that the divergence from the model's own routing stays within `routing_kl`,
or with `routing=auto` within what the search of `allocate` took with one strength for all layers, on validation text,
token by token, with the plan's caches in the loop. First each layer runs alone with each strength; the figures
give divisions among layers (`Effects`), and equal strengths are candidates, too. Whole models run with both, in rounds.
A build has this stage only if its routing may be another than the model's own.
"""

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from coldpress.compiler.activity.cached_routing import CachedRouting
from coldpress.compiler.activity.calibration_pass import ComputeConfig, stream_of
from coldpress.compiler.activity.variants import compare, state_error
from coldpress.compiler.block_statistics import standard_error
from coldpress.compiler.candidates import AUTO
from coldpress.compiler.io import load_arrays
from coldpress.compiler.seconds import WORTH, Setting, built_orders, built_ranks, filling_requests
from coldpress.compiler.shared_settings import RoutingLimitSetting
from coldpress.compiler.steps import Steps
from coldpress.runtime.cache import CachePolicy
from coldpress.runtime.dram.budget import holds_everything
from coldpress.runtime.plugins import load
from coldpress.runtime.routing import EXACT, PACKAGE, Routing
from coldpress.runtime.sparsity import Selector
from coldpress.runtime.store.slots import parts_of
from coldpress.schemas.corpus import Corpus
from coldpress.schemas.device import DeviceProfile
from coldpress.schemas.families import FamilyName
from coldpress.schemas.layout import Layout, Plan, RoutingName
from coldpress.schemas.model import Model
from coldpress.schemas.order import Order
from coldpress.schemas.placement import Placement
from coldpress.schemas.plans import PlanChoice, Plans, RoutingChoice
from coldpress.schemas.preflight import StageNeeds
from coldpress.schemas.sparsity import Sparsity

if TYPE_CHECKING:
    from torch import Tensor

    from coldpress.compiler.needs import Build

LOG = logging.getLogger(__name__)
STRENGTHS = (0.0, 0.025, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.6, 0.8, 1.2)
"""The strengths that a layer may have; more than 1.2 of the scores' range changes nothing but ties."""
WAYS, DIVISIONS, ROUNDS = 2, 6, 2
"""Ways to divide, the divisions that a round measures together, and the rounds of each way."""
SMALLEST = 1e-2
"""The lowest level of the first round."""
MOST_TOKENS = 1024
"""Validation tokens that a routing is settled on; whole blocks, at least one."""
TINY = 1e-30
"""Stands for errors of 0 in ratios."""


class RouteConfig(ComputeConfig, RoutingLimitSetting):
    """Settings of `route`."""


class StrengthStep(NamedTuple):
    per_error: float
    """Misses saved, over the error that it adds."""
    layer: int
    strength: int
    """The index of the strength."""
    before: int
    """The index of the strength before it."""
    error: float
    """Its addition to the sum of errors."""


@dataclass(frozen=True)
class Effects:
    """Effects of strengths in each layer, while the others route as the model was trained to; L layers, S strengths.

    In each layer a larger strength misses less and errs more. Errors of single layers nearly add up, so that the best
    divisions give every layer the strength at which another missing unit costs the same error (a Lagrange multiplier):
    steps along each layer's convex hull, the cheapest first.
    """

    strengths: np.ndarray
    """float64 [S], ascending from 0."""
    errors: np.ndarray
    """float64 [L, S]: the squared error of the hidden states after the layer, over them, on average over tokens."""
    misses: np.ndarray
    """int64 [L, S]: units that tokens used and DRAM did not hold."""

    @cached_property
    def steps(self) -> tuple[StrengthStep, ...]:
        """The steps of all layers, those that save the most misses for their error first."""
        found = [step for layer in range(len(self.errors)) for step in self._of_layer(layer)]
        return tuple(sorted(found, key=lambda step: (-step.per_error, step.layer, step.strength)))

    @property
    def largest_error(self) -> float:
        return sum(step.error for step in self.steps)

    def divided(self, error: float) -> np.ndarray:
        """Returns strengths float64 [L] whose errors sum to `error`: the first steps, and a part of the next one."""
        found, left = np.zeros(len(self.errors)), error
        for step in self.steps:
            share = min(1.0, left / step.error) if step.error > 0 else 1.0
            low, high = self.strengths[[step.before, step.strength]]
            found[step.layer] = low + share * (high - low)
            left -= step.error
            if left <= 0:
                break
        return found

    def _of_layer(self, layer: int) -> list[StrengthStep]:
        """Returns the steps along a layer's convex hull, from strength 0, by falling savings for their error."""
        errors, misses, found, now = self.errors[layer], self.misses[layer], [], 0
        while True:
            further = [
                StrengthStep(
                    float(misses[now] - misses[at]) / max(float(errors[at] - errors[now]), TINY), layer, at, now, 0.0
                )
                for at in range(now + 1, errors.size)
                if misses[at] < misses[now]
            ]
            if not further:
                return found
            best = max(further, key=lambda step: (step.per_error, step.strength))
            found.append(best._replace(error=max(0.0, float(errors[best.strength] - errors[now]))))
            now = best.strength


def run(
    config: RouteConfig,
    model: Model,
    sparsity: Sparsity,
    plans: Plans,
    layout: Layout,
    order: tuple[Order, ...],
    placement: Placement,
    device: DeviceProfile,
    corpus: Corpus,
    threads: int,
) -> Plans:
    """Returns the plans with the strengths of their routers; a plan for which routing saves nothing stays as it is."""
    stream, _ = stream_of(config, model, threads)
    blocks = load_arrays(corpus.split("validation").arrays, "tokens")["tokens"]
    tokens = blocks[: max(1, MOST_TOKENS // blocks.shape[1])]
    orders, ranks = built_orders(order), built_ranks(placement, layout.sections)
    found: list[tuple[Plan, PlanChoice]] = []
    for plan, choice, decision in zip(plans.plans, plans.choices, sparsity.decisions, strict=True):
        routing, most_kld = _limit(config, decision)
        if (why_not := _why_not(plan, layout, routing)) is not None:
            found.append((plan, _because(choice, why_not)))
            continue
        setting = Setting(model, decision.formats, device, layout.sections, plan, orders, ranks)
        (family,) = decision.families
        caches = functools.partial(full_cache, setting, family=family)
        search = _Search(CachedRouting(stream, load(PACKAGE, Routing, routing), caches), tokens, most_kld)
        found.append(_settled(plan, choice, routing, search))
        LOG.info("route: %s: %s", plan.name, found[-1][1].reasons[-1])
    settled = {"plans": tuple(plan for plan, _ in found), "choices": tuple(choice for _, choice in found)}
    return plans.model_copy(update=settled)


def needs(build: "Build") -> StageNeeds:
    spec = build.model.spec
    tokens = max(MOST_TOKENS, build.block_tokens)
    variants = max(len(STRENGTHS), DIVISIONS)
    hidden = (2 * variants + 2) * 4 * tokens * spec.hidden_size
    logits = 4 * 4 * 4 * build.block_tokens * spec.vocab_size
    return StageNeeds(
        stage="route",
        ram_bytes=build.TORCH_BYTES + build.layer_weights_bytes + build.running_bytes(8) + hidden + logits,
        disk_bytes=0,
    )


@dataclass(frozen=True)
class _Measured:
    level: float
    """Extent to which this division is followed, from not at all (0) to fully (1)."""
    strengths: np.ndarray
    """float64 [num_layers]."""
    kld: float
    kld_error: float
    """Mean divergence over tokens, and its standard error over blocks; 0 for one block."""
    misses: int


@dataclass(frozen=True)
class _Search:
    routing: CachedRouting
    tokens: np.ndarray
    """Validation text, int [num_blocks, T]."""
    most_kld: float

    def best(self) -> tuple[_Measured | None, int]:
        """Returns the best division, None if none keeps the budget, and the misses of the model's own routing."""
        layers = self.routing.stream.spec.num_hidden_layers
        steps = Steps("route", layers + WAYS * ROUNDS, "layers and rounds")
        effects, whole = self._effects(steps)
        errors = effects.largest_error
        found = [
            *self._along(lambda level: np.full(layers, level * STRENGTHS[-1]), whole, steps),
            *self._along(lambda level: effects.divided(level * errors), whole, steps),
        ]
        kept = [one for one in found if self._within(one)]
        return min(kept, key=lambda one: (one.misses, one.kld), default=None), int(effects.misses[:, 0].sum())

    def _effects(self, steps: Steps) -> tuple[Effects, "Tensor"]:
        import torch

        stream, count = self.routing.stream, len(STRENGTHS)
        errors, misses = (np.zeros((stream.spec.num_hidden_layers, count), kind) for kind in (np.float64, np.int64))
        hidden = stream.embed(self.tokens)
        for layer in range(len(errors)):
            after, misses[layer] = self.routing.run_layer(layer, torch.cat([hidden] * count), np.array(STRENGTHS))
            each = after.reshape(count, *hidden.shape)
            hidden = each[0].clone()
            errors[layer] = [state_error(one, hidden) for one in each]
            steps.add()
        return Effects(np.array(STRENGTHS), errors, misses), hidden

    def _along(self, divided: Callable[[float], np.ndarray], whole: "Tensor", steps: Steps) -> list[_Measured]:
        """Measures divisions at levels; the later ones lie between the highest that kept the budget and the next."""
        found: list[_Measured] = []
        levels = np.geomspace(SMALLEST, 1.0, DIVISIONS)
        for _ in range(ROUNDS):
            found += self._measured(levels, [divided(level) for level in levels.tolist()], whole)
            steps.add()
            low = max((one.level for one in found if self._within(one)), default=0.0)
            levels = np.linspace(low, min((one.level for one in found if one.level > low), default=low), DIVISIONS + 2)
            levels = levels[1:-1]
        return found

    def _measured(self, levels: np.ndarray, strengths: Sequence[np.ndarray], whole: "Tensor") -> list[_Measured]:
        hidden, misses = self.routing.run(self.tokens, np.array(strengths))
        differences = compare(self.routing.stream, self.tokens, whole, hidden)
        by_block = differences.kld_sums / self.tokens.shape[1]
        return [
            _Measured(
                level,
                strengths[number],
                float(by_block[number].mean()),
                float(np.nan_to_num(standard_error(by_block[number]))),
                int(misses[number].sum()),
            )
            for number, level in enumerate(levels.tolist())
        ]

    def _within(self, one: _Measured) -> bool:
        """Adds one standard error: the artifact is judged on other text."""
        return one.kld + one.kld_error <= self.most_kld


def _limit(config: RouteConfig, decision: Sparsity) -> tuple[RoutingName, float]:
    """Returns a routing, and the most divergence in nats per token; 0 if routers choose as the model was trained."""
    if config.routing != AUTO:
        return config.routing, config.routing_kl
    found = decision.routing
    return (EXACT, 0.0) if found is None else (found.routing, found.mean_kld)


def _settled(plan: Plan, choice: PlanChoice, routing: RoutingName, search: _Search) -> tuple[Plan, PlanChoice]:
    best, exact = search.best()
    most = f"within {search.most_kld:g} nats a token"
    if best is None or best.misses >= WORTH * exact:
        return plan, _because(choice, f"routers choose as the model was trained: {routing} saves nothing {most}")
    ratio = best.misses / exact
    reason = (
        f"{routing} reads {ratio:.2f} of the units that the model's own routing would, and diverges from it by "
        f"{best.kld:.4f} nats a token, {most}"
    )
    strengths = tuple(best.strengths.tolist())
    found = RoutingChoice(mean_kld=best.kld, mean_kld_error=best.kld_error, miss_ratio=ratio)
    return (
        plan.model_copy(update={"routing": routing, "routing_strengths": strengths}),
        _because(choice, reason).model_copy(update={"routing": found}),
    )


def _why_not(plan: Plan, layout: Layout, routing: RoutingName) -> str | None:
    if routing == EXACT:
        return "routers choose as the model was trained: no candidate that prefers experts in DRAM was clearly faster"
    if holds_everything(plan, layout.sections):
        return "routers choose as the model was trained: DRAM holds every expert"
    if not load("coldpress.runtime.sparsity", Selector, plan.method).is_whole:
        return f"routers choose as the model was trained: {plan.method} already leaves out units of experts"
    if plan.draft is not None:
        return f"routers choose as the model was trained: what is in DRAM must not change drafts of {plan.draft}"
    return None


def _because(choice: PlanChoice, reason: str) -> PlanChoice:
    return choice.model_copy(update={"reasons": (*choice.reasons, reason)})


def full_cache(setting: Setting, layer: int, family: FamilyName) -> CachePolicy:
    """Returns the cache of a family of a layer after requests for all of its units, those most worth DRAM the last."""
    artifact, plan = setting.artifact, setting.plan
    alone = plan.model_copy(update={"parts": tuple(part for part in plan.parts if part.layer == layer)})
    cache = parts_of(artifact, alone)[layer, family].cache
    for ids in filling_requests(artifact.rank(layer, family)):
        cache.serve(ids)
    cache.reset()
    return cache
