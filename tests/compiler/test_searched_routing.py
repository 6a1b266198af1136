"""Routers that prefer experts in DRAM, as the search of `method=auto` takes them: measured, replayed, kept in the
quality, and settled by `route` within what the search left."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.shared.searches import SEARCHES
from coldpress.compiler.activity.calibration_pass import PassConfig, count_activity
from coldpress.compiler.activity.forward import LayerStream
from coldpress.compiler.activity.layer_counts import ActivityRule, countable_families, exact_families
from coldpress.compiler.candidates import candidates
from coldpress.compiler.io import Workspace, load_arrays
from coldpress.compiler.quality.variants import RESIDENT_SHARES, STRENGTHS
from coldpress.compiler.search import Candidate, Goal, Judged, Space, fastest_dense
from coldpress.compiler.search.floor import Floor, largest_strength
from coldpress.compiler.search.settings import AllocateConfig
from coldpress.compiler.stages import allocate, explore, ingest
from coldpress.compiler.stages.explore import ExploreConfig
from coldpress.compiler.stages.ingest import IngestConfig
from coldpress.compiler.workflow.settings import needs_routing, resolve
from coldpress.runtime.arithmetic import largest
from coldpress.schemas.activations import Activations
from coldpress.schemas.corpus import SPLITS, Corpus, Split
from coldpress.schemas.curves import Curves, RoutedPoint, RoutingCurve, Unexplored
from coldpress.schemas.errors import ColdpressError
from coldpress.schemas.model import Model
from coldpress.schemas.sparsity import SearchedRouting, Sparsity
from tests.support.curves import NO_LOSS
from tests.support.models import write_model
from tests.support.statistics import corpus_of_tokens, device_of

LAYERS = 11
WIDE = {"num_local_experts": 8}
RNG = np.random.default_rng(8)
TOKENS: dict[Split, np.ndarray] = {split: RNG.integers(0, 384, (2, 48)).astype(np.int32) for split in SPLITS}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mixture")


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    write_model(folder / "tiny", model_type="mixtral", num_hidden_layers=LAYERS, overrides=WIDE)
    return ingest.run(IngestConfig(model=str(folder / "tiny")), Workspace(folder / "ingest", "test"))


@pytest.fixture(scope="module")
def corpus(folder: Path) -> Corpus:
    return corpus_of_tokens(folder / "corpus", TOKENS)


@pytest.fixture(scope="module")
def activations(model: Model, corpus: Corpus, folder: Path) -> Activations:
    families = countable_families(model.spec)
    activity = ActivityRule(exact_families(families, model.spec))
    return count_activity(PassConfig(), model, corpus, families, activity, Workspace(folder / "calibrate", "test"), 2)


@pytest.fixture(scope="module")
def curves(model: Model, corpus: Corpus, activations: Activations, folder: Path) -> Curves:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(explore, "candidates", lambda *_: ("dense",))
        config = ExploreConfig(method="auto", routing="auto", explore_tokens=96, explore="whole")
        found = explore.run(config, model, corpus, activations, Workspace(folder / "explore", "test"), 2)
    others = (name for name in candidates(model.spec, {}) if name != "dense")
    unexplored = tuple(Unexplored(method=name, reason="was not measured here") for name in others)
    return found.model_copy(update={"unexplored": unexplored})


def divided(model: Model, activations: Activations, curves: Curves, folder: Path, **settings: Any) -> Sparsity:
    values: dict[str, Any] = {
        "method": "auto",
        "format": "fp16",
        "cache": "lru",
        "dram_budget": "45%",
        "context_length": 64,
        "routing": "auto",
        "max_ppl_ratio": 1.05,
    }
    work = Workspace(folder / str(settings), "test")
    return allocate.run(AllocateConfig(**values | settings), model, activations, device_of(), work, curves=curves)


def losing(curves: Curves, ratio: Callable[[float], float], **changes: None) -> Curves:
    """Returns curves whose perplexity ratios are those of `ratio` by strength; `changes` replace fields of points."""

    def point(one: RoutedPoint) -> RoutedPoint:
        return one.model_copy(update={"ppl_ratio": ratio(one.strength), "ppl_ratio_error": 0.0, **changes})

    routings = tuple(one.model_copy(update={"points": tuple(map(point, one.points))}) for one in curves.routings)
    return curves.model_copy(update={"routings": routings})


def without_loss(curves: Curves) -> Curves:
    """Returns curves by which any strength keeps the quality: a random model loses more than any user would allow."""
    return losing(curves, lambda strength: 1.0)


def test_a_stronger_routing_diverges_more_and_a_larger_cache_less(curves: Curves) -> None:
    assert [curve.resident_share for curve in curves.routings] == list(RESIDENT_SHARES)
    for curve in curves.routings:
        assert curve.routing == "cache_prior"
        assert [point.strength for point in curve.points] == list(STRENGTHS)
        klds = [point.mean_kld for point in curve.points]
        assert klds == sorted(klds)
        assert klds[0] > 0


def test_the_trace_has_the_scores_by_which_experts_are_chosen(model: Model, curves: Curves) -> None:
    """Of the first layer, whose input no routing changed: all bits of float16, which tell experts apart as float32."""
    seen: list[np.ndarray] = []
    stream = LayerStream(model)
    hidden = stream.embed(TOKENS["validation"])
    stream.run_layer(0, hidden, lambda _: {"router_scores": lambda found: seen.append(found.numpy().copy())})
    exact, traced = np.concatenate(seen), load_arrays(curves.trace)["0.router_scores"]
    assert traced.dtype == np.float16
    np.testing.assert_array_equal(traced, exact.astype(np.float16)[: len(traced)])
    np.testing.assert_array_equal(largest(traced.astype(np.float32), 2), largest(exact[: len(traced)], 2))


def losses(strength: float) -> dict[str, Any]:
    return NO_LOSS | {"mean_kld": strength**2, "ppl_ratio_error": None}


def curve_of(**ratios: float) -> RoutingCurve:
    """`s2=1.02`: a strength of .2 loses 1.02; it diverges by the strength's square."""
    points = (
        RoutedPoint(strength=int(name[1:]) / 10, ppl_ratio=ratio, **losses(int(name[1:]) / 10))
        for name, ratio in ratios.items()
    )
    return RoutingCurve(routing="cache_prior", resident_share=0.25, points=tuple(points))


