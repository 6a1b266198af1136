"""allocate: `auto` under several DRAM budgets, which share selector and format, each with its own density and cache."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.shared.searches import exhaustive
from coldpress.compiler.candidates import caches_for
from coldpress.compiler.io import Workspace
from coldpress.compiler.search import MARGIN, Candidate, Goal, Judged, Space, beam, budgets
from coldpress.compiler.search.density import AllocationInputs
from coldpress.compiler.search.floor import Floor
from coldpress.compiler.search.judge import Searched, searched
from coldpress.compiler.search.settings import AllocateConfig
from coldpress.compiler.sections import Whole
from coldpress.compiler.stages import allocate
from coldpress.schemas.activations import Activations
from coldpress.schemas.curves import KvCacheLoss
from coldpress.schemas.errors import ColdpressError
from coldpress.schemas.model import Model
from coldpress.schemas.sparsity import Sparsity
from tests.support.curves import NO_LOSS, curves_of
from tests.support.statistics import activations_of, device_of, model_of

LAYERS, HIDDEN, UNITS, TOKENS = 11, 1024, 1024, 8
BUDGETS = ("60%", "80%", "200MB")
CURVE = {0.3: 1.045, 0.5: 1.03, 0.7: 1.02, 0.9: 1.01}
DEVICE = device_of(read_curve=((4096, 1.2e9), (65536, 2e9)), latency_s=1e-6)
"""Flash on which a unit of a page is worth a read of its own."""


@pytest.fixture(scope="module")
def model() -> Model:
    """Without exact zeros."""
    return model_of(LAYERS, HIDDEN, UNITS, hidden_act="silu")


@pytest.fixture(scope="module")
def activations(tmp_path_factory: pytest.TempPathFactory) -> Activations:
    active = np.random.default_rng(1).random((UNITS, TOKENS)) < 0.5
    families = dict.fromkeys(("neuron", "up_down", "mlp_mid", "gate_down"), active) | {"mlp_in": active[:HIDDEN]}
    return activations_of(tmp_path_factory.mktemp("activations"), [families] * LAYERS, exact_zeros=False)


def config_of(**changes: Any) -> AllocateConfig:
    values: dict[str, Any] = {"method": "auto", "format": "fp16", "cache": "auto", "context_length": 128}
    values |= {"dram_budget": ",".join(BUDGETS), "density_allocation": "uniform"}
    return AllocateConfig(**(values | changes))


def divided(folder: Path, model: Model, activations: Activations, **changes: Any) -> Sparsity:
    config = config_of(**changes)
    work = Workspace(folder / "allocate", config.to_json())
    curves = curves_of(model, folder / "curves", {"topk": CURVE}, num_tokens=TOKENS)
    return allocate.run(config, model, activations, DEVICE, work, curves=curves)


@pytest.fixture(scope="module")
def found(model: Model, activations: Activations, tmp_path_factory: pytest.TempPathFactory) -> Sparsity:
    return divided(tmp_path_factory.mktemp("found"), model, activations)


def test_each_budget_has_its_own_density(found: Sparsity) -> None:
    """Budgets that must read use as few units as the quality allows; with room for everything nothing is left out."""
    assert (found.method, len(found.decisions)) == ("topk", 3)
    densities = [{share for entry in decision.densities for share in entry.per_layer} for decision in found.decisions]
    assert densities[0] == {1.0}
    for density in densities[1:]:
        assert max(density) == pytest.approx(0.3, abs=0.01)
    assert found.tried[0].reason is not None
    assert found.tried[0].reason.startswith("the whole model fits in DRAM")
    assert found.tried[0].ppl_ratio == 1.0


def test_no_budget_is_slower_than_a_dense_run_in_it(found: Sparsity) -> None:
    for decision in found.decisions:
        taken, *others = decision.tried
        (dense,) = [entry for entry in others if entry.method == "dense"]
        assert taken.token_s is not None
        assert dense.token_s is not None
        assert taken.token_s <= (1 + MARGIN) * dense.token_s
        assert taken.dram_bytes is not None
        assert taken.dram_bytes <= decision.budget.dram_budget_bytes


@pytest.mark.parametrize(
    "settings", [pytest.param({}, marks=pytest.mark.slow), {"cache": "lfu", "min_tokens_per_s": True}]
)
def test_each_budget_alone_takes_the_same_of_what_they_share(
    model: Model, activations: Activations, found: Sparsity, tmp_path: Path, settings: dict[str, Any]
) -> None:
    """All densities and caches are judged for each budget, in tables for three plans."""
    middle, smallest = (decision.tried[0].token_s or 0.0 for decision in found.decisions[1:])
    enough_s = (middle + smallest) / 2  # the middle budget reaches that with more units than it must use
    settings = settings | ({"min_tokens_per_s": 1 / enough_s} if settings else {})
    together = divided(tmp_path, model, activations, **settings) if settings else found
    curves = curves_of(model, tmp_path / "curves", {"topk": CURVE}, num_tokens=TOKENS)
    caches = caches_for(str(settings.get("cache", "auto")))
    work = Workspace(tmp_path / "alone", "test")
    inputs = AllocationInputs(model, activations, DEVICE, work, None, 1, curves, len(BUDGETS), caches)

    def narrowed(space: Space) -> Space:
        own = space.densities
        return replace(space, methods=("topk",), densities=lambda *which: (*own(*which), 1.0))

    for decision, budget in zip(together.decisions, reversed(BUDGETS), strict=True):
        config = config_of(dram_budget=budget, **settings)
        judged = searched(config, inputs, Floor(curves, 1.05), narrowed, search=exhaustive).judged
        wanted = judged if judged[0].holds_everything else [min(judged, key=lambda one: one.token_s)]
        if settings:
            wanted = [one for one in judged if one.token_s <= enough_s] or wanted
        best = min(wanted, key=lambda one: (one.ppl_ratio, one.token_s))
        assert (decision.tried[0].density, decision.tried[0].token_s) == (best.density, best.token_s)
        assert best.holds_everything or decision.cache == best.candidate.cache
    assert len({decision.tried[0].density for decision in together.decisions}) == (3 if settings else 2)


def kept_keys(folder: Path, model: Model, activations: Activations, lost: float, **settings: Any) -> Sparsity:
    """The choice where int8 keys and values lose this share of perplexity."""
    config = config_of(**{"kv_cache": "auto", "dram_budget": "80%"} | settings)
    known = curves_of(model, folder / "curves", {"topk": CURVE}, num_tokens=TOKENS)
    loss = KvCacheLoss(kv_cache="int8", ppl_ratio=1 + lost, **NO_LOSS)
    work = Workspace(folder / "allocate", config.to_json())
    return allocate.run(
        config, model, activations, DEVICE, work, curves=known.model_copy(update={"kv_caches": (loss,)})
    )


@pytest.mark.slow
def test_keys_and_values_make_room_where_that_keeps_the_quality(activations: Activations, tmp_path: Path) -> None:
    """A context as long as this takes half of the budget in fp16. The budget is in bytes: a share would be one of what
    the build takes with the keys and values that it has."""
    model = model_of(LAYERS, HIDDEN, UNITS, hidden_act="silu", max_position_embeddings=8192)
    settings = {"context_length": 4096, "dram_budget": 186_000_000}
    found = kept_keys(tmp_path / "0", model, activations, 0.001, **settings)
    plain = kept_keys(tmp_path / "1", model, activations, 0.001, kv_cache="fp16", **settings)
    assert (found.kv_cache, plain.kv_cache) == ("int8", "fp16")
    assert found.budget.kv_cache_bytes * 32 == plain.budget.kv_cache_bytes * 17
    assert found.budget.dram_budget_bytes == plain.budget.dram_budget_bytes
    seconds = [sparsity.tried[0].token_s for sparsity in (found, plain)]
    assert seconds[0] is not None
    assert seconds[1] is not None
    assert seconds[0] < (1 - MARGIN) * seconds[1]
    assert found.tried[0].reason is not None
    assert "; keys and values in int8, since fp16 takes" in found.tried[0].reason
    assert kept_keys(tmp_path / "2", model, activations, 0.1, **settings).kv_cache == "fp16", "beyond the floor"
    several = kept_keys(tmp_path / "3", model, activations, 0.001, **settings | {"dram_budget": "80%,90%"})
    assert {decision.kv_cache for decision in several.decisions} == {"int8"}, "all plans of an artifact share it"


def test_what_the_user_gives_holds_for_every_budget(model: Model, activations: Activations, tmp_path: Path) -> None:
    found = divided(tmp_path, model, activations, density=0.3, cache="lru")
    assert found.method == "topk"
    assert {decision.cache for decision in found.decisions} == {"lru"}
    assert [decision.densities for decision in found.decisions] == [found.densities] * 3
    assert found.tried[0].density == pytest.approx(0.3, abs=0.01)


@pytest.mark.slow
def test_the_same_inputs_give_the_same_record(
    found: Sparsity, model: Model, activations: Activations, tmp_path: Path
) -> None:
    again = divided(tmp_path, model, activations)

    def content(sparsity: Sparsity) -> list[dict[str, Any]]:
        hashes = [None if decision.arrays is None else decision.arrays.sha256 for decision in sparsity.decisions]
        places: dict[str, Any] = {"arrays": True, "curves": {"trace": {"array_file"}}}
        return [
            decision.model_dump(exclude=places) | {"sha256": own}
            for decision, own in zip(sparsity.decisions, hashes, strict=True)
        ]

    assert content(again) == content(found)


# What is shared


@dataclass
class Judge:
    """Judges by a table: method -> seconds at the lowest density."""

    seconds: Mapping[str, float]
    holds_everything: bool
    dram_budget_bytes: int = 1
    refusals: dict[str, ColdpressError] = field(default_factory=dict)
    known: dict[Candidate, Judged] = field(default_factory=dict)

    @property
    def space(self) -> Space:
        return Space(tuple(self.seconds), ("fp16",), ("lfu",), self.densities)

    @property
    def judged(self) -> tuple[Judged, ...]:
        return tuple(self.known.values())

    def densities(self, method: str, _: str) -> Sequence[float | None]:
        return (None,) if method == "dense" else (0.5,)

    def up_to_all(self, _: str, known: Sequence[float | None]) -> Sequence[float | None]:
        return known if None in known else (*known, 1.0)

    def config_of(self, candidate: Candidate, has_draft_model: bool = False) -> Candidate:
        return candidate

    def budget_bytes(self, _: Candidate) -> int:
        return self.dram_budget_bytes

    def __call__(self, candidate: Candidate) -> Judged:
        density = candidate.density or 1.0
        token_s = self.seconds[candidate.method] * (2 * density if candidate.density else 1.0)
        self.known[candidate] = Judged(
            candidate,
            token_s,
            1.05 - 0.05 * density,
            hit_rate=None if candidate.method == "dense" else 0.5,
            density=density,
            is_whole=candidate.method == "dense",
            holds_everything=self.holds_everything,
        )
        return self.known[candidate]


@pytest.mark.parametrize(
    ("fits", "tables", "taken"),
    [
        # the same is best under both
        (False, [{"dense": 2.0, "topk": 1.0}, {"dense": 4.0, "topk": 2.0}], "topk"),
        # where everything fits, whole top-k is nearly as fast as dense
        (True, [{"dense": 1.0, "topk": 0.51}, {"dense": 4.0, "topk": 2.0}], "topk"),
        # there it would be a tenth slower
        (True, [{"dense": 1.0, "topk": 0.55}, {"dense": 4.0, "topk": 3.0}], "dense"),
        # each is best under one budget, and gate is not far from the best under the other
        (False, [{"dense": 2.0, "gate": 1.0, "topk": 1.5}, {"dense": 4.0, "gate": 2.1, "topk": 2.0}], "gate"),
        (False, [{"dense": 2.0, "gate": 1.0, "topk": 1.1}, {"dense": 4.0, "gate": 2.6, "topk": 2.0}], "topk"),
    ],
)
def test_all_budgets_share_what_suits_them_together(
    monkeypatch: pytest.MonkeyPatch, fits: bool, tables: list[dict[str, float]], taken: str
) -> None:
    """The largest budget comes first, and `fits` is about it. A whole selector takes twice as long as a half one."""
    goal = Goal()
    judges = {2: Judge(tables[0], fits), 1: Judge(tables[1], False)}

    def searched_alone(config: AllocateConfig, *_: object) -> Searched:
        judge = judges[int(config.dram_budget)]
        return Searched(judge, goal, beam.judged, judge.space).within(judge.space)  # type: ignore[arg-type]

    monkeypatch.setattr(budgets, "searched", searched_alone)
    found = budgets.choices(config_of(), None, None, [2, 1])  # type: ignore[arg-type]
    assert [one.tried[0].method for one in found] == [taken] * 2
    shared = [" all budgets share " in (one.tried[0].reason or "") for one in found]
    own = [goal.best(beam.judged(judge.space, judge, goal)) for judge in map(Judge, tables, (fits, False))]
    assert shared == [best is not None and best.candidate.method != taken for best in own]


@pytest.mark.slow
def test_a_share_is_one_of_what_the_chosen_formats_take(tmp_path: Path, model: Model, activations: Activations) -> None:
    """While int4 loses too much, three quarters of a model are those of int8, not of the format that is not taken."""
    losses = {"q4_1": 1.2, "int4_group32": 1.3, "int8_group32": 1.001}
    curves = curves_of(model, tmp_path / "curves", {"topk": CURVE}, losses, num_tokens=TOKENS)
    for budget in ("75%", "75%,90%"):
        config = config_of(format="auto", dram_budget=budget)
        work = Workspace(tmp_path / budget, config.to_json())
        found = allocate.run(config, model, activations, DEVICE, work, curves=curves)
        assert found.format == "int8_group32"
        shape = model, found.format, 128, found.kv_cache, DEVICE.flash.page_bytes.value, caches_for("auto")
        assert [decision.budget.dram_budget_bytes for decision in found.decisions] == list(
            Whole(*shape).budgets(budget)
        )


def test_a_share_that_only_a_larger_format_makes_enough_is_no_refusal(
    tmp_path: Path, model: Model, activations: Activations
) -> None:
    """What stays in DRAM is half of the model in int4 and less in int8: the head takes as much in both."""
    losses = {"q4_1": 1.2, "int4_group32": 1.3, "int8_group32": 1.001}
    wide = model_of(LAYERS, HIDDEN, UNITS, hidden_act="silu", vocab_size=20_000)
    curves = curves_of(wide, tmp_path / "curves", {"topk": CURVE}, losses, num_tokens=TOKENS)
    config = config_of(format="auto", dram_budget="65%")
    found = allocate.run(config, wide, activations, DEVICE, Workspace(tmp_path / "a", "a"), curves=curves)
    in_int4 = tuple(Whole(wide, "int4_group32", 128, "fp16", 4096, caches_for("auto")).budgets("65%"))
    assert found.budget.resident_bytes + found.budget.kv_cache_bytes + found.budget.bookkeeping_bytes > in_int4[0]
