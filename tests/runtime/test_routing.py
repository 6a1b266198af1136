"""How experts are chosen by what is in DRAM: each way alone, and in a run."""

import shutil

import numpy as np
import pytest

from coldpress.runtime import plugins
from coldpress.runtime.artifact import errors
from coldpress.runtime.artifact.reader import open_artifact
from coldpress.runtime.generate.session import Session
from coldpress.runtime.routers import router_of
from coldpress.runtime.routing import EXACT, PACKAGE, Routing, cache_prior, read_choice
from coldpress.runtime.trace import FETCH, Recorder
from coldpress.schemas.errors import ColdpressError, UnknownNameError
from coldpress.schemas.families import BLOCKS, num_units
from tests.support.artifacts import Recipe, build_artifact, change_manifest, refuse, small_spec

LAYERS, EXPERTS, CHOSEN, WIDTH = 11, 8, 2, 32
ALL_IN_DRAM = {"pinned_share": 1.0, "slots_share": 0.0}
SPEC = small_spec(
    num_hidden_layers=LAYERS,
    hidden_act="silu",
    num_experts=EXPERTS,
    num_experts_per_tok=CHOSEN,
    intermediate_size=WIDTH,
)
UNITS = num_units(BLOCKS, SPEC) // EXPERTS
TOKENS = [int(token) for token in np.random.default_rng(5).integers(0, SPEC.vocab_size, 40)]
STEERED = {"routing": "cache_prior", "routing_strengths": [0.6] * LAYERS}
RECIPE = Recipe(spec=SPEC, method="dense", context_length=64, cache="lru", pinned_share=0.0, slots_share=0.4)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    return build_artifact(tmp_path_factory.mktemp("mixture") / "a.coldpress", RECIPE)