@pytest.mark.parametrize(
    ("most", "most_kld", "strength"),
    [
        (1.06, math.inf, 0.6),
        (1.0401, math.inf, 0.4),
        (1.02, math.inf, 0.2),
        (1.01, math.inf, 0.1),
        (0.99, math.inf, 0.0),
        (1.06, 0.0401, 0.2),
        (1.06, 0.0201, 0.1),  # linear between 0 and the divergence at .2
    ],
)
def test_the_largest_strength_that_keeps_a_quality(most: float, most_kld: float, strength: float) -> None:
    found = largest_strength(curve_of(s2=1.02, s4=1.04, s6=1.06), most, most_kld)
    assert found == pytest.approx(strength)


def test_a_format_takes_its_part_and_the_worse_size_of_dram_counts(curves: Curves) -> None:
    loss = curves.formats[0].model_copy(update={"format": "int4_group32", "ppl_ratio": 1.01, "ppl_ratio_error": None})
    few, many = curve_of(s2=1.02, s4=1.04), curve_of(s2=1.01, s4=1.02).model_copy(update={"resident_share": 0.6})
    floor = Floor(curves.model_copy(update={"formats": (loss,), "routings": (few, many)}), 1.0201 * 1.01)
    (found, *smaller) = floor.routings("cache_prior", "int4_group32", 0.4, math.inf)
    assert (found.strength, [one.strength for one in smaller]) == (0.2, [0.1, 0.05])
    assert found.mean_kld == pytest.approx(0.04)
    assert [one.strength for one in floor.routings("cache_prior", "int4_group32", 0.7, math.inf)] == [0.4, 0.2, 0.1]
    assert [one.strength for one in floor.routings("cache_prior", "fp16", 0.1, math.inf)] == [0.3, 0.15, 0.075]
    assert floor.routing_ratio(found, 0.4) == pytest.approx(1.02)
    assert floor.routings("another", "fp16", 0.4, math.inf) == []
    assert Floor(floor.curves, math.inf).routings("cache_prior", "fp16", 0.4, math.inf) == []


def test_a_search_takes_the_routing_that_saves_seconds(
    model: Model, activations: Activations, curves: Curves, folder: Path
) -> None:
    found = divided(model, activations, without_loss(curves), folder / "free")
    assert found.routing is not None
    assert found.routing.strength == STRENGTHS[-1]
    assert found.routing.mean_kld >= max(curve.points[-1].mean_kld for curve in curves.routings)
    taken = found.tried[0]
    assert "with routers that prefer experts in DRAM (cache_prior:0.8)" in (taken.reason or "")
    exact = divided(model, activations, without_loss(curves), folder / "exact", routing="top_k")
    assert exact.routing is None
    assert "routing" not in exact.tried[0].model_dump(mode="json"), "as records without experts always read"
    before = exact.tried[0]
    assert taken.token_s is not None
    assert before.token_s is not None
    assert taken.token_s < 0.95 * before.token_s
    assert taken.hit_rate is not None
    assert before.hit_rate is not None
    assert taken.hit_rate > before.hit_rate


