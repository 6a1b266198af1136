"""A drawn trace has the statistics that were stated, whatever the seed, and the simulator shows what they do."""

import hashlib
import json
import re
import tracemalloc
from typing import Any

import numpy as np
import pytest

from benchmarks.shared.papers.llm_in_a_flash import aggregated_use
from benchmarks.shared.synthetic.law import frequencies
from benchmarks.shared.synthetic.measured import measured
from benchmarks.shared.synthetic.statistics import Statistics, read_statistics
from benchmarks.shared.synthetic.trace import Synthetic
from coldpress.runtime.artifact.reader import Artifact, open_artifact
from coldpress.runtime.dram.budget import choose_plan
from coldpress.runtime.simulate import simulate
from coldpress.runtime.trace import END, FETCH
from tests.benchmarks.test_sweep import swept
from tests.support.artifacts import Recipe, build_artifact, small_spec
from tests.support.caches import RUNNABLE

NUM_LAYERS, NUM_UNITS = 11, 512
HOT, TOKENS = 133, 300
"""26 % of the units."""
STATED: dict[str, dict[str, Any]] = {
    "by chance": {},
    "repeated": {"repeated": 0.8},
    "all repeated": {"repeated": 1.0, "tokens": 40},
    "flat": {"hot_mass": 0.26, "repeated": 0.3},
    "groups": {"group_units": 5, "coactivation": 0.4},
    "groups by chance": {"group_units": 4},
    "whole groups": {"group_units": 8, "coactivation": 1.0, "repeated": 0.7},
    "half": {"density": 0.5, "hot_share": 0.69, "group_units": 3, "coactivation": 0.7, "repeated": 0.75},
}


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    spec = small_spec(num_hidden_layers=NUM_LAYERS)
    built = build_artifact(tmp_path_factory.mktemp("synthetic") / "a.coldpress", Recipe(spec=spec))
    return open_artifact(built.path)


def stated(**values: Any) -> Statistics:
    return Statistics(**{"density": 0.1, "hot_mass": 0.8, "tokens": TOKENS} | values)


def used_of(artifact: Artifact, asked: Statistics) -> np.ndarray:
    """bool [layers, tokens, units], hottest unit first."""
    used = np.zeros((NUM_LAYERS, asked.tokens, NUM_UNITS), bool)
    place = {layer: np.argsort(artifact.rank(layer, "up_down")) for layer in range(NUM_LAYERS)}
    for event in Synthetic(artifact, asked):
        if event.kind == FETCH:
            used[event.layer, event.token - 1, place[event.layer][event.ids]] = True
    return used


def coactivation_of(artifact: Artifact, asked: Statistics) -> float:
    """Loevinger's H over all pairs of each group, from the covariances of what was drawn."""
    found, most, used = 0.0, 0.0, used_of(artifact, asked)
    for layer in range(NUM_LAYERS):
        (section,) = [one for one in artifact.manifest.flash.sections if layer in one.layers]
        by_id = np.empty_like(used[layer])
        by_id[:, artifact.rank(layer, "up_down")] = used[layer]
        places = by_id[:, artifact.order(section)].astype(float)
        covariance, mean = np.cov(places, rowvar=False, bias=True), places.mean(axis=0)
        allowed = np.minimum.outer(mean, mean) - np.outer(mean, mean)
        group = np.arange(NUM_UNITS) // asked.group_units
        pairs = np.triu(group[:, None] == group, 1)
        found, most = found + covariance[pairs].sum(), most + allowed[pairs].sum()
    return found / most


@pytest.mark.slow
@pytest.mark.parametrize("case", STATED)
def test_a_trace_has_the_statistics_that_were_stated(artifact: Artifact, case: str) -> None:
    asked = stated(**STATED[case])
    used, trace = used_of(artifact, asked), Synthetic(artifact, asked)
    expected, found = trace.expected, measured(trace)
    density, hot = asked.density, round(asked.hot_share * NUM_UNITS)
    assert used.mean() == pytest.approx(density, rel=0.05)
    assert used[..., :hot].sum() / used.sum() == pytest.approx(asked.hot_mass, abs=0.02)
    again = (used[:, 1:] & used[:, :-1]).sum() / used[:, 1:].sum()
    assert again == pytest.approx(asked.repeated or expected.repeated, abs=0.02)
    assert (found.density, found.repeated) == (pytest.approx(used.mean()), pytest.approx(again))
    assert found.hot_mass == pytest.approx(used[..., :hot].sum() / used.sum())
    assert (expected.density, expected.hot_mass) == (pytest.approx(density), asked.hot_mass)
    if asked.group_units == 1:
        assert found.coactivation is expected.coactivation is None
    else:
        assert expected.coactivation == asked.coactivation
        assert found.coactivation == pytest.approx(asked.coactivation, abs=0.02)
        assert coactivation_of(artifact, asked) == pytest.approx(asked.coactivation, abs=0.05)


