"""route: strengths of routers that prefer experts in DRAM, held against a run of the artifact, and against all other
divisions of an error among layers."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coldpress.compiler.activity.cached_routing import CachedRouting
from coldpress.compiler.activity.forward import LayerStream
from coldpress.compiler.io import load_arrays, load_record
from coldpress.compiler.seconds import FILLING, Setting
from coldpress.compiler.stages import route
from coldpress.compiler.stages.route import Effects, RouteConfig, full_cache
from coldpress.compiler.workflow.settings import resolve
from coldpress.runtime.artifact.reader import open_artifact
from coldpress.runtime.dram.budget import refit, used_bytes, whole_bytes
from coldpress.runtime.generate.session import Session
from coldpress.runtime.plugins import load
from coldpress.runtime.routing import PACKAGE, Routing
from coldpress.schemas.corpus import Corpus
from coldpress.schemas.device import DeviceProfile
from coldpress.schemas.errors import ColdpressError
from coldpress.schemas.families import BLOCKS, num_units
from coldpress.schemas.layout import Layout, PartPlan, Plan
from coldpress.schemas.order import Order
from coldpress.schemas.placement import Placement
from coldpress.schemas.plans import Plans
from coldpress.schemas.sparsity import SearchedRouting, Sparsity, Tried
from tests.support.artifacts import change_manifest
from tests.support.product import Case, Source, compiled, source_of

LAYERS, EXPERTS = 11, 8
HELD = 3
"""Experts of a layer that DRAM holds."""


class Built:
    """A mixture that was built with everything in DRAM, and plans that hold a part of it."""

    def __init__(self, folder: Path) -> None:
        self.source: Source = source_of(folder, "mixtral", relu=False, layers=LAYERS, num_local_experts=EXPERTS)
        self.build = folder / "build"
        self.artifact = compiled(self.source, Case("mixtral", "dense", "fp16"), self.build)
        self.opened = open_artifact(self.artifact)
        self.corpus = load_record(folder / "tokenize.json", Corpus)
        self.tokens = load_arrays(self.corpus.split("validation").arrays, "tokens")["tokens"][:2]
        self.sparsity, self.layout = self._record("allocate", Sparsity), self._record("layout", Layout)
        self.order, self.placement = (self._record("order", Order),), self._record("place", Placement)
        self.device, self.plans = self._record("device", DeviceProfile), self._record("plan", Plans)

    @property
    def units_of_expert(self) -> int:
        return num_units(BLOCKS, self.source.model.spec) // EXPERTS

    def _record(self, stage: str, kind: Any) -> Any:
        return load_record(self.build / f"{stage}.json", kind)

    def plan(self, cache: str) -> Plan:
        """Returns a plan with HELD experts of each layer, pinned or in slots."""
        count = HELD * self.units_of_expert
        pinned, slots = (count, 0) if cache == "static" else (0, count)
        parts = tuple(
            PartPlan(layer=layer, family=BLOCKS, density=part.density, num_pinned=pinned, cache_slots=slots)
            for layer, part in enumerate(self.plans.plans[0].parts)
        )
        plan = self.plans.plans[0].model_copy(update={"cache": cache, "parts": parts})
        budget_bytes = used_bytes(self.opened.manifest, plan)  # a larger one would pin more
        return plan.model_copy(update={"dram_budget_bytes": budget_bytes})

    def routed(self, plan: Plan, **settings: Any) -> Plans:
        """Runs the stage."""
        plans = self.plans.model_copy(update={"plans": (plan,)})
        asked = {"routing": "cache_prior", "compute_dtype": "float32"}
        config = RouteConfig(**asked | settings)
        shared = (self.layout, self.order, self.placement, self.device, self.corpus)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(route, "MOST_TOKENS", self.tokens.size)
            return route.run(config, self.source.model, self.sparsity, plans, *shared, threads=2)

    def run(self, plan: Plan) -> tuple[np.ndarray, int]:
        """Decodes the validation text by the runtime; returns the logarithms of its probabilities and the misses."""
        change_manifest(self.artifact, lambda manifest: manifest.update(plans=[plan.model_dump(mode="json")]))
        with Session(self.artifact) as session:
            found: list[np.ndarray] = []
            for block in self.tokens:
                session.decoder.begin(len(block))
                found += [session.decoder.decode(int(token)) for token in block]
            logits = np.stack(found).astype(np.float64)
            return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True)), session.store.counters.misses


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return Built(tmp_path_factory.mktemp("route"))


@pytest.mark.parametrize("cache", [pytest.param("static", marks=pytest.mark.slow), "lru"])
def test_a_run_diverges_and_misses_as_the_record_says(built: Built, cache: str) -> None:
    """The runtime multiplies fp16 codes; its caches begin empty, those of the stage full."""
    exact = built.plan(cache)
    found = built.routed(exact, routing_kl=0.02)
    (plan,), (choice,) = found.plans, found.choices
    assert plan.routing == "cache_prior"
    assert len(plan.routing_strengths) == LAYERS
    record = choice.routing
    assert record is not None
    assert record.mean_kld + record.mean_kld_error <= 0.02
    assert choice.reasons[-1].startswith("cache_prior reads ")
    (before, all_misses), (after, misses) = built.run(exact), built.run(plan)
    kld = (np.exp(before) * (before - after)).sum(axis=1).mean()
    assert kld == pytest.approx(record.mean_kld, rel=0.1 if cache == "static" else 0.3)
    assert misses / all_misses == pytest.approx(record.miss_ratio, abs=0.01 if cache == "static" else 0.06)
    assert record.miss_ratio < route.WORTH


@pytest.mark.slow
def test_a_budget_that_nothing_keeps_leaves_the_models_routing(built: Built) -> None:
    plan = built.plan("static")
    none = built.routed(plan, routing_kl=1e-12)
    assert none.plans == (plan,)
    assert none.choices[0].routing is None
    assert "saves nothing within 1e-12" in none.choices[0].reasons[-1]


@pytest.mark.slow
def test_an_open_routing_goes_as_far_as_the_search_left(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = built.plan("static")
    exact = built.routed(plan, routing="auto")
    assert exact.plans == (plan,)
    assert "no candidate that prefers experts in DRAM" in exact.choices[0].reasons[-1]
    left = SearchedRouting(routing="cache_prior", strength=0.1, mean_kld=0.02)
    searched = built.sparsity.model_copy(update={"tried": (Tried(method="dense", routing=left),)})
    monkeypatch.setattr(built, "sparsity", searched)
    assert built.routed(plan, routing="auto", routing_kl=1e-12) == built.routed(plan, routing_kl=0.02)


def test_a_plan_that_reads_nothing_or_drafts_keeps_the_models_routing(built: Built) -> None:
    manifest = built.opened.manifest
    whole = refit(manifest, built.plans.plans[0], whole_bytes(manifest, built.plans.plans[0]))
    for plan, words in (
        (whole, "DRAM holds every expert"),
        (built.plan("lru").model_copy(update={"draft": "lookup", "draft_tokens": 2}), "drafts of lookup"),
    ):
        found = built.routed(plan)
        assert found.plans == (plan,)
        assert words in found.choices[0].reasons[-1]


def test_a_layer_misses_what_the_least_recently_used_experts_leave(built: Built) -> None:
    """The first layer, whose inputs do not depend on any routing: its router's choices, and a list as the cache. Units
    deserve DRAM by their id, so that each request that fills the cache brings one expert."""
    assert EXPERTS == FILLING
    model, stream = built.source.model, LayerStream(built.source.model)
    setting = Setting(model, "fp16", built.device, built.layout.sections, built.plan("lru"))
    way = load(PACKAGE, Routing, "cache_prior")
    routing = CachedRouting(stream, way, lambda layer: full_cache(setting, layer, BLOCKS))
    scores: list[np.ndarray] = []
    hidden = stream.embed(built.tokens[:1])
    stream.run_layer(0, hidden, lambda block: {"router_scores": lambda found: scores.append(found.numpy().copy())})
    _, misses = routing.run_layer(0, hidden, np.array([0.0]))
    held, expected = list(range(HELD))[::-1], 0
    for row in scores[0]:
        used = sorted(np.argsort(-row, kind="stable")[:2].tolist())
        expected += sum(expert not in held for expert in used)
        held = ([expert for expert in held if expert not in used] + used)[-HELD:]
    assert misses[0] == expected * built.units_of_expert


def test_no_other_division_of_the_same_error_misses_fewer_units() -> None:
    """All divisions of 11 layers with three strengths each."""
    random = np.random.default_rng(4)
    errors = np.cumsum(random.random((LAYERS, 3)), axis=1) * np.array([0.0, 1.0, 1.0])
    misses = 1000 - np.cumsum(random.integers(0, 300, (LAYERS, 3)), axis=1) * np.array([0, 1, 1])
    effects = Effects(np.array([0.0, 0.5, 1.0]), errors, misses.astype(np.int64))
    every = np.array(list(itertools.product(range(3), repeat=LAYERS)))
    layers = np.arange(LAYERS)
    of_every = errors[layers, every].sum(axis=1), misses[layers, every].sum(axis=1)
    total = 0.0
    for step in effects.steps:
        total += step.error
        found = np.rint(2 * effects.divided(total)).astype(int)
        assert errors[layers, found].sum() == pytest.approx(total)
        least = of_every[1][of_every[0] <= total * (1 + 1e-9)].min()
        assert misses[layers, found].sum() == least
    assert total == pytest.approx(effects.largest_error)


def test_a_strength_that_saves_nothing_is_no_step() -> None:
    errors, misses = np.array([[0.0, 0.1, 0.2], [0.0, 0.0, 0.3]]), np.array([[10, 10, 10], [10, 8, 9]])
    effects = Effects(np.array([0.0, 0.5, 1.0]), errors, misses)
    assert [(step.layer, step.strength) for step in effects.steps] == [(1, 1)]
    np.testing.assert_array_equal(effects.divided(effects.largest_error), [0.0, 0.5])


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({}, "has none"),
        ({"draft": "lookup"}, "draft=lookup"),
        ({"method": "topk"}, "method=topk"),
    ],
)
def test_a_routing_that_cannot_be_is_refused_before_anything_runs(
    built: Built, tmp_path: Path, keys: dict[str, str], words: str
) -> None:
    model = str(built.source.folder / "tiny") if keys else "relu-demo"
    with pytest.raises(ColdpressError, match=words):
        resolve({"model": model, "routing": "cache_prior", "build_dir": str(tmp_path), **keys})
