"""The simulated ladder: the same requests under one setting more at a time, on the device of the artifact."""

from pathlib import Path

import numpy as np
import pytest

from coldpress.compiler.dense_run import dense_for
from coldpress.compiler.stages.verify import ladder
from coldpress.compiler.stages.verify.ladder import Placed, climb, in_effect, simulated, structural
from coldpress.runtime.artifact.reader import open_artifact
from coldpress.runtime.cli.ladder import legend
from coldpress.runtime.generate.session import Session
from coldpress.runtime.simulate import simulate
from coldpress.runtime.store.planner import ARRIVAL_BYTES
from coldpress.runtime.trace import Recorder
from tests.support.artifacts import Recipe, build_artifact
from tests.support.shapes import small_spec
from tests.support.tiny import describe, tensor_shapes

SPEC = small_spec(num_hidden_layers=3)
MODEL = describe(SPEC, tensor_shapes(SPEC), Path("nowhere/model.safetensors"))
TOKENS = np.random.default_rng(5).integers(3, SPEC.vocab_size, (1, 26))


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    recipe = Recipe(spec=SPEC, method="topk", density=0.3, collapse_gap_bytes=4096, cache="lfu")
    return build_artifact(tmp_path_factory.mktemp("ladder") / "artifact", recipe).path


@pytest.fixture(scope="module")
def climbed(path):
    """(artifact, plan, what was asked for, the steps)."""
    recorder = Recorder()
    with Session(path, recorder=recorder) as session:
        session.perplexity(TOKENS, sparse=True)
        plan = session.plan
    artifact = open_artifact(path)
    return artifact, plan, recorder.events, climb(artifact, plan, recorder.events, MODEL)


def test_each_mechanism_is_a_step(climbed):
    steps = climbed[-1]
    assert [step.name for step in steps] == [
        "naive", "+overlap", "hybrid", "+selector topk", "+window", "+ordering", "+collapse 4096",
        "+collapse adaptive", "+cache lfu", "+linked over lfu",
    ]  # fmt: skip
    rate = steps[0].tokens_per_s
    for step in steps[1:]:
        assert step.gain == pytest.approx(step.tokens_per_s / rate)
        assert step.kept == (step.gain >= 1 or step.name in ("hybrid", "+selector topk", "+ordering"))
        rate = step.tokens_per_s if step.kept else rate
    assert steps[0].hit_rate == steps[1].hit_rate == 0 < steps[2].hit_rate


def test_naive_reads_the_whole_mlp_in_large_reads(climbed):
    """Not the artifact's columns, each of which begins with a first byte."""
    artifact, steps = climbed[0], climbed[-1]
    units = sum(
        section.num_units * section.unit_bytes * len(section.layers) for section in artifact.manifest.flash.sections
    )
    assert units <= steps[0].read_bytes_per_token < 1.2 * units
    assert steps[0].reads_per_token <= 2 * SPEC.num_hidden_layers


@pytest.mark.slow
@pytest.mark.parametrize("attention", [False, True])
def test_hybrid_is_the_dense_run_of_the_whole_report(tmp_path, attention):
    """Whatever lies on flash in the artifact: attention's columns would be streamed otherwise."""
    recipe = Recipe(spec=SPEC, method="topk", density=0.3, options={"attention": attention}, slots_share=0.4)
    path = build_artifact(tmp_path / "a", recipe).path
    recorder = Recorder()
    with Session(path, recorder=recorder) as session:
        session.perplexity(TOKENS, sparse=True)
        least = session.plan.dram_budget_bytes + 2 * SPEC.hidden_size**2 * SPEC.num_hidden_layers * 8
        plan = session.plan.model_copy(update={"dram_budget_bytes": least})
    artifact = open_artifact(path)
    dense, naive = (dense_for(MODEL, artifact.manifest, plan, naive=word) for word in (False, True))
    steps = {step.name: step for step in climb(artifact, plan, recorder.events, MODEL)}
    assert steps["hybrid"].tokens_per_s == dense.tokens_per_s
    assert steps["hybrid"].reads_per_token == dense.reads_per_token
    assert steps["+overlap"].tokens_per_s == naive.tokens_per_s <= dense.tokens_per_s
    assert naive.pinned_bytes == 0


def test_a_budget_without_room_for_a_dense_run_begins_with_the_selector(climbed, monkeypatch):
    artifact, plan, trace, _ = climbed
    monkeypatch.setattr("coldpress.compiler.stages.verify.ladder.dense_for", lambda *_, **__: None)
    steps = climb(artifact, plan, trace, MODEL)
    assert [step.name for step in steps][:3] == ["selector topk", "+overlap", "+window"]
    assert steps[0].gain == 1