@pytest.mark.slow
def test_a_speed_that_is_enough_takes_the_weakest_routing_that_reaches_it(
    model: Model, activations: Activations, curves: Curves, folder: Path
) -> None:
    """Seconds fall with the strength; a lossless run is too slow, the strongest faster than needed."""
    known = losing(curves, lambda strength: 1 + strength / 50)
    seconds = {
        tried.routing.strength if tried.routing else 0.0: tried.token_s
        for tried in divided(model, activations, known, folder / "front").front
    }
    assert {0.0, 0.2, 0.4, 0.8} <= seconds.keys()
    wanted_s = (seconds[0.2] + seconds[0.4]) / 2
    found = divided(model, activations, known, folder / "fast", min_tokens_per_s=1 / wanted_s)
    assert found.routing is not None
    assert found.routing.strength == 0.4


@pytest.mark.parametrize("settings", [{"routing": "top_k"}, {"draft": "lookup"}, {"dram_budget": "100%"}])
def test_no_routing_is_searched_where_none_may_be(
    model: Model, activations: Activations, curves: Curves, folder: Path, settings: dict[str, str]
) -> None:
    found = divided(model, activations, without_loss(curves), folder / "none", **settings)
    assert [tried.routing for tried in (*found.tried, *found.front)] == [None] * len((*found.tried, *found.front))


@pytest.mark.slow
def test_a_named_routing_goes_as_far_as_its_limit(
    model: Model, activations: Activations, curves: Curves, folder: Path
) -> None:
    limit = max(curve.points[2].mean_kld for curve in curves.routings)
    known = losing(curves, lambda strength: 1.0, mean_kld_error=None)  # with a short text's errors it may fall
    found = divided(model, activations, known, folder / "named", routing="cache_prior", routing_kl=limit * 1.0001)
    taken = [one.routing.strength for one in found.front if one.routing]
    assert max(taken) == pytest.approx(STRENGTHS[2])


def test_a_routed_run_is_not_the_dense_run_that_others_are_compared_with() -> None:
    routing = SearchedRouting(routing="cache_prior", strength=0.1, mean_kld=0.01)
    plain = Judged(Candidate("dense", "fp16", None, "lru"), token_s=1.0, ppl_ratio=1.0, is_whole=True)
    routed = Judged(Candidate("dense", "fp16", None, "lru", routing=routing), token_s=0.97, ppl_ratio=1.01)
    assert fastest_dense([routed, plain]) is plain
    assert Goal().best([routed, plain]) is plain, "a gain within the margin is none"


@pytest.mark.parametrize("name", ["beam", "exhaustive"])
def test_a_dense_run_is_routed_though_other_selectors_are_faster_without(name: str) -> None:
    """ActiveFlow's choice has no routing."""
    routing = SearchedRouting(routing="cache_prior", strength=0.1, mean_kld=0.01)
    seconds = {"dense": 2.0, "topk": 1.0, "wina": 1.1, "dip": 1.2, "gate": 1.3, "up": 1.4}
    space = Space(
        methods=tuple(seconds),
        formats=("fp16",),
        caches=("lru",),
        densities=lambda method, _: (None,) if method == "dense" else (0.5,),
        routings=lambda method, _: (routing,) if method == "dense" else (),
    )

    def judge(one: Candidate) -> Judged:
        token_s = 0.5 if one.routing else seconds[one.method]
        return Judged(one, token_s, 1.0, hit_rate=0.1, is_whole=one.method == "dense" and not one.routing)

    best = Goal().best(SEARCHES[name](space, judge, Goal()))
    assert best is not None
    assert best.candidate.routing == routing


@pytest.mark.parametrize(
    ("keys", "routing"), [({}, "auto"), ({"method": "dense"}, "top_k"), ({"routing": "top_k"}, "top_k")]
)
def test_the_routing_is_open_where_the_method_is(
    folder: Path, model: Model, tmp_path: Path, keys: dict[str, str], routing: str
) -> None:
    config = resolve({"model": str(folder / "tiny"), "build_dir": str(tmp_path), **keys})
    assert config["routing"] == routing
    assert needs_routing(config) == (routing == "auto")
    assert config.of_stage("route")["routing"] == routing


def test_a_model_without_experts_has_no_open_routing(tmp_path: Path) -> None:
    named = {"model": str(write_model(tmp_path / "llama")), "build_dir": str(tmp_path)}
    config = resolve(named)
    assert config["method"] == "auto"
    assert config["routing"] == "top_k"
    with pytest.raises(ColdpressError, match="routing=auto was asked for, and method=dense"):
        resolve(named | {"method": "dense", "routing": "auto"})