@pytest.mark.parametrize("case", ["by chance", "repeated", "groups", "whole groups"])
def test_every_unit_is_used_with_its_probability(artifact: Artifact, case: str) -> None:
    """At the first token as at the last: the process does not start from nowhere."""
    asked = stated(**STATED[case])
    chances = frequencies(NUM_UNITS, 0.1, asked.hot_share, asked.hot_mass)
    traces = [used_of(artifact, asked.model_copy(update={"tokens": 2, "seed": seed})) for seed in range(60)]
    for token in range(2):
        found = np.mean([used[:, token] for used in traces], axis=(0, 1))
        error = np.sqrt(chances * (1 - chances) / (60 * NUM_LAYERS))
        assert np.abs((found - chances) / error).max() < 5
        assert np.abs((found - chances) / error).mean() < 1


@pytest.mark.parametrize(("density", "hot_share", "hot_mass"), [(0.1, 0.26, 0.8), (0.03, 0.2, 0.9), (0.5, 0.69, 0.8)])
def test_popularity_is_a_power_law(density: float, hot_share: float, hot_mass: float) -> None:
    found = frequencies(14336, density, hot_share, hot_mass)
    assert found.mean() == pytest.approx(density)
    assert found[: round(hot_share * 14336)].sum() / found.sum() == pytest.approx(hot_mass)
    free = found < found.max()
    assert (free | (found == 0.98)).all()
    assert not free[: np.argmax(free)].any()
    ranks = np.log(np.arange(1, 14337))[free]
    slope, start = np.polyfit(ranks, np.log(found[free]), 1)
    assert slope < 0
    assert np.log(found[free]) == pytest.approx(slope * ranks + start, abs=1e-9)


def test_a_window_of_five_tokens_is_that_of_the_paper(artifact: Artifact) -> None:
    """LLM in a flash C.1: OPT 6.7B uses 10 % of the neurons at a token, and 24 % in five; PowerInfer has OPT's skew."""
    used = used_of(artifact, stated(repeated=0.57))
    assert np.mean([aggregated_use(layer, 5) for layer in used]) == pytest.approx(0.24, abs=0.01)


def test_a_seed_gives_the_same_trace_everywhere(artifact: Artifact) -> None:
    """Also on another machine, on which the digest would differ if numbers were not exact."""
    asked = stated(density=0.25, repeated=0.8, group_units=4, coactivation=0.5, tokens=4)
    first, again, other = (used_of(artifact, asked.model_copy(update={"seed": seed})) for seed in (0, 0, 1))
    assert (first == again).all()
    assert (first != other).any(axis=(1, 2)).all(), "every layer is drawn anew"
    assert all((first[0] != layer).any() for layer in first[1:]), "layers have draws of their own"
    assert hashlib.sha256(np.packbits(first).tobytes()).hexdigest()[:16] == "23c49d187819528a"


def test_a_trace_has_tokens_parts_and_ids_in_order(artifact: Artifact) -> None:
    events = list(Synthetic(artifact, stated(tokens=3)))
    each = [*((FETCH, layer) for layer in range(NUM_LAYERS)), (END, 0)]
    assert [(event.token, event.kind, event.layer) for event in events] == [
        (token, *one) for token in (1, 2, 3) for one in each
    ]
    for event in events:
        assert event.ids.dtype == np.int32
        assert (np.diff(event.ids) > 0).all()


def test_density_is_the_plans_unless_it_is_stated(artifact: Artifact) -> None:
    assert {part.density for part in artifact.manifest.plans[0].parts} == {0.25}
    trace = Synthetic(artifact, Statistics())
    assert trace.expected.density == pytest.approx(0.25)
    assert measured(trace).density == pytest.approx(0.25, rel=0.05)


def test_one_statistic_alone_is_enough(artifact: Artifact) -> None:
    """Hot units then have as many uses as the density allows."""
    trace = Synthetic(artifact, Statistics(density=0.5, tokens=8))
    assert trace.expected.density == pytest.approx(0.5, abs=0.01)
    assert 0.4 < trace.expected.hot_mass < 0.52


@pytest.mark.slow
def test_every_cache_simulates_a_drawn_trace_in_one_pass(artifact: Artifact) -> None:
    trace, plan = Synthetic(artifact, stated(repeated=0.6, tokens=50)), choose_plan(artifact.manifest)
    plans = {name: plan.model_copy(update={"cache": name}) for name in (*RUNNABLE, "belady")}
    found = {name: simulate(artifact, one, trace) for name, one in plans.items()}
    assert {one.num_tokens for one in found.values()} == {50}
    assert found["belady"].misses < min(found[name].misses for name in RUNNABLE)
    assert len({one.hits + one.misses for one in found.values()}) == 1
    for name in ("lru", "belady"):
        once = simulate(artifact, plans[name], iter(trace))
        assert (once.extents_sha256, once.modelled_s) == (found[name].extents_sha256, found[name].modelled_s)