def test_overlap_is_worth_nothing_where_a_layer_arrives_in_one_portion(climbed):
    """And is not kept then: nothing is left to be read while the units are computed with."""
    overlap = next(step for step in climbed[-1] if step.name == "+overlap")
    assert overlap.read_bytes_per_token / SPEC.num_hidden_layers < ARRIVAL_BYTES
    assert overlap.gain == pytest.approx(1)
    assert not overlap.kept


@pytest.mark.parametrize("cache", ["static", "lfu"])
def test_a_step_is_what_a_real_run_does_behind_its_first_half(path, climbed, cache):
    artifact, plan, trace, _ = climbed
    plan = plan.model_copy(update={"cache": cache})
    runs = []
    for count in (TOKENS.size, 2 + (TOKENS.size - 2) // 2):
        with Session(path, plan=plan) as session:
            runs.append(session.perplexity(TOKENS[:, :count], sparse=True).metrics)
    of = {name: getattr(runs[0], name) - getattr(runs[1], name) for name in ("num_tokens", "reads", "hits", "misses")}
    step = simulated(artifact, Placed(plan, "direct", ordered=True), trace)
    assert step.reads == of["reads"] / of["num_tokens"] > 0
    assert step.hit_rate == of["hits"] / (of["hits"] + of["misses"])


def test_the_models_own_order_only_changes_how_reads_lie(climbed):
    artifact, plan, trace, _ = climbed
    plan = plan.model_copy(update={"collapse_gap_bytes": 0})
    plain = structural(artifact)
    for section in artifact.manifest.flash.sections:
        np.testing.assert_array_equal(plain.order(section), np.arange(section.num_units))
    ours, theirs = simulate(artifact, plan, trace), simulate(plain, plan, trace)
    assert (ours.hits, ours.misses, ours.used_bytes) == (theirs.hits, theirs.misses, theirs.used_bytes)
    assert ours.extents_sha256 != theirs.extents_sha256


def test_a_dense_plan_has_no_ladder(climbed):
    artifact, plan, trace, _ = climbed
    assert climb(artifact, plan.model_copy(update={"method": "dense"}), trace, MODEL) == ()


def test_a_plan_that_prunes_nothing_has_no_ladder(climbed):
    """Its bars would be empty."""
    artifact, plan, trace, _ = climbed
    whole = tuple(part.model_copy(update={"density": 1.0}) for part in plan.parts)
    assert climb(artifact, plan.model_copy(update={"parts": whole}), trace, MODEL) == ()


def test_every_step_has_a_meaning(climbed):
    names = [step.name for step in climbed[-1]]
    meanings = dict(legend(names))
    assert [name for name in names if not name.startswith(tuple(meanings))] == []
    assert "LLM in a flash" in meanings["naive"]
    assert "the layout of a build with method=dense" in meanings["hybrid"]
    assert "+io_uring" not in meanings


@pytest.mark.slow
def test_what_is_preloaded_is_a_step_where_the_plan_preloads(tmp_path):
    path = build_artifact(tmp_path / "predicted", Recipe(method="predictor", spec=SPEC)).path
    recorder = Recorder()
    with Session(path, recorder=recorder, preload="on") as session:
        session.perplexity(TOKENS, sparse=True)
        plan = session.plan
    assert plan.preload_buffer_bytes
    artifact = open_artifact(path)
    assert climb(artifact, plan, recorder.events, MODEL)[-1].name == "+preload"
    off = plan.model_copy(update={"preload_buffer_bytes": 0})
    assert climb(artifact, off, recorder.events, MODEL)[-1].name == "+linked over lru"


def test_a_policy_without_slots_is_simulated_once(climbed, monkeypatch):
    """Its steps have the figures that they have alone, bit for bit."""
    artifact, plan, trace, _ = climbed
    parts = tuple(part.model_copy(update={"cache_slots": 0}) for part in plan.parts)
    idle = plan.model_copy(update={"parts": parts, "collapse_gap_bytes": 0})
    settings = list[Placed]()

    def once(artifact, setting, trace):
        settings.append(setting)
        return simulated(artifact, setting, trace)

    monkeypatch.setattr(ladder, "simulated", once)
    steps = {step.name: step for step in climb(artifact, idle, trace, MODEL)}
    assert len(settings) < sum(not name.startswith(("naive", "+overlap", "hybrid")) for name in steps)
    for cache, options in (("window", {}), ("linked", {"linked_over": "lfu"})):
        alone = Placed(idle.model_copy(update={"cache": cache, "cache_options": options}), "direct", ordered=True)
        assert in_effect(alone) == in_effect(Placed(idle, "direct", ordered=True))
        assert simulated(artifact, alone, trace) == simulated(artifact, Placed(idle, "direct", ordered=True), trace)


def test_a_policy_with_slots_is_its_own_setting(climbed):
    plan = climbed[1]
    assert any(part.cache_slots for part in plan.parts)
    setting = Placed(plan, "direct", ordered=True)
    assert in_effect(setting) == setting