def decoded(path, **settings):
    """Logits of each token, the experts of each token and layer, and the bytes read."""
    recorder = Recorder()
    with Session(path, recorder=recorder, **settings) as session:
        session.decoder.begin(len(TOKENS))
        logits = np.stack([session.decoder.decode(token) for token in TOKENS])
        read_bytes = session.store.counters.metrics().read_bytes if hasattr(session.store.counters, "metrics") else 0
    experts = [np.unique(event.ids // UNITS) for event in recorder.events if event.kind == FETCH]
    return logits, experts, read_bytes


@pytest.mark.parametrize("name", plugins.names(PACKAGE))
def test_a_strength_of_zero_and_equal_shares_leave_the_choice_of_the_router(name):
    way, random = plugins.load(PACKAGE, Routing, name), np.random.default_rng(1)
    scores = random.standard_normal((50, EXPERTS)).astype(np.float32)
    router = router_of(SPEC)
    for present, strength in [(random.random(EXPERTS), 0.0), (np.ones(EXPERTS), 0.5), (np.zeros(EXPERTS), 0.5)]:
        found = way.scores(scores, present.astype(np.float32), strength)
        np.testing.assert_array_equal(router.choose(found), router.choose(scores))


def test_experts_in_dram_come_before_others_and_after_the_best():
    scores = np.array([[4.0, 3.0, 2.0, 1.0, 0.0], [0.0, 1.0, 2.0, 3.0, 4.0]], np.float32)
    present = np.array([0.0, 0.0, 1.0, 0.5, 1.0], np.float32)
    found = cache_prior.Plugin().scores(scores, present, 0.5)  # a range of 4: up to 2 more
    np.testing.assert_array_equal(found, [[np.inf, 3.0, 4.0, 2.0, 2.0], [0.0, 1.0, 4.0, 4.0, np.inf]])
    assert scores[0, 2] == 2.0, "the router's own scores weigh the experts"


def test_a_run_with_all_units_in_dram_is_not_changed(tmp_path):
    path = build_artifact(tmp_path / "a", Recipe(spec=SPEC, method="dense", context_length=64, **ALL_IN_DRAM)).path
    expected, found = decoded(path), decoded(path, routing="cache_prior:0.5")
    np.testing.assert_array_equal(found[0], expected[0])


def test_a_run_asks_for_the_experts_that_the_prior_prefers(mixture):
    """Replays the choice of the first layer, whose inputs are the same in both runs, with a cache of its own."""
    plain, steered = decoded(mixture.path), decoded(mixture.path, routing="cache_prior:0.6")
    first = [experts[::LAYERS] for experts in (plain[1], steered[1])]
    assert all(len(experts) == CHOSEN for experts in first[1])
    assert any(not np.array_equal(one, other) for one, other in zip(*first, strict=True))
    again = decoded(mixture.path, routing="cache_prior:0.6")
    np.testing.assert_array_equal(again[0], steered[0])


def misses(experts, slots):
    """Counts how often an expert is used that was not among the last distinct ones that fill the slots of a layer."""
    count = 0
    for layer in range(LAYERS):
        held: list[int] = []
        for used in experts[layer::LAYERS]:
            count += sum(int(expert) not in held for expert in used)
            held = [expert for expert in held if expert not in used] + [int(expert) for expert in used]
            held = held[-slots:]
    return count


def test_a_stronger_prior_misses_fewer_experts(mixture):
    counts = [misses(decoded(mixture.path, routing=f"cache_prior:{one}")[1], 3) for one in (0.01, 0.3, 1.0)]
    assert counts[0] > 1.2 * counts[1] > counts[2]


@pytest.mark.slow
def test_the_exact_way_takes_back_what_a_plan_says(mixture, tmp_path):
    path = shutil.copytree(mixture.path, tmp_path / "a")
    change_manifest(path, lambda manifest: manifest["plans"][0].update(STEERED))
    by_plan, steered = decoded(path), decoded(mixture.path, routing="cache_prior:0.6")
    np.testing.assert_array_equal(by_plan[0], steered[0])
    np.testing.assert_array_equal(decoded(path, routing=EXACT)[0], decoded(mixture.path)[0])


def test_tokens_together_are_refused(mixture):
    with Session(mixture.path, routing="cache_prior:0.2") as session:
        session.decoder.begin(8)
        with pytest.raises(ColdpressError, match="the routing 'cache_prior' uses what is in DRAM"):
            session.decoder.decode_many(np.array([1, 2]))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("cache_prior", "above 0"),
        ("cache_prior:-1", "above 0"),
        ("cache_prior:inf", "above 0"),
        ("cache_prior:much", "above 0"),
        ("top_k:1", "expected top_k"),
    ],
)
def test_a_routing_that_cannot_be_is_refused(text, words):
    with pytest.raises(ColdpressError, match=words):
        read_choice(text)


def test_an_unknown_routing_and_a_model_without_experts_are_refused(mixture, tmp_path):
    with pytest.raises(UnknownNameError, match="cache_prior"):
        Session(mixture.path, routing="nothing:1")
    dense = build_artifact(tmp_path / "a", Recipe(spec=small_spec(num_hidden_layers=2))).path
    with pytest.raises(ColdpressError, match="no experts"):
        Session(dense, routing="cache_prior:0.2")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"routing": "cache_prior"}, f"{LAYERS} numbers"),
        (STEERED | {"routing_strengths": [-0.1] * LAYERS}, f"{LAYERS} numbers"),
        ({"routing_strengths": [0.1] * LAYERS}, "0 numbers"),
        (STEERED | {"draft": "lookup", "draft_tokens": 2}, "draft"),
    ],
)
def test_a_plan_whose_routing_contradicts_itself_is_refused(mixture, tmp_path, fields, words):
    path = shutil.copytree(mixture.path, tmp_path / "a")
    change_manifest(path, lambda manifest: manifest["plans"][0].update(fields))
    refuse(path, errors.PlanError, words)


def test_a_plan_with_an_unknown_routing_is_left_out(mixture, tmp_path):
    path = shutil.copytree(mixture.path, tmp_path / "a")

    def change(manifest):
        plan = manifest["plans"][0]
        manifest["plans"].append(plan | {"name": "other", "routing": "oracle", "routing_strengths": [1.0] * LAYERS})

    change_manifest(path, change)
    opened = open_artifact(path)
    assert [plan.name for plan in opened.manifest.plans] != ["other"]
    assert "the routing 'oracle'" in opened.skipped_plans[0]