@pytest.mark.slow
def test_a_longer_trace_takes_no_more_memory(artifact: Artifact) -> None:
    plan = choose_plan(artifact.manifest)

    def peak_bytes(tokens: int) -> int:
        tracemalloc.start()
        simulate(artifact, plan, Synthetic(artifact, stated(tokens=tokens)))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak

    peak_bytes(10)  # what is made once is there from here on
    trace_bytes = sum(event.ids.nbytes for event in Synthetic(artifact, stated(tokens=90)))
    assert peak_bytes(100) < peak_bytes(10) + trace_bytes / 10


@pytest.mark.slow
def test_a_simulation_shows_what_statistics_do(artifact: Artifact) -> None:
    """Repetition gives hits, skew gives hits of pinned units, and neighbours that are used together share reads."""
    plan = choose_plan(artifact.manifest)

    def run_of(cache: str, **values: Any) -> Any:
        changed = plan.model_copy(update={"cache": cache, "collapse_gap_bytes": 0})
        return simulate(artifact, changed, Synthetic(artifact, stated(tokens=100, **values)))

    assert run_of("lru", repeated=0.9).hit_rate > 1.1 * run_of("lru").hit_rate
    assert run_of("static").hit_rate > 2 * run_of("static", hot_mass=0.26).hit_rate
    apart, together = (run_of("static", group_units=8, coactivation=share) for share in (0.0, 1.0))
    assert together.misses == pytest.approx(apart.misses, rel=0.1)
    assert together.reads < 0.9 * apart.reads
    assert together.read_bytes < 0.7 * apart.read_bytes


@pytest.mark.slow
def test_the_command_says_what_was_asked_and_what_was_drawn(
    artifact: Artifact, capsys: pytest.CaptureFixture[str]
) -> None:
    told = (artifact.path, "--synthetic", "density=0.2:repeated=0.7:tokens=60:seed=3")
    code, out, err = swept(capsys, *told, "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert len(found["runs"]) == 1
    assert found["synthetic"]["stated"] == Statistics(density=0.2, repeated=0.7, tokens=60, seed=3).model_dump()
    asked, achieved = found["synthetic"]["asked"], found["synthetic"]["achieved"]
    assert asked == {
        "density": pytest.approx(0.2),
        "hot_mass": 0.8,
        "repeated": pytest.approx(0.7),
        "coactivation": None,
    }
    drawn = Synthetic(artifact, Statistics(density=0.2, repeated=0.7, tokens=60, seed=3))
    assert achieved == measured(drawn)._asdict()
    out = swept(capsys, *told)[1]
    assert "drawn, seed 3" in out
    assert f"{achieved['repeated']:.3f}" in out


@pytest.mark.slow
def test_a_sweep_draws_one_trace(artifact: Artifact, capsys: pytest.CaptureFixture[str]) -> None:
    told = (artifact.path, "--synthetic", "density=0.1:tokens=40", "--json")
    rows = json.loads(swept(capsys, *told, "--cache", "lru,belady")[1])
    plan, trace = choose_plan(artifact.manifest), Synthetic(artifact, Statistics(density=0.1, tokens=40))
    for row in rows["runs"]:
        metrics = simulate(artifact, plan.model_copy(update={"cache": row["cache"]}), trace)
        assert row["hit_rate"] == metrics.hit_rate
        assert json.loads(swept(capsys, *told, "--cache", row["cache"])[1])["synthetic"] == rows["synthetic"]


@pytest.mark.parametrize(
    ("told", "sentence"),
    [
        (
            "density=0.5:hot_mass=0.8",
            r"hot_mass is 0\.8, expected 0\.26 to 0\.51, since a token uses 0\.5 of the 512 units and 133",
        ),
        ("hot_mass=0.1", r"hot_mass is 0\.1, expected 0\.26 to "),
        ("density=0.1:repeated=0.3", r"repeated is 0\.3, expected at least 0\.4\d\d, since units"),
        ("coactivation=0.5", "in groups of one unit, expected of several; state group_units, too"),
        ("densty=0.1", "unknown statistic of a trace 'densty'. Did you mean 'density'?"),
        ("density", "'density' is no statistic of a trace, expected such as density=0.1:repeated=0.6"),
        ("density=1.5", "statistic density of a trace is 1.5, expected share of the units that a token uses"),
        ("tokens=1", "statistic tokens of a trace is 1, expected decoded tokens"),
        ("seed=much", "statistic seed of a trace is 'much', expected of the draws"),
    ],
)
def test_statistics_that_no_trace_has_are_one_sentence(
    artifact: Artifact, capsys: pytest.CaptureFixture[str], told: str, sentence: str
) -> None:
    for more in ((), ("--cache", "lru,lfu")):
        code, out, err = swept(capsys, artifact.path, "--synthetic", told, *more)
        assert (code, out) == (2, "")
        assert len(err.splitlines()) == 1
        assert re.search(sentence, err)


def test_statistics_are_read_as_they_are_written() -> None:
    assert read_statistics(
        "density=0.1:hot_share=0.2:hot_mass=0.7:group_units=8:coactivation=1:tokens=9"
    ) == Statistics(density=0.1, hot_share=0.2, hot_mass=0.7, group_units=8, coactivation=1.0, tokens=9)
